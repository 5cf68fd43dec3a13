"""The GPU: what it is, its memory, its streams and events, and the way of the weights into it.

Everything here works on Numba's context of one device (the primary one, which other libraries share) and hands out
ordinary Numba device arrays, so kernels, cuBLASLt and graphs all see the same memory. BF16 is uint16 throughout.

    device = find_device()                       # or NoDevice, whose message says what is missing
    arena = Arena(51 << 30, "the weights")       # one allocation, or OutOfMemory with both figures
    weight = arena.take((5120, 17408))           # a uint16 view of it, 256-byte aligned
    with Uploader() as uploader:
        uploader.upload(weight, [memory_mapped_array])

Source: the CUDA driver API manual; figures for the staging copy are in ``Uploader``.
"""
from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numba import cuda
from numba.cuda.core import config

from jev_kernels.runtime.errors import DeviceError, NoDevice, OutOfMemory  # noqa: F401  part of this module's surface
from jev_kernels.runtime.launch import check, stream_address

ALIGNMENT = 256                       # bytes; what cuMemAlloc gives, and more than TMA (16) or a 16-byte access asks
HOPPER = (9, 0)                       # the compute capability with wgmma, TMA and clusters as they are used here
MINIMUM_CC = (8, 0)                   # mma with BF16 operands and cp.async
MINIMUM_CUDA = 12000                  # of the driver: sm_90 and cuLaunchKernelEx
_PEAK = 0                             # bytes in use on the device, the most that any look has seen


# ---------------------------------------------------------------- discovery
@dataclass(frozen=True)
class Device:
    """One usable GPU. Sizes in bytes; ``driver_version`` like "580.159.04", ``cuda_version`` the driver's, (13, 0)."""
    index: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    driver_version: str
    cuda_version: tuple[int, int]

    @property
    def hopper(self) -> bool:
        """Whether wgmma, TMA and clusters exist here (sm_90a code runs on compute capability 9.0 only)."""
        return self.compute_capability == HOPPER

    def __str__(self) -> str:
        return (f"{self.name} (sm_{self.compute_capability[0]}{self.compute_capability[1]}, {self.multiprocessors} "
                f"multiprocessors, {self.memory_bytes / 1e9:.0f} GB, driver {self.driver_version}, "
                f"CUDA {self.cuda_version[0]}.{self.cuda_version[1]})")


@functools.lru_cache(maxsize=None)
def on_hopper() -> bool:
    """Whether the current device has wgmma, TMA and clusters: compute capability 9.0, and no simulator."""
    return not config.ENABLE_CUDASIM and tuple(cuda.get_current_device().compute_capability) == HOPPER


def find_device(index: int = 0) -> Device:
    """The GPU at ``index``, made current for this thread. Raises NoDevice when there is none that can be used."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise NoDevice(f"the CUDA bindings are missing ({e}): install with the extra cuda13 or cuda12") from e
    try:
        code = driver.cuInit(0)[0]
    except Exception as e:            # the bindings load libcuda at the first call; how that fails varies by version
        raise NoDevice("no NVIDIA driver: libcuda.so.1 cannot be loaded. Install the driver, or give the container its "
                       "GPUs (docker run --gpus all)") from e
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        raise NoDevice(f"the NVIDIA driver sees no GPU{hint}")
    if int(code):
        raise NoDevice(f"the NVIDIA driver does not start: {code.name}")
    version = check(driver.cuDriverGetVersion())
    if version < MINIMUM_CUDA:
        raise NoDevice(f"the driver supports CUDA {_cuda(version)[0]}.{_cuda(version)[1]}; CUDA "
                       f"{MINIMUM_CUDA // 1000}.0 or newer is needed")
    count = check(driver.cuDeviceGetCount())
    if not 0 <= index < count:
        raise NoDevice(f"there is no GPU {index}: the driver shows {count}")
    handle = check(driver.cuDeviceGet(index))
    name = check(driver.cuDeviceGetName(128, handle)).split(b"\0")[0].decode()
    key = driver.CUdevice_attribute

    def attribute(which):
        return check(driver.cuDeviceGetAttribute(which, handle))

    capability = (attribute(key.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                  attribute(key.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR))
    if capability < MINIMUM_CC:
        raise NoDevice(f"{name} has compute capability {capability[0]}.{capability[1]}; BF16 matrix instructions need "
                       f"{MINIMUM_CC[0]}.{MINIMUM_CC[1]} or newer (A100, RTX 30)")
    try:
        cuda.select_device(index)
    except Exception as e:
        raise NoDevice(f"{name} is there but no CUDA context can be made on it: {e}") from e
    return Device(index, name, capability, attribute(key.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                  attribute(key.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE), check(driver.cuDeviceTotalMem(handle)),
                  driver_version(), _cuda(version))


def _cuda(version: int) -> tuple[int, int]:
    return version // 1000, version % 1000 // 10


def driver_version() -> str:
    """The kernel driver's version, e.g. "580.159.04"; "unknown" where neither /proc nor NVML tells."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
        if found:
            return found[1]
    except OSError:
        pass
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0:
            try:
                if nvml.nvmlSystemGetDriverVersion(text, 96) == 0:
                    return text.value.decode()
            finally:
                nvml.nvmlShutdown()
    except (OSError, AttributeError):
        pass
    return "unknown"


# ---------------------------------------------------------------- memory
def memory() -> tuple[int, int]:
    """(free, total) bytes of the current device, all processes together. Also a look for ``peak_memory``."""
    global _PEAK
    from cuda.bindings import driver
    free, total = check(driver.cuMemGetInfo())
    _PEAK = max(_PEAK, total - free)
    return free, total


def peak_memory() -> int:
    """Most bytes seen in use on the device, other processes included, by this call or any earlier look.

    The driver keeps no high-water mark. Looks are taken after every allocation and graph made through this package,
    and nothing else here allocates, so the figure is exact while the program is alone on its GPU.
    """
    memory()
    return _PEAK


def allocate(nbytes: int, what: str) -> int:
    """Device address of ``nbytes`` new bytes. OutOfMemory says what they were for, how many GB, how many are free."""
    from cuda.bindings import driver
    free, total = memory()
    result = driver.cuMemAlloc(max(int(nbytes), 1))
    if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise OutOfMemory(f"{what}: {nbytes / 1e9:.2f} GB of GPU memory needed, {free / 1e9:.2f} GB of "
                          f"{total / 1e9:.2f} GB are free")
    pointer = int(check(result))
    memory()
    return pointer


def view(pointer: int, shape, dtype=np.uint16, strides=None, owner=None):
    """A Numba device array over memory that something else (``owner``, kept alive) has allocated.

    shape: int or tuple; strides: in bytes, row-major and contiguous when None.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    return cuda.from_cuda_array_interface({"shape": shape, "strides": strides, "typestr": np.dtype(dtype).str,
                                           "data": (int(pointer), False), "version": 3}, owner=owner)


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole ``ALIGNMENT``s: what ``Arena.take`` uses up."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def array_bytes(shape, dtype=np.uint16) -> int:
    """Bytes that ``Arena.take(shape, dtype)`` uses up; sum them to size an arena."""
    shape = (shape,) if isinstance(shape, int) else shape
    count = 1
    for n in shape:
        count *= int(n)
    return padded(count * np.dtype(dtype).itemsize)


class Arena:
    """One allocation, handed out as aligned typed views, front to back. Views keep the arena alive.

    nbytes  size; ``array_bytes`` summed over the arrays to come
    what    what it is for, for the message of OutOfMemory
    """

    def __init__(self, nbytes: int, what: str = "buffers"):
        self.nbytes, self.what, self.used = padded(int(nbytes)), what, 0
        self.pointer = allocate(self.nbytes, what)

    def take(self, shape, dtype=np.uint16):
        """The next array: contiguous, uninitialised, at a multiple of 256 bytes. OutOfMemory past the arena's end."""
        size = array_bytes(shape, dtype)
        if self.used + size > self.nbytes:
            left = self.nbytes - self.used
            raise OutOfMemory(f"{self.what}: an array {shape} of {np.dtype(dtype)} needs {size / 1e9:.3f} GB, "
                              f"{left / 1e9:.3f} GB of the arena's {self.nbytes / 1e9:.3f} GB are left")
        array = view(self.pointer + self.used, shape, dtype, owner=self)
        self.used += size
        return array

    def close(self) -> None:
        """Free the memory now. No view may be used afterwards."""
        if self.pointer:
            from cuda.bindings import driver
            pointer, self.pointer = self.pointer, 0
            check(driver.cuMemFree(pointer))

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        try:
            self.close()
        except Exception:             # the context may be gone at interpreter exit, and the memory with it
            pass


# ---------------------------------------------------------------- streams and events
def synchronize() -> None:
    """Wait until the device has nothing left to do, in any stream of this program. RuntimeError if a kernel failed."""
    from cuda.bindings import driver
    check(driver.cuCtxSynchronize())


class Stream:
    """A CUDA stream that does not wait for the default stream. ``handle`` is the CUstream as an int."""

    def __init__(self):
        from cuda.bindings import driver
        self.handle = int(check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)))

    def synchronize(self) -> None:
        """Wait until everything in the stream is done (the GIL is free meanwhile). RuntimeError if a kernel failed."""
        from cuda.bindings import driver
        check(driver.cuStreamSynchronize(self.handle))

    def wait(self, event: Event) -> None:
        """Work put into the stream from now on starts after ``event``."""
        from cuda.bindings import driver
        check(driver.cuStreamWaitEvent(self.handle, event.handle, 0))

    def __del__(self):
        try:
            from cuda.bindings import driver
            driver.cuStreamDestroy(self.handle)
        except Exception:             # interpreter exit
            pass


class Event:
    """A point in a stream. timing: times can be taken; blocking: waiting sleeps instead of spinning (+20 to 50 us)."""

    def __init__(self, timing: bool = True, blocking: bool = False):
        from cuda.bindings import driver
        flags = driver.CUevent_flags
        value = (0 if timing else flags.CU_EVENT_DISABLE_TIMING.value) | (
            flags.CU_EVENT_BLOCKING_SYNC.value if blocking else 0)
        self.handle = int(check(driver.cuEventCreate(value)))

    def record(self, stream) -> Event:
        from cuda.bindings import driver
        check(driver.cuEventRecord(self.handle, stream_address(stream)))
        return self

    def synchronize(self) -> None:
        """Wait for the point (the GIL is free meanwhile)."""
        from cuda.bindings import driver
        check(driver.cuEventSynchronize(self.handle))

    def milliseconds_to(self, later: Event) -> float:
        """Device time from this event to ``later``; both must have happened."""
        from cuda.bindings import driver
        return float(check(driver.cuEventElapsedTime(self.handle, later.handle)))

    def __del__(self):
        try:
            from cuda.bindings import driver
            driver.cuEventDestroy(self.handle)
        except Exception:             # interpreter exit
            pass


# ---------------------------------------------------------------- copies
def pinned(shape, dtype=np.uint8) -> np.ndarray:
    """A page-locked host array: asynchronous copies to and from the device run at the bus's full speed."""
    return cuda.pinned_array(shape, dtype=dtype)


def to_device(dst, host: np.ndarray, stream) -> None:
    """Copy a contiguous host array to the start of ``dst`` (device array or address); asynchronous if it is pinned."""
    from cuda.bindings import driver
    check(driver.cuMemcpyHtoDAsync(_address(dst, host), host.ctypes.data, host.nbytes, stream_address(stream)))


def to_host(host: np.ndarray, src, stream) -> None:
    """Copy the start of ``src`` (device array or address) into a contiguous host array; see ``to_device``."""
    from cuda.bindings import driver
    check(driver.cuMemcpyDtoHAsync(host.ctypes.data, _address(src, host), host.nbytes, stream_address(stream)))


def copy(dst, src, stream) -> None:
    """Copy one contiguous device array over another of the same size."""
    from cuda.bindings import driver
    if dst.nbytes != src.nbytes:
        raise ValueError(f"{src.nbytes} bytes for an array of {dst.nbytes}")
    check(driver.cuMemcpyDtoDAsync(_address(dst), _address(src), dst.nbytes, stream_address(stream)))


def fill(array, value: int, stream) -> None:
    """Set every element of a contiguous 16- or 32-bit device array to the bit pattern ``value``."""
    from cuda.bindings import driver
    set_ = {2: driver.cuMemsetD16Async, 4: driver.cuMemsetD32Async}[np.dtype(array.dtype).itemsize]
    check(set_(_address(array), value, array.size, stream_address(stream)))


def zero(pointer: int, nbytes: int, stream) -> None:
    """Set bytes of device memory to 0."""
    from cuda.bindings import driver
    check(driver.cuMemsetD8Async(pointer, 0, nbytes, stream_address(stream)))


def _address(target, host: np.ndarray | None = None) -> int:
    if host is not None and not host.flags.c_contiguous:
        raise ValueError("the host array must be contiguous")
    if isinstance(target, int):
        return target
    if host is not None and target.nbytes < host.nbytes:
        raise ValueError(f"{host.nbytes} bytes do not fit the device array's {target.nbytes}")
    info = target.__cuda_array_interface__
    if info.get("strides") is not None:
        raise ValueError("the device array must be contiguous")
    return info["data"][0]


def parts_of(array: np.ndarray, limit: int):
    """Cut an array along its first axis (further ones if need be) into parts of at most ``limit`` bytes, in order."""
    if array.ndim == 0 or array.nbytes <= limit:
        if array.nbytes:
            yield array.reshape(1) if array.ndim == 0 else array
        return
    row = array.nbytes // len(array)
    if row > limit:
        for part in array:
            yield from parts_of(part, limit)
    else:
        step = limit // row
        for i in range(0, len(array), step):
            yield array[i:i + step]


def interleaved(arrays: list[np.ndarray], interleave: int, limit: int):
    """Cut arrays of one shape into tuples of parts [n, interleave, ...], one of each, of at most ``limit`` bytes or n = 1."""
    if len({a.shape for a in arrays}) != 1 or len(arrays[0]) % interleave:
        raise ValueError(f"chunks of {[a.shape for a in arrays]} cannot be interleaved by {interleave} rows")
    arrays = [a.reshape(-1, interleave, *a.shape[1:]) for a in arrays]
    step = max(1, limit // sum(a[0].nbytes for a in arrays))
    for i in range(0, len(arrays[0]), step):
        yield tuple(a[i:i + step] for a in arrays)


class Uploader:
    """Host arrays to the device through page-locked buffers: threads fill one while the bus empties another.

    Weights lie in memory-mapped files, from which the GPU cannot read at speed. One thread copies at 5 to 10 GB/s,
    PCIe 5 takes 50, so a buffer is filled by several threads (NumPy releases the GIL while copying; page faults of the
    mapping run in them too). Sources may be strided: rows are put in order on the way.
    """

    def __init__(self, buffer_bytes: int = 128 << 20, buffers: int = 3, threads: int | None = None):
        self.limit = buffer_bytes
        self.threads = threads or max(1, min(12, os.cpu_count() or 1))
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="upload")
        self.stream = Stream()
        self.buffers = [pinned(buffer_bytes) for _ in range(buffers)]
        self.done = [Event(timing=False).record(self.stream) for _ in range(buffers)]
        self.filling = 0                          # the buffer being filled
        self.used = 0                             # bytes of it
        self.copies: list = []                    # (device address, offset, bytes): what goes where from that buffer
        self.futures: list = []                   # host copies into it
        self.sealed = None                        # the buffer before: full, host copies perhaps still running

    def upload(self, dst, chunks: Iterable[np.ndarray], progress: Callable[[int], None] | None = None,
               interleave: int = 0) -> None:
        """Write ``chunks``, one after another or interleaved by so many rows of each, over the whole of ``dst`` (contiguous
        device array).

        The sources must stay readable until ``finish``. progress(n): called as n bytes more are on their way.
        Raises ValueError unless the chunks have exactly the bytes of ``dst`` and elements of its size.
        """
        at, chunks, limit = _address(dst), list(chunks), self.limit // 4
        for chunk in chunks:
            if chunk.dtype.itemsize != dst.dtype.itemsize:
                raise ValueError(f"chunk of {chunk.dtype} for a device array of {dst.dtype}")
        held = sum(chunk.nbytes for chunk in chunks)
        if held != dst.nbytes:
            raise ValueError(f"the chunks hold {held} bytes, the device array {dst.shape} has {dst.nbytes}")
        one_by_one = ((part,) for chunk in chunks for part in parts_of(chunk, limit))
        for parts in interleaved(chunks, interleave, limit) if interleave else one_by_one:
            nbytes = sum(part.nbytes for part in parts)
            self._stage(at, parts, nbytes)
            at += nbytes
            if progress:
                progress(nbytes)

    def _stage(self, address: int, parts: Sequence[np.ndarray], nbytes: int) -> None:
        """``parts`` of one shape: the first entry of each, then the second of each, and so on."""
        if self.used + nbytes > self.limit:
            self._seal()
        offset, first = self.used, parts[0]
        target = self.buffers[self.filling][offset:offset + nbytes].view(first.dtype)
        target = target.reshape(len(first), len(parts), *first.shape[1:])
        for i, part in enumerate(parts):
            self._copy(target[:, i], part)
        last = self.copies[-1] if self.copies else None
        if last and last[0] + last[2] == address and last[1] + last[2] == offset:
            self.copies[-1] = (last[0], last[1], last[2] + nbytes)
        else:
            self.copies.append((address, offset, nbytes))
        self.used = -(-(offset + nbytes) // 16) * 16

    def _copy(self, target: np.ndarray, part: np.ndarray) -> None:
        if part.nbytes < 1 << 20:
            np.copyto(target, part)
            return
        if len(part) < self.threads and part.flags.c_contiguous and target.flags.c_contiguous:
            part, target = part.reshape(-1), target.reshape(-1)
        step = -(-len(part) // self.threads)
        self.futures += [self.pool.submit(np.copyto, target[i:i + step], part[i:i + step])
                         for i in range(0, len(part), step)]

    def _seal(self) -> None:
        """The current buffer is full: send the one before it, and wait until the next one is free."""
        self._send()
        self.sealed = (self.filling, self.copies, self.futures)
        self.filling, self.used, self.copies, self.futures = (self.filling + 1) % len(self.buffers), 0, [], []
        self.done[self.filling].synchronize()

    def _send(self) -> None:
        if self.sealed is None:
            return
        from cuda.bindings import driver
        (filled, copies, futures), self.sealed = self.sealed, None
        for future in futures:
            future.result()
        base = self.buffers[filled].ctypes.data
        for address, offset, nbytes in copies:
            check(driver.cuMemcpyHtoDAsync(address, base + offset, nbytes, self.stream.handle))
        self.done[filled].record(self.stream)

    def finish(self) -> None:
        """Wait until everything is on the device."""
        self._seal()
        self._send()
        self.stream.synchronize()

    def close(self) -> None:
        """Free the buffers. Also what leaving the ``with`` does, after ``finish`` when there was no error."""
        self.pool.shutdown(cancel_futures=True)
        self.stream.synchronize()
        self.buffers = []

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()
