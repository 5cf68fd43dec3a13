"""cuBLASLt on Numba device arrays: y = r(x W^T) in BF16 with float32 accumulation, one plan per algorithm.

Which algorithms may run is not decided here: see ``gemm.py``.

Source: cuBLASLt's manual; the binding is NVIDIA's ``nvmath.bindings.cublasLt``.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jev_kernels.runtime import device
from jev_kernels.runtime.device import DeviceError
from jev_kernels.runtime.launch import address, stream_address


@dataclass(frozen=True)
class Algorithm:
    """A cuBLASLt algorithm: its opaque words, and what can be read from them."""
    words: tuple[int, ...]
    split_k: int = field(default=1, compare=False)
    config: tuple[int, ...] = field(default=(), compare=False)     # id, tile, stages, swizzle, custom, inner, cluster

    def __str__(self) -> str:
        return "lt:" + ":".join(f"{w:x}" for w in self.words)

    @classmethod
    def parse(cls, text: str) -> Algorithm:
        """The inverse of str(). Raises ValueError."""
        prefix, *words = text.split(":")
        if prefix != "lt" or len(words) != 8:
            raise ValueError(f"not an algorithm: {text!r}")
        return cls(tuple(int(w, 16) for w in words))


class Key(NamedTuple):
    """A product y [m, n] = x [m, k] W [n, k]^T and how many elements apart rows are. gated: with the activation behind
    it, silu(gate) * up of y's columns."""
    m: int
    n: int
    k: int
    ldx: int
    ldw: int
    ldy: int
    gated: bool = False


class CublasLt:
    """cuBLASLt's handle, workspace and descriptors for y [m, n] = x [m, k] W [n, k]^T.

    Row-major matrices are column-major transposed ones, so the library sees y^T = W x^T with W transposed.
    """

    WORKSPACE = 32 << 20                          # what NVIDIA recommends for Hopper

    def __init__(self):
        try:
            from nvmath.bindings import cublasLt as lt
            self.handle = lt.create()
        except Exception as e:                    # ImportError, or the binding's own for a missing library
            raise DeviceError(f"cuBLASLt cannot be used ({type(e).__name__}: {e}): install the package with the extra "
                              "cuda13 or cuda12 (nvmath-python and nvidia-cublas)") from e
        self.lt, self.version = lt, int(lt.get_version())
        self.workspace = device.Arena(self.WORKSPACE, "cuBLASLt's workspace")
        self.one, self.zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        self._descriptors: dict[Key, tuple] = {}

    def descriptors(self, key: Key) -> tuple[int, int, int, int]:
        """(operation, layout of W, of x, of y) of a product, made once each; they live as long as this object."""
        m, n, k, ldx, ldw, ldy, _ = key
        key = key._replace(gated=False)
        if key not in self._descriptors:
            lt, bf16, f32, compute_32f = self.lt, 14, 0, 68
            operation = lt.matmul_desc_create(compute_32f, f32)
            transpose = np.ones(1, np.int32)
            lt.matmul_desc_set_attribute(operation, int(lt.MatmulDescAttribute.TRANSA), transpose.ctypes.data, 4)
            self._descriptors[key] = (operation, lt.matrix_layout_create(bf16, k, n, ldw),
                                      lt.matrix_layout_create(bf16, k, m, ldx),
                                      lt.matrix_layout_create(bf16, n, m, ldy))
        return self._descriptors[key]

    def heuristics(self, key: Key, alignment: int, split: bool = False) -> list[Algorithm]:
        """What cuBLASLt proposes for a product, best guess first. split: also what adds up in pieces."""
        lt = self.lt
        operation, w, x, y = self.descriptors(key)
        preference = lt.matmul_preference_create()
        which = lt.MatmulPreferenceAttribute

        def prefer(attribute, value, dtype):
            value = np.array([value], dtype)
            lt.matmul_preference_set_attribute(preference, int(attribute), value.ctypes.data, value.nbytes)

        try:
            prefer(which.MAX_WORKSPACE_BYTES, self.WORKSPACE, np.uint64)
            for attribute in (which.MIN_ALIGNMENT_A_BYTES, which.MIN_ALIGNMENT_B_BYTES, which.MIN_ALIGNMENT_C_BYTES,
                              which.MIN_ALIGNMENT_D_BYTES):
                prefer(attribute, alignment, np.uint32)
            if not split:
                prefer(which.REDUCTION_SCHEME_MASK, 0, np.uint32)
            found, count = np.zeros(32, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
            lt.matmul_algo_get_heuristic(self.handle, operation, w, x, y, y, preference, len(found), found.ctypes.data,
                                         count.ctypes.data)
        except lt.cuBLASLtError:
            return []
        finally:
            lt.matmul_preference_destroy(preference)
        return [self._describe(found["algo"][i]) for i in range(count[0]) if found["state"][i] == 0]

    def _describe(self, raw) -> Algorithm:
        algo = np.ascontiguousarray(raw)
        attribute = self.lt.MatmulAlgoConfigAttribute

        def read(which):
            value, wrote = np.zeros(1, np.int32), np.zeros(1, np.uint64)
            self.lt.matmul_algo_config_get_attribute(algo.ctypes.data, int(which), value.ctypes.data,
                                                     2 if which >= attribute.INNER_SHAPE_ID else 4, wrote.ctypes.data)
            return int(value[0])

        return Algorithm(tuple(int(v) for v in algo.view(np.uint64).reshape(-1)), read(attribute.SPLITK_NUM),
                         tuple(read(a) for a in (attribute.ID, attribute.TILE_ID, attribute.STAGES_ID,
                                                 attribute.CTA_SWIZZLING, attribute.CUSTOM_OPTION,
                                                 attribute.INNER_SHAPE_ID, attribute.CLUSTER_SHAPE_ID)))

    def runs(self, key: Key, algorithm: Algorithm) -> bool:
        """Whether the library accepts an algorithm (of other rows, or of a file) for a product."""
        operation, w, x, y = self.descriptors(key)
        algo, result = np.array(algorithm.words, np.uint64), np.zeros(1, self.lt.matmul_heuristic_result_dtype)
        try:
            self.lt.matmul_algo_check(self.handle, operation, w, x, y, y, algo.ctypes.data, result.ctypes.data)
        except self.lt.cuBLASLtError:
            return False
        return result["state"][0] == 0 and result["workspace_size"][0] <= self.WORKSPACE


class BlasPlan:
    """y[:rows] = r(x[:rows] W^T) by one cuBLASLt algorithm, bound to its arrays. ``plan(stream)`` launches it.

    ``pdl`` is accepted and without effect: cuBLASLt's kernels start when the previous one has finished.
    """

    def __init__(self, blas: CublasLt, algorithm: Algorithm, x, weight, y, rows: int):
        self.blas, self.algorithm, self.name = blas, algorithm, str(algorithm)
        key, _ = layout(x, weight, y, rows)
        self._algo = np.array(algorithm.words, np.uint64)
        operation, w_layout, x_layout, y_layout = blas.descriptors(key)
        self._keep = (x, weight, y)
        self._arguments = (
            blas.handle, operation, blas.one.ctypes.data, address(weight), w_layout, address(x), x_layout,
            blas.zero.ctypes.data, address(y), y_layout, address(y), y_layout, self._algo.ctypes.data,
            blas.workspace.pointer, blas.WORKSPACE)

    def __call__(self, stream, pdl: bool = False) -> None:
        self.blas.lt.matmul(*self._arguments, stream_address(stream))


def check_rows(name: str, array) -> None:
    """ValueError unless ``array`` is BF16 [rows, columns], columns side by side, rows at multiples of 16 bytes."""
    if array.dtype != np.uint16 or array.ndim != 2:
        raise ValueError(f"{name}: BF16 held in uint16 [rows, columns] expected, got {array.dtype} {array.shape}")
    if array.strides[1] != 2 or array.strides[0] < 2 * array.shape[1]:
        raise ValueError(f"{name}: columns must be contiguous and rows must not overlap, strides {array.strides}")
    if array.strides[0] % 16 or address(array) % 16:
        raise ValueError(f"{name}: rows must start at multiples of 16 bytes")


def layout(x, weight, y, rows: int) -> tuple[Key, int]:
    """(the key, alignment in bytes that all three arrays have). ValueError names what does not fit."""
    for name, array in (("x", x), ("weight", weight), ("y", y)):
        check_rows(name, array)
    (n, k) = weight.shape
    if x.shape[1] != k:
        raise ValueError(f"x: {x.shape[1]} columns, the weight [{n}, {k}] takes {k}")
    if y.shape[1] != n:
        raise ValueError(f"y: {y.shape[1]} columns, the weight [{n}, {k}] gives {n}")
    if not 1 <= rows <= min(x.shape[0], y.shape[0]):
        raise ValueError(f"rows: {rows} of x {x.shape} and y {y.shape}")
    alignment = 256 if all(address(a) % 256 == 0 for a in (x, weight, y)) else 16
    return Key(rows, n, k, x.strides[0] // 2, weight.strides[0] // 2, y.strides[0] // 2), alignment
