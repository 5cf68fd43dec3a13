"""Our GEMMs in the simulator, on shapes with every kind of edge: float64, what lies beside y, races, and faults found."""
from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from jev_kernels import bf16, reference
from jev_kernels.gemm import narrow, wide
from jev_kernels.ptx import fragments
from jev_kernels.rowwise import silu
from jev_kernels.sim import flags, simulator
from jev_kernels.sim.races import Race
from tests.kernels import checks

POISON = 0x7FC1                              # a NaN


class Problem:
    """x [m, k] and W [n, k], random BF16; x with NaN behind its live rows, y poisoned, both slices of wider arrays."""

    def __init__(self, m, n, k, gated=False):
        self.m, self.n, self.k, self.gated = m, n, k, gated
        rng = np.random.default_rng(0)
        x, self.w = (bf16.from_float32(rng.standard_normal(s).astype(np.float32)) for s in ((m, k), (n, k)))
        self.x = np.full((m + 3, k + 32), POISON, np.uint16)
        self.x[:m, 16:16 + k] = x

    def run(self, make):
        """y of a plan, make(x, w, y, rows), after a check that nothing beside it was written."""
        width = self.n // 2 if self.gated else self.n
        buffer, x, w = (cuda.to_device(a) for a in (np.full((self.m + 3, width + 32), POISON, np.uint16), self.x, self.w))
        make(x[:, 16:16 + self.k], w, buffer[:, 16:16 + width], self.m)(0)
        buffer = buffer.copy_to_host()
        y = buffer[:self.m, 16:16 + width].copy()
        buffer[:self.m, 16:16 + width] = POISON
        assert (buffer == POISON).all(), "written beside y"
        return y

    def error(self, y):
        """||y - float64|| / ||float64||."""
        x, w = (bf16.to_float32(a).astype(np.float64) for a in (self.x[:self.m, 16:16 + self.k], self.w))
        want = x @ w.T
        if self.gated:
            pairs = want.reshape(self.m, -1, 2, reference.INTERLEAVE)
            want = (pairs[:, :, 0] * reference.sigmoid(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(self.m, -1)
        return np.linalg.norm(bf16.to_float32(y) - want) / np.linalg.norm(want)

    def narrow(self, multiprocessors=2):
        return self.run(lambda *arrays: narrow.Plan(*arrays, multiprocessors, self.gated))

    def wide(self, multiprocessors=4):
        scratch = SimpleNamespace(sums=np.full(multiprocessors * wide.GROUPS * 128 * wide.MAX_TOKENS // 2, np.nan, np.float32),
                                  flags=np.zeros(multiprocessors * wide.GROUPS * 4, np.uint32))
        y = self.run(lambda *arrays: wide.Plan(*arrays, scratch, multiprocessors, self.gated))
        assert not scratch.flags.any(), "a flag stayed raised"
        return y


@pytest.fixture
def races(monkeypatch):
    monkeypatch.setattr(simulator, "RACES", True)


@pytest.fixture
def short_parts(monkeypatch):
    """Tiles of the wide GEMM are split however few steps they have."""
    monkeypatch.setattr(wide, "MIN_STEPS", 1)


@pytest.mark.parametrize("m, n, k, gated", [(37, 40, 256, False), (70, 208, 128, False), (9, 48, 128, True),
                                            (70, 200, 64, True)])
def test_narrow(m, n, k, gated, races):
    p = Problem(m, n, k, gated)
    assert p.error(p.narrow()) < 4.5e-3


@pytest.mark.parametrize("m, n, k, gated", [(20, 136, 64, False), (140, 520, 128, False), (140, 528, 128, True)])
def test_wide(m, n, k, gated, races, short_parts):
    p = Problem(m, n, k, gated)
    assert p.error(p.wide()) < 4.5e-3


def test_bits_do_not_depend_on_how_work_is_dealt_out(short_parts):
    """Wide tiles whole or split, and the kernel for few rows: one running sum over k, the same bits."""
    p = Problem(100, 520, 192)
    y = p.wide(2)
    assert np.array_equal(p.wide(4), y) and np.array_equal(p.narrow(4), y)


def test_activation_has_the_bits_of_two_steps():
    """Rounding the sums, then the activation: as a GEMM and ``silu_mul`` do it."""
    for p, run in ((Problem(20, 48, 128), Problem.narrow), (Problem(20, 48, 64), Problem.wide)):
        gated = Problem(p.m, p.n, p.k, gated=True)
        product, y = run(p), cuda.to_device(np.zeros((p.m, p.n // 2), np.uint16))
        silu.silu_mul(0, cuda.to_device(product), y, checks.counts(rows=p.m))
        assert np.array_equal(run(gated), y.copy_to_host())


@pytest.mark.parametrize("kernel", ["narrow", "wide"])
def test_chain_under_programmatic_dependent_launch(kernel, races):
    """The second launch starts early, reads what the first writes, and writes what it reads."""
    p = Problem(20, 128, 128)
    assert p.error(chain(p, kernel)) < 4.5e-3


def chain(p, kernel):
    """y of two launches: x W^T, the second of which goes back over it from x again, early."""
    def make(x, w, y, rows):
        between = cuda.to_device(np.full((rows, p.n), POISON, np.uint16))
        first, second = (plan(kernel, *arrays, rows) for arrays in ((x, w, between), (between, w, y)))
        last = plan(kernel, x, w, y, rows)

        def launches(stream):
            for bound in (first, second, last):
                bound(stream, pdl=True)
        return launches
    return p.run(make)


def plan(kernel, x, w, y, rows):
    if kernel == "narrow":
        return narrow.Plan(x, w, y, rows, 2)
    scratch = SimpleNamespace(sums=np.full(4 * wide.GROUPS * 128 * wide.MAX_TOKENS // 2, np.nan, np.float32),
                              flags=np.zeros(4 * wide.GROUPS * 4, np.uint32))
    return wide.Plan(x, w, y, rows, scratch, 4)


# ---------------------------------------------------------------- what must be found
def nothing(*_):
    pass


@pytest.fixture
def broken(monkeypatch):
    """broken(module, name, replacement, ...): kernels made anew with other functions in the place of their own."""
    def replace(*names):
        for module, name, replacement in zip(*[iter(names)] * 3):
            monkeypatch.setattr(module, name, replacement)
        for factory in (narrow.kernel, wide.kernel):
            factory.cache_clear()
    yield replace
    monkeypatch.undo()
    for factory in (narrow.kernel, wide.kernel):
        factory.cache_clear()


def by_consumers(real):
    """A wait that warps which compute leave out."""
    def wait(barrier, parity):
        if threading.current_thread().thread_id >= 128:          # with one warpgroup the producer
            real(barrier, parity)
    return wait


def too_early(real):
    """wgmma's products waited for one later than they are."""
    return lambda *args, wait=None, **named: real(*args, wait=wait and wait + 1, **named)


NARROW_FAULTS = {
    "no fence behind the zeros": ("without a proxy fence", narrow, "fence_async", nothing),
    "no barrier behind the zeros": ("has wgmma read", narrow, "named_sync", nothing),
    "no wait for a stage's bytes": ("has wgmma read", narrow, "mbar_wait", by_consumers(narrow.mbar_wait)),
    "a stage freed while it is read": ("may read it|overwritten", narrow, "wgmma", too_early(narrow.wgmma)),
    "mbarriers used before they are there": ("as an mbarrier", narrow, "cluster_sync", nothing),
}


@pytest.mark.parametrize("fault", NARROW_FAULTS)
def test_found_in_the_narrow_gemm(fault, broken, races, monkeypatch):
    message, *names = NARROW_FAULTS[fault]
    monkeypatch.setattr(narrow, "SMEM_LIMIT", 64 * 1024)         # two stages
    broken(*names)
    with pytest.raises(RuntimeError, match=message):
        Problem(37, 40, 768).narrow()


def raised_early():
    """Accumulators saved after their flag is raised."""
    def make(tokens, real=wide.make_handover):
        save, load = real(tokens)

        def hold(tile, at):
            threading.current_thread().unsaved = save, tile, at
        return hold, load

    def raise_first(flag, lane, real=wide.raise_flag_of_warp):
        real(flag, lane)
        save, tile, at = threading.current_thread().unsaved
        save(tile, at)
    return wide, "make_handover", make, wide, "raise_flag_of_warp", raise_first


WIDE_FAULTS = {
    "a flag raised before the sums are saved": ("device memory", *raised_early()),
    "a flag not awaited": ("device memory", wide, "await_flag", nothing),
    "a flag raised without a release": ("device memory", wide, "raise_flag_of_warp",
                                        lambda flag, lane: flags.store_of_warp(flag, lane, 1)),
    "a flag raised by a warp that is not together": ("device memory", wide, "raise_flag_of_warp",
                                                     lambda flag, lane: flags.store(flag, 1, True) if lane == 0 else None),
    "no fence before a TMA store": ("without a proxy fence", wide, "fence_async", nothing),
    "no barrier before a TMA store": ("TMA store", wide, "named_sync", nothing),
    "staging used again too early": ("may read it", wide, "tma_stores_read_but_one_if", nothing),
    "stores not awaited": ("leaves while boxes", wide, "tma_stores_done", nothing),
}


@pytest.mark.parametrize("fault", WIDE_FAULTS)
def test_found_in_the_wide_gemm(fault, broken, races, short_parts):
    message, *names = WIDE_FAULTS[fault]
    broken(*names)
    with pytest.raises(RuntimeError, match=message):
        Problem(140, 520, 128).wide()


@pytest.mark.parametrize("kernel, module", [("narrow", narrow), ("wide", wide)])
def test_found_under_programmatic_dependent_launch(kernel, module, broken, races):
    broken(module, "pdl_wait", nothing)
    with pytest.raises(Race, match="an earlier launch"):
        chain(Problem(20, 128, 128), kernel)


@pytest.mark.parametrize("wrong", [lambda lane: lane >> 3, lambda lane: lane & 7])
def test_found_in_the_output_rows(wrong, broken):
    broken(fragments, "row", wrong)
    p = Problem(37, 40, 256)
    assert not p.error(p.narrow()) < 0.1
