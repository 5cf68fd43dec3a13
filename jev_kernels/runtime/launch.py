"""Launches with what Numba's own launch lacks: clusters, programmatic dependent launch, much shared memory.

A ``Kernel`` is a Python function with an explicit Numba signature, compiled for the current device at first use and
launched through ``cuLaunchKernelEx``. Under the CUDA simulator the same call runs the function there.
"""
from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.core import config
from numba.cuda.np import numpy_support

from jev_kernels.runtime import cubin
from jev_kernels.runtime.errors import driver_error

if config.ENABLE_CUDASIM:
    from jev_kernels.sim import simulator
    from jev_kernels.sim.simulator import register

_CTYPES = {types.int32: ctypes.c_int32, types.uint32: ctypes.c_uint32, types.int64: ctypes.c_int64,
           types.uint64: ctypes.c_uint64, types.float32: ctypes.c_float, types.float64: ctypes.c_double}
KEPT_CONFIGURATIONS = 1024          # of launches, a kernel: every row bucket has its own


def check(result: tuple):
    """The values of a cuda.bindings call, or RuntimeError with the driver's name for what went wrong: DeviceLost when a
    kernel has ended abnormally."""
    if int(result[0]):
        raise driver_error(getattr(result[0], "name", str(result[0])))
    return result[1] if len(result) == 2 else result[1:]


def address(array) -> int:
    """Device address of an array's first element (of host memory, in the simulator)."""
    if config.ENABLE_CUDASIM:
        return register(array)
    return array.__cuda_array_interface__["data"][0]


class View(NamedTuple):
    """An array as launchers see it: address, shape, strides in elements; the array itself, to keep it alive."""
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    array: object


def view(name: str, array, dtype, *shape: int | None) -> View:
    """The address and strides of a device array, after a check of what it is.

    dtype is NumPy's; shape holds one entry per dimension, None where any size will do. The last dimension must be
    contiguous, the others may have any stride. Raises ValueError naming the argument.
    """
    dtype = np.dtype(dtype)
    interface = getattr(array, "__array_interface__" if config.ENABLE_CUDASIM else "__cuda_array_interface__", None)
    if interface is None:
        raise ValueError(f"{name} must be a device array, not {type(array).__name__}")
    if interface["typestr"] != dtype.str:
        raise ValueError(f"{name} must be {dtype}, not {np.dtype(interface['typestr'])}")
    have, size = tuple(interface["shape"]), dtype.itemsize
    if len(have) != len(shape) or not all([want is None or want == n for want, n in zip(shape, have)]):
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape [{expected}], not {list(have)}")
    strides = interface.get("strides")
    if strides is None:
        strides = [size]
        for n in have[:0:-1]:
            strides.insert(0, strides[0] * n)
    steps = tuple([s // size for s in strides])
    if not all([step * size == s for step, s in zip(steps, strides)]) or (have[-1] > 1 and steps[-1] != 1):
        raise ValueError(f"{name} must be contiguous in its last dimension, not have strides {list(strides)} in bytes")
    at = register(array) if config.ENABLE_CUDASIM else interface["data"][0]
    return View(at, have, steps, array)


def aligned(*views: View, itemsize: int = 2) -> bool:
    """Whether every row of the views starts at a multiple of 16 bytes, and ends there too."""
    return all(v.address % 16 == 0 and v.shape[-1] * itemsize % 16 == 0
               and all(s * itemsize % 16 == 0 for s in v.strides[:-1]) for v in views)


def live(counts, index: int) -> int:
    """Address of one entry of the pool's ``counts`` (int32 [16]): the number of rows that are alive."""
    v = view("counts", counts, np.int32, None)
    if not 0 <= index < v.shape[0]:
        raise ValueError(f"counts has {v.shape[0]} entries, no index {index}")
    return v.address + 4 * index


def pack_argument(typ, value) -> tuple[list, list]:
    """Values and ctypes of one kernel parameter as Numba's compiled code expects them.

    An array is passed as two unused pointers, item count, item size, address, shape and strides in bytes.
    """
    if not isinstance(typ, types.Array):
        return [value], [_CTYPES[typ]]
    info = value.__cuda_array_interface__
    shape = info["shape"]
    itemsize = int(info["typestr"][2:])
    strides = info.get("strides")
    if strides is None:
        strides, step = [], itemsize
        for n in reversed(shape):
            strides.insert(0, step)
            step *= n
    count = 1
    for n in shape:
        count *= n
    flat = [0, 0, count, itemsize, info["data"][0], *shape, *strides]
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    return flat, [pointer, pointer, integer, integer, pointer] + [integer] * (2 * len(shape))


def simulated_argument(typ, value):
    """A kernel parameter for the simulator: checked against its type, which on a GPU nobody does."""
    if isinstance(typ, types.Array):
        if value.dtype != numpy_support.as_dtype(typ.dtype) or len(value.shape) != typ.ndim:
            raise TypeError(f"expected {typ}, got {value.dtype} {tuple(value.shape)}")
        return value
    if isinstance(typ, types.Float):
        return getattr(np, typ.name)(value)
    if int(typ(value)) != int(value):
        raise TypeError(f"{value} does not fit into {typ}")
    return typ(value) if typ == types.uint64 else int(value)


class Kernel:
    """One compiled kernel. ``kernel(stream, grid, *args)`` launches it.

    function    a plain Python function, the kernel's source
    signature   Numba types of its parameters, e.g. ``types.void(types.uint16[:, :], types.int32)``
    threads     threads of a block: an int, or up to three dimensions
    smem        bytes of dynamic shared memory
    cluster     blocks of a thread-block cluster along x (sm_90)
    resident    blocks that shall fit a multiprocessor at once: bounds the registers
    """

    def __init__(self, function, signature, threads, smem: int = 0, cluster: int = 1, resident: int = 1):
        self.function, self.signature, self.smem, self.cluster = function, signature, smem, cluster
        self.resident = resident
        self.threads = tuple(threads) if isinstance(threads, (tuple, list)) else (threads,)
        self.threads += (1,) * (3 - len(self.threads))
        self.name = function.__name__
        module, name = function.__module__, function.__qualname__
        # Where the code comes from, for its file: a factory says so itself (``cubin.factory``).
        read = None if "<locals>" in name else cubin.origin(module)
        self.origin = read and (read, name)
        self._handle = None
        arrays = any(isinstance(t, types.Array) for t in signature.args)
        self._scalars = None if arrays else tuple(_CTYPES[t] for t in signature.args)    # nothing to unpack in a launch
        self._configurations: dict[tuple, object] = {}

    @property
    def block_size(self) -> int:
        return self.threads[0] * self.threads[1] * self.threads[2]

    def compile_ptx(self, cc=(9, 0, "a")) -> str:
        """PTX for a compute capability, to read; needs no GPU. ``compile_ltoir`` is what runs."""
        return self._compile(cc, "ptx")

    def compile_ltoir(self, cc=(9, 0, "a")) -> bytes:
        """What nvJitLink makes the machine code of, for a compute capability; needs no GPU."""
        return self._compile(cc, "ltoir")

    def _compile(self, cc, output):
        from numba.cuda import dispatcher
        # Numba compiles device functions for the current device, and there may be none.
        asked = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc[:2])
        try:
            return cuda.compile(self.function, self.signature, device=False, abi="numba", cc=cc, output=output,
                                launch_bounds=(self.block_size, self.resident))[0]
        finally:
            dispatcher.get_current_device = asked

    def handle(self):
        """The CUfunction on the current device; compiles at first use, or reads what was compiled before."""
        if self._handle is None:
            from cuda.bindings import driver
            cc = cuda.get_current_device().compute_capability
            machine_code = cubin.code(self, (*cc, "a") if cc >= (9, 0) else tuple(cc))
            # The driver copies the code; the library stays loaded as long as the process.
            library = check(driver.cuLibraryLoadData(machine_code, [], [], 0, [], [], 0))
            kernel = check(driver.cuLibraryGetKernel(library, cubin.entry(machine_code).encode()))
            handle = check(driver.cuKernelGetFunction(kernel))
            if self.smem > 48 * 1024:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(driver.cuFuncSetAttribute(handle, limit, self.smem))
            self._handle = handle
        return self._handle

    def __call__(self, stream, grid, *args, pdl: bool = False):
        """Launch. stream: a Numba stream or a raw CUstream address; grid: an int or up to three dimensions.

        pdl: programmatic dependent launch: the kernel may start before the previous one in the stream has finished,
        and waits for it where it says ``pdl_wait``. Rules that make a chain of such kernels safe:

          - What an earlier kernel writes is read, and anything is written, behind ``pdl_wait``. Weights, tables and a
            forward pass's metadata may be read before. (``gdn.flags`` tells of the one exception.)
          - ``pdl_launch``, which lets the next kernel start, comes first, in kernels with barriers right behind their
            initialisation: blocks that wait take nothing from those that work, and the next GEMM has its weights on the
            way when its input is ready. ``gdn.prepare`` says it behind its wait, and why.
          - So kernels further on may be there as well. They see everything, because each waits for its predecessor's end,
            which has waited for its own: in every launch at least one thread must reach ``pdl_wait``. Those without a
            live row leave before; hence every pool has a row.
        """
        grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
        grid += (1,) * (3 - len(grid))
        if len(args) != len(self.signature.args):
            raise TypeError(f"{self.name} takes {len(self.signature.args)} arguments, got {len(args)}")
        if config.ENABLE_CUDASIM:
            args = [simulated_argument(t, a) for t, a in zip(self.signature.args, args)]
            simulator.launch(self.function, grid, self.threads, self.smem, args, self.cluster, pdl)
            return
        from cuda.bindings import driver
        handle = self.handle()
        if self._scalars is not None:
            packed = args, self._scalars
        else:
            values, ctyp = [], []
            for typ, value in zip(self.signature.args, args):
                v, c = pack_argument(typ, value)
                values += v
                ctyp += c
            packed = tuple(values), tuple(ctyp)
        check(driver.cuLaunchKernelEx(self._configuration(grid, stream_address(stream), pdl), handle, packed, 0))

    def _configuration(self, grid: tuple, stream: int, pdl: bool):
        """A launch's CUlaunchConfig. Kept: layers launch alike, and making one takes as long as the launch."""
        made = self._configurations.get((grid, stream, pdl))
        if made is None:
            from cuda.bindings import driver
            made = driver.CUlaunchConfig()
            made.gridDimX, made.gridDimY, made.gridDimZ = grid
            made.blockDimX, made.blockDimY, made.blockDimZ = self.threads
            made.sharedMemBytes = self.smem
            made.hStream = driver.CUstream(stream)
            attributes = []
            if self.cluster > 1:
                a = driver.CUlaunchAttribute()
                a.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = self.cluster, 1, 1
                attributes.append(a)
            if pdl:
                a = driver.CUlaunchAttribute()
                a.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                a.value.programmaticStreamSerializationAllowed = 1
                attributes.append(a)
            made.attrs, made.numAttrs = attributes, len(attributes)
            if len(self._configurations) >= KEPT_CONFIGURATIONS:
                self._configurations.clear()
            self._configurations[grid, stream, pdl] = made
        return made


def stream_address(stream) -> int:
    """The raw CUstream of a Numba stream, a torch-like stream or an int (0: the default stream)."""
    if isinstance(stream, int):
        return stream
    handle = getattr(stream, "handle", stream)
    return int(getattr(handle, "value", handle) or 0)
