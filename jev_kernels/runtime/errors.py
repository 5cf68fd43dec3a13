"""What can be wrong with the GPU, for the person who runs the program."""
from __future__ import annotations

from jev_kernels.ptx.waits import LIMIT_SECONDS


class DeviceError(RuntimeError):
    """Something about the GPU that the person who runs the program has to know."""


class NoDevice(DeviceError):
    """There is no GPU that the kernels can use; the message says what is missing."""


class OutOfMemory(DeviceError):
    """The GPU has too little free memory; the message says how much is needed and how much is free."""


class DeviceLost(DeviceError):
    """A kernel ended abnormally. Everything on the GPU of this process is gone, and every further call fails alike: only a
    new process can use the GPU again."""


# What the driver answers, to this call and all later ones of the process, once a kernel has ended abnormally.
TRAPPED = "CUDA_ERROR_LAUNCH_FAILED"
LOST = {TRAPPED, *("CUDA_ERROR_" + name for name in (
    "ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "ASSERT",
    "HARDWARE_STACK_ERROR", "LAUNCH_TIMEOUT", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTAINED", "CONTEXT_IS_DESTROYED",
    "TENSOR_MEMORY_LEAK", "MPS_CLIENT_TERMINATED", "DEVICE_UNAVAILABLE", "UNKNOWN"))}


def driver_error(name: str) -> RuntimeError:
    """The error for a driver's code, ``CUDA_ERROR_...``: DeviceLost, or a RuntimeError with the code."""
    if name not in LOST:
        return RuntimeError(f"CUDA: {name}")
    why = "a kernel ended abnormally"
    if name == TRAPPED:
        why = f"a kernel stopped itself: something that it waited for did not come within {LIMIT_SECONDS:.0f} s"
    return DeviceLost(f"the GPU is lost to this process: {why} ({name}). Restart the process; if it happens again, look for "
                      "Xid messages in the kernel log (dmesg) and at nvidia-smi -q")
