"""The kernels that the modules of ``jev_kernels`` register with a function ``kernels()``. Not under the simulator."""
from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import jev_kernels


def kernels() -> Iterator[tuple]:
    """(name, Kernel, compute capabilities, most registers, most bytes of spill stores) of each, module by module."""
    for module in sorted(m.name for m in pkgutil.walk_packages(jev_kernels.__path__, "jev_kernels.")):
        if not module.startswith("jev_kernels.sim."):
            made = getattr(importlib.import_module(module), "kernels", None)
            if made is not None and not inspect.signature(made).parameters:
                for name, entry in made().items():
                    yield name, *entry
