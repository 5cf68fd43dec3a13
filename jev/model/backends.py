"""Which backend serves an export on this machine."""
from __future__ import annotations

from jev.checkpoint.opening import Export
from jev.model.backbone import Backbone, BackendError
from jev.model.numpy_backbone import NumpyBackbone
from jev.model.ops.numpy_cache import NumpyCache

NUMPY_CACHE_GB = 0.25


def open_backbone(export: Export, backend: str = "auto", max_length: int | None = None, graph: bool = True,
                  cache_gb: float | None = None, log=print) -> Backbone:
    """Load ``export`` on the backend asked for. "auto": CUDA where there is a usable GPU, else NumPy; ``log`` says which.

    cache_gb: memory of the prefix cache; 0: none; None: none on a GPU, NUMPY_CACHE_GB for NumPy. Raises
    BackendError if the backend cannot be used here.
    """
    if backend not in ("auto", "cuda", "numpy"):
        raise BackendError(f"unknown backend {backend!r}: expected auto, cuda or numpy")
    if backend == "numpy":
        log("backend: numpy")
        return _numpy(export, max_length, cache_gb, log)
    from jev_kernels.runtime import device
    try:
        found = device.find_device()
    except device.NoDevice as reason:
        if backend == "cuda":
            raise BackendError(f"the cuda backend was asked for, but {reason}") from reason
        log(f"backend: numpy ({reason})")
        return _numpy(export, max_length, cache_gb, log)
    log(f"backend: cuda on {found}")
    from jev.model.cuda_backbone import CudaBackbone
    return CudaBackbone(export, found, max_length=max_length, graph=graph, cache_gb=cache_gb or 0.0, log=log)


def _numpy(export: Export, max_length: int | None, cache_gb: float | None, log) -> NumpyBackbone:
    cache, gb = None, NUMPY_CACHE_GB if cache_gb is None else cache_gb
    if gb:
        try:
            cache = NumpyCache.of_size(export.config, int(gb * 1e9))
            log(f"prefix cache: {cache}")
        except ValueError as error:
            if cache_gb is not None:
                raise BackendError(str(error)) from None
            log(f"prefix cache: none ({error})")
    return NumpyBackbone(export, max_length, cache=cache)
