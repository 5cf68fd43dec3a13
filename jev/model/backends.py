"""Which backend serves an export on this machine."""
from __future__ import annotations

from jev.checkpoint.checkpoint import Export
from jev.model.backbone import Backbone, BackendError
from jev.model.numpy_backbone import NumpyBackbone


def open_backbone(export: Export, backend: str = "auto", max_length: int | None = None, graph: bool = True,
                  log=print) -> Backbone:
    """Load ``export`` on the backend asked for. "auto": CUDA where there is a usable GPU, else NumPy; ``log`` says which.

    Raises BackendError if the backend cannot be used here.
    """
    if backend not in ("auto", "cuda", "numpy"):
        raise BackendError(f"unknown backend {backend!r}: expected auto, cuda or numpy")
    if backend == "numpy":
        log("backend: numpy")
        return NumpyBackbone(export, max_length)
    from jev_kernels.runtime import device
    try:
        found = device.find_device()
    except device.NoDevice as reason:
        if backend == "cuda":
            raise BackendError(f"the cuda backend was asked for, but {reason}") from reason
        log(f"backend: numpy ({reason})")
        return NumpyBackbone(export, max_length)
    log(f"backend: cuda on {found}")
    from jev.model.cuda_backbone import CudaBackbone
    return CudaBackbone(export, found, max_length=max_length, graph=graph, log=log)
