"""cuBLASLt on Numba device arrays: y = r(x W^T) in BF16 with float32 accumulation, one plan per algorithm.

Which algorithms may run is not decided here: see ``selection.py``.

Source: cuBLASLt's manual; the binding is NVIDIA's ``nvmath.bindings.cublasLt``.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jev_kernels.gemm.problem import Key, layout
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

    x [>= rows, K], weight [N, K], y [>= rows, N], as ``problem.layout`` checks them.

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
