"""Every kernel compiled for its architectures and assembled, without a GPU: registers and spills stay within budgets.

A module of ``jev_kernels`` registers its kernels with a function ``kernels()``: {name: (Kernel, compute capabilities,
most registers, most bytes of spill stores)}. They go through link-time optimization, as on the machine that serves:
from plain PTX nvJitLink makes relocatable code, with other registers and without setmaxnreg.
"""
from __future__ import annotations

import re

import pytest
from numba.cuda.core import config

from jev_kernels.runtime import cubin
from tests.compiled.registered import kernels

if config.ENABLE_CUDASIM:
    pytest.skip("compiles for real: not under NUMBA_ENABLE_CUDASIM", allow_module_level=True)
pytest.importorskip("cuda.bindings.nvjitlink")


def registered() -> list:
    """One case for each kernel and architecture; a kernel that two modules name counts once."""
    cases, seen = [], set()
    for name, kernel, capabilities, registers, spill in kernels():
        for cc in capabilities:
            if (id(kernel), cc) not in seen:
                seen.add((id(kernel), cc))
                cases.append(pytest.param(kernel, cc, registers, spill, id=f"{name}-sm_{''.join(map(str, cc))}"))
    return cases


def resources(log: str) -> tuple[int, int]:
    """(registers, bytes of spill stores) from the assembler's log: the most of any function."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert registers and spills, f"the assembler reports no resources:\n{log}"
    return max(registers), max(spills)


@pytest.mark.parametrize("kernel, cc, registers, spill", registered())
def test_budget(kernel, cc, registers, spill):
    _, log = cubin.assemble(kernel.compile_ltoir(cc), kernel.name, cc, verbose=True)
    used, spilled = resources(log)
    print(f"{used} registers of {registers}, {spilled} bytes of spill of {spill}")
    assert used <= registers and spilled <= spill
    # setmaxnreg ignored (C7508), wgmma serialised (C7510 to C7515): slow code that nothing else would show
    assert not re.search(r"C75\d\d", log), log
