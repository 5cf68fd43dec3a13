"""GEMMs on a GPU: against float64, one pattern of bits per weight shape, chains under programmatic dependent launch."""
from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jev_kernels.gemm import narrow, trials as gemm_trials  # noqa: E402
from jev_kernels.gemm.problem import Key  # noqa: E402
from jev_kernels.gemm.selection import OWN, WIDE, Gemm, NoAlgorithm  # noqa: E402
from jev_kernels.rowwise import silu  # noqa: E402
from jev_kernels.runtime import device  # noqa: E402
from jev_kernels.runtime.graph import capture  # noqa: E402
from tests.gpu import sanitizer  # noqa: E402
from tests.torch_ops import gate_and_up  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPES_27B = [(16480, 5120), (14336, 5120), (5120, 6144), (34816, 5120), (5120, 17408)]
SHAPES_9B = [(12352, 4096), (10240, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
ROWS = (1, 2, 63, 64, 65, 107, 127, 128, 139, 256, 700, 2048)
POISON = 0x7FC1


@pytest.fixture(scope="module")
def gpu():
    return device.find_device()


@pytest.fixture(scope="module")
def gemm(gpu):
    return Gemm(gpu, tune=False)


def bits(array):
    """A torch view (int16) of a device array."""
    class View:
        __cuda_array_interface__ = dict(array.__cuda_array_interface__, typestr="<i2", stream=None)
    return torch.as_tensor(View(), device="cuda")


def values(array):
    return bits(array).view(torch.bfloat16)


def error(y, x, w):
    """||y - x w^T|| / ||x w^T||, the product in float64."""
    reference = values(x).double() @ values(w).double().t()
    return ((values(y).double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("n,k", SHAPES_27B + SHAPES_9B)
def test_float64_poison_guards_and_invariance(gemm, n, k):
    """Every number of rows: close to float64, nothing written beside rows and columns, a row's bits always the same."""
    all_rows = ROWS if (n, k) in SHAPES_27B[-2:] else (1, 107, 128, 139, 700)
    most = max(all_rows)
    with device.Arena(2 * (n * k + most * (k + 64) + 2 * (most + 8) * (n + 64)) + 4096, "test") as arena:
        w, wide_x = arena.take((n, k)), arena.take((most, k + 64))
        whole, wide = arena.take((most, n)), arena.take((most + 8, n + 64))
        gemm_trials.RANDOM(gemm.stream, 1056, w, 5, 0.0)
        gemm_trials.RANDOM(gemm.stream, 1056, wide_x, 7, 2.0)
        x, y = wide_x[:, 32:32 + k], wide[:, 32:32 + n]                    # slices: rows further apart than long
        gemm.linear_plan(x, w, whole, most)(gemm.stream)
        gemm.stream.synchronize()
        assert error(whole, x, w) < 2.5e-3
        for m in all_rows:
            device.fill(wide, POISON, gemm.stream)
            plan = gemm.linear_plan(x, w, y, m)
            plan(gemm.stream)
            gemm.stream.synchronize()
            got = bits(wide)
            assert (got[m:] == POISON).all(), f"{m} rows: rows below were written"
            assert (got[:, :32] == POISON).all() and (got[:, 32 + n:] == POISON).all(), f"{m} rows: columns beside"
            assert torch.equal(got[:m, 32:32 + n], bits(whole)[:m]), f"{m} rows: other bits ({plan.name})"


@pytest.mark.parametrize("n,k", SHAPES_27B + SHAPES_9B)
def test_own_kernel_has_the_bits_of_cublaslt(gemm, n, k):
    """The pattern of our kernel is that of the majority of cuBLASLt's algorithms, at few rows and at many."""
    if not gemm.gpu.hopper:
        pytest.skip("our kernel needs Hopper")
    for m in (107, 128, 208, 300):
        found = gemm.admit(Key(m, n, k, k, k, n))
        own = {c.algorithm: c.differing for c in found if c.algorithm.startswith(OWN)}
        assert own == ({OWN: 0} if m <= narrow.MAX_ROWS else {WIDE: 0}), f"{m} rows: {own}"
        equal = [c for c in found if c.algorithm not in own and c.differing == 0]
        assert 2 * len(equal) > len(found) - len(own), f"{m} rows: {[(c.algorithm, c.differing) for c in found]}"
    gemm.release()


def test_admission_refuses_another_order(gemm):
    """The check can fail: split-K algorithms add up in pieces, and are seen to differ."""
    n, k, m = 5120, 17408, 107
    key = Key(m, n, k, k, k, n)
    split = [a for a in gemm.blas.heuristics(key, 256, split=True) if a.split_k > 1]
    assert split, "cuBLASLt proposed no split-K algorithm"
    assert not any(str(a) in gemm.candidates(key) for a in split)
    found = gemm.admit(key, candidates=[str(a) for a in split])
    assert found and all(c.differing > 100 for c in found), found
    gemm.release()


def test_nothing_admitted_is_an_error(gemm, monkeypatch):
    monkeypatch.setattr(gemm, "candidates", lambda key, alignment=256: [
        str(a) for a in gemm.blas.heuristics(key, alignment, split=True) if a.split_k > 1])
    gemm.reference(5120, 17408)
    with pytest.raises(NoAlgorithm, match="5120 x 17408 at 99 rows"):
        gemm.choice(Key(99, 5120, 17408, 17408, 17408, 5120))
    gemm.release()


def test_choices_are_kept(gpu, tmp_path):
    """Timing fills the file; the next Gemm takes its choices without running anything; damage is measured again."""
    path, n, k = tmp_path / "gemm.json", 4096, 4096
    first = Gemm(gpu, cache=path)
    first.prepare([(n, k)], [64, 256])
    kept = json.loads(path.read_text())[first.cache.key]["choices"][f"{n}x{k}"]
    assert set(kept) == {"reference", "64/4096/4096/4096/256", "256/4096/4096/4096/256"}
    second = Gemm(gpu, cache=path)
    second.trial = None                                                    # would fail if it were needed
    for m in (64, 256):
        choice = second.choice(Key(m, n, k, k, k, n))
        assert [choice.algorithm, choice.us] == kept[f"{m}/4096/4096/4096/256"] and choice.us > 1
    path.write_text("{")
    with pytest.warns(UserWarning, match="measured again"):
        assert Gemm(gpu, cache=path).cache.choices == {}


class Chain:
    """Dependent GEMMs: the output of each is the input of the next."""
    WIDTHS = (17408, 5120, 14336, 5120, 16384, 5120)

    def __init__(self, gemm, weights, m, algorithm=None):
        self.arena = device.Arena(sum(device.array_bytes((m, k)) for k in self.WIDTHS), "chain")
        self.x, *self.outputs = [self.arena.take((m, k)) for k in self.WIDTHS]
        sources = [self.x, *self.outputs]
        self.plans = [gemm.linear_plan(a, w, b, m) if algorithm is None else gemm.bind(algorithm, a, w, b, m)
                      for a, w, b in zip(sources, weights, self.outputs)]

    def run(self, stream, pdl):
        for plan in self.plans:
            plan(stream, pdl=pdl)


@pytest.mark.parametrize("m,algorithm", [(107, None), (64, None), (300, None), (208, WIDE), (320, WIDE), (520, WIDE)])
def test_dependent_chain_and_graph(gemm, m, algorithm):
    """With and without programmatic dependent launch, and from a graph: the same bits, for new inputs every time."""
    widths, stream = Chain.WIDTHS, gemm.stream
    with device.Arena(sum(device.array_bytes(s) for s in zip(widths[1:], widths)), "weights") as arena:
        weights = [arena.take(s) for s in zip(widths[1:], widths)]
        for i, w in enumerate(weights):
            gemm_trials.RANDOM(stream, 1056, w, i, 0.0)
            stream.synchronize()
            values(w).mul_(w.shape[1] ** -0.5)
        torch.cuda.synchronize()
        plain, early, captured = (Chain(gemm, weights, m, algorithm) for _ in range(3))
        captured.run(stream, True)
        graph = capture(stream, lambda: captured.run(stream, True), keep=(captured,))
        assert graph.nodes == len(widths) - 1
        for i in range(40):
            for chain in (plain, early, captured):
                gemm_trials.RANDOM(stream, 1056, chain.x, 100 + i, 1.0)
            plain.run(stream, False)
            early.run(stream, True)
            graph.launch(stream)
            stream.synchronize()
            for a, b, c in zip(plain.outputs, early.outputs, captured.outputs):
                assert torch.equal(bits(a), bits(b)) and torch.equal(bits(a), bits(c))
            assert torch.isfinite(values(plain.outputs[-1])).all() and values(plain.outputs[-1]).any()
        graph.destroy()


def test_wide_kernel_small_and_ragged(gemm):
    """Few and many tiles, one and several token tiles, ragged edges, K of one step; poisoned, guarded, three times."""
    if not gemm.gpu.hopper:
        pytest.skip("our kernel needs Hopper")
    for m, n, k in ((129, 8, 64), (130, 264, 128), (200, 1032, 320), (257, 392, 1024), (311, 17000, 576),
                    (384, 20000, 192), (700, 9000, 512), (2432, 17000, 192)):
        with device.Arena(2 * (n * k + m * k + 2 * (m + 8) * n) + 4096, "test") as arena:
            w, x, y = arena.take((n, k)), arena.take((m, k)), arena.take((m + 8, n))
            gemm_trials.RANDOM(gemm.stream, 1056, w, 5, 0.0)
            gemm_trials.RANDOM(gemm.stream, 1056, x, 7, 1.0)
            plan, first = gemm.bind(WIDE, x, w, y, m), None
            for _ in range(3):
                device.fill(y, POISON, gemm.stream)
                plan(gemm.stream)
                gemm.stream.synchronize()
                got = bits(y).clone()
                assert (got[m:] == POISON).all() and (first is None or torch.equal(first, got)), (m, n, k)
                first = got
            assert error(y[:m], x, w) < 3e-3, (m, n, k)


class Gated:
    """An MLP's first product: x, weights, the product, its activation with room around it, and the pool's counts."""

    def __init__(self, gemm, m, n, k, spread=1.0):
        self.gemm, self.m, self.n = gemm, m, n
        shapes = (n, k), (m, k), (m, n), (m, n // 2), (m + 8, -(-n // 16) * 8 + 64)
        self.arena = device.Arena(sum(map(device.array_bytes, shapes)) + 2048, "test")
        self.w, self.x, self.product, self.expected, self.wide = (self.arena.take(s) for s in shapes)
        self.counts = self.arena.take(16, np.int32)
        device.fill(self.counts, m, gemm.stream)
        gemm_trials.RANDOM(gemm.stream, 1056, self.w, 5, 0.0)
        gemm_trials.RANDOM(gemm.stream, 1056, self.x, 7, spread)
        gemm.stream.synchronize()
        values(self.w).mul_(2 * k ** -0.5)                                 # gates of some size, not all saturated

    def run(self, plan, what):
        """The activation after a check that nothing beside it was written."""
        device.fill(self.wide, POISON, self.gemm.stream)
        plan(self.gemm.stream)
        self.gemm.stream.synchronize()
        got, width = bits(self.wide), self.n // 2
        assert (got[self.m:] == POISON).all(), f"{what}: rows below were written"
        assert (got[:, :32] == POISON).all() and (got[:, 32 + width:] == POISON).all(), f"{what}: columns beside"
        return got[:self.m, 32:32 + width].clone()

    def two_steps(self, algorithm):
        """The same by a GEMM and ``silu_mul``."""
        self.gemm.bind(algorithm, self.x, self.w, self.product, self.m)(self.gemm.stream)
        silu.silu_mul(self.gemm.stream, self.product, self.expected, self.counts)
        self.gemm.stream.synchronize()
        return bits(self.expected)

    @property
    def y(self):
        return self.wide[:, 32:32 + self.n // 2]


GATED = [(OWN, m, n, k) for m, n, k in ((1, 34816, 5120), (107, 34816, 5120), (128, 24576, 4096), (77, 264, 256), (5, 8, 128),
                                        (64, 2056, 384), (65, 40, 128), (33, 4360, 256))]
GATED += [(WIDE, m, n, k) for m, n, k in ((129, 16, 64), (144, 34816, 5120), (250, 34816, 5120), (200, 1040, 320),
                                          (257, 400, 1024), (311, 17008, 576), (790, 24576, 4096), (2334, 34816, 512),
                                          (520, 9008, 512))]


@pytest.mark.parametrize("algorithm,m,n,k", GATED)
def test_activation_in_the_product(gemm, algorithm, m, n, k):
    """The bits of the GEMM followed by silu_mul, nothing written beside them, three times; and near float64."""
    if not gemm.gpu.hopper:
        pytest.skip("our kernels need Hopper")
    p = Gated(gemm, m, n, k)
    with p.arena:
        want = p.two_steps(algorithm)
        plan = gemm.bind_gated(algorithm, p.x, p.w, p.product, p.y, m, p.counts)
        for _ in range(3):
            assert torch.equal(p.run(plan, (algorithm, m, n, k)), want)
        gate, up = gate_and_up(values(p.x).double() @ values(p.w).double().t(), 1)
        exact = torch.nn.functional.silu(gate) * up
        got = values(p.expected).double()
        assert ((got - exact).norm() / exact.norm()).item() < 4.5e-3


@pytest.mark.parametrize("n,k", [(34816, 5120), (24576, 4096), (1040, 320)])
def test_swiglu_has_the_same_bits_at_every_number_of_rows(gemm, n, k):
    most = 2048
    p = Gated(gemm, most, n, k, spread=2.0)
    with p.arena:
        whole = p.run(gemm.swiglu_plan(p.x, p.w, p.product, p.y, most, p.counts), most)
        for m in (1, 63, 107, 128, 139, 250, 256, 700):
            p.m = m
            plan = gemm.swiglu_plan(p.x, p.w, p.product, p.y, m, p.counts)
            device.fill(p.counts, m, gemm.stream)
            assert torch.equal(p.run(plan, m), whole[:m]), f"{m} rows: other bits ({plan.name})"
        with pytest.raises(ValueError, match="y: "):
            gemm.swiglu_plan(p.x, p.w, p.product, p.product, 4, p.counts)


def test_admission_sees_another_order_through_the_activation(gemm):
    n, k, m = 5120, 17408, 107
    key = Key(m, n, k, k, k, n, gated=True)
    split = [str(a) for a in gemm.blas.heuristics(key, 256, split=True) if a.split_k > 1]
    found = gemm.admit(key, candidates=split)
    assert found and all(c.differing > 100 for c in found), found
    assert all(c.differing == 0 for c in gemm.admit(key) if c.algorithm == OWN)
    gemm.release()


def test_a_plan_names_what_is_wrong(gemm):
    with device.Arena(1 << 20, "test") as arena:
        x, w, y = arena.take((16, 128)), arena.take((64, 128)), arena.take((16, 64))
        with pytest.raises(ValueError, match="rows: 17"):
            gemm.linear_plan(x, w, y, 17)
        with pytest.raises(ValueError, match="y: 128 columns"):
            gemm.linear_plan(x, w, x, 16)


def test_small_shapes(gemm):
    """Widths of a small checkpoint, down to one multiple of 64: our kernel or cuBLASLt, right either way."""
    for n, k, m in ((8, 64, 5), (256, 256, 77), (1032, 192, 128), (2056, 320, 33), (512, 1024, 300)):
        with device.Arena(2 * (n * k + m * k + m * n) + 2048, "test") as arena:
            w, x, y = arena.take((n, k)), arena.take((m, k)), arena.take((m, n))
            gemm_trials.RANDOM(gemm.stream, 1056, w, 5, 0.0)
            gemm_trials.RANDOM(gemm.stream, 1056, x, 7, 1.0)
            device.fill(y, POISON, gemm.stream)
            gemm.linear_plan(x, w, y, m)(gemm.stream)
            gemm.stream.synchronize()
            assert error(y, x, w) < 3e-3, (n, k, m)


def test_random_data_are_what_they_say(gemm):
    with device.Arena(4 << 20, "test") as arena:
        a = arena.take((1000, 1024))
        gemm_trials.RANDOM(gemm.stream, 1056, a, 3, 0.0)
        gemm.stream.synchronize()
        v = values(a).float()
        assert abs(v.mean().item()) < 0.01 and abs(v.std().item() - 1) < 0.01 and np.isfinite(v.cpu().numpy()).all()
        assert len(torch.unique(bits(a)[0])) > 200 and not torch.equal(bits(a)[0], bits(a)[1])


def one_pass() -> None:
    """Both kernels of ours once, with every kind of edge, for compute-sanitizer."""
    gemm = Gemm(device.find_device(), tune=False)
    for name, m, n, k in ((OWN, 77, 264, 256), (OWN, 40, 34816, 64), (WIDE, 130, 272, 128), (WIDE, 200, 17008, 192)):
        with device.Arena(2 * (n * k + m * k + m * n) + 2048, "test") as arena:
            w, x, y = arena.take((n, k)), arena.take((m, k)), arena.take((m, n))
            gemm_trials.RANDOM(gemm.stream, 1056, w, 5, 0.0)
            gemm_trials.RANDOM(gemm.stream, 1056, x, 7, 1.0)
            gemm.bind(name, x, w, y, m)(gemm.stream)
            gemm.stream.synchronize()
            assert error(y, x, w) < 3e-3, (name, m, n, k)
            gemm.bind_gated(name, x, w, None, y[:, :n // 2], m, None)(gemm.stream)
            gemm.stream.synchronize()
            assert torch.isfinite(values(y)[:, :n // 2]).all()
    print("one pass: ok")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(gpu, tool):
    if not gpu.hopper:
        pytest.skip("our kernels need Hopper")
    sanitizer.check(tool, "from tests.gpu.test_gemm import one_pass; one_pass()")
