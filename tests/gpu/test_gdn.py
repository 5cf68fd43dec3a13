"""The gated delta rule on a GPU: against float64, the same bits in any company, in graphs with dependent launches."""
from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jev_kernels.gdn import conv as gdn_conv, portable as gdn  # noqa: E402
from jev_kernels.rowwise import rms_norm  # noqa: E402
from jev_kernels.runtime import device  # noqa: E402
from tests.gpu import sanitizer  # noqa: E402
from tests.gpu.gdn_problem import KINDS, Array, Problem, bf16, capture, error, inputs, reference  # noqa: E402

pytestmark = pytest.mark.gpu
LIMIT = 4e-3


@pytest.fixture(params=["portable", "hopper"])
def hopper(request):
    if request.param == "hopper" and not device.on_hopper():
        pytest.skip("needs compute capability 9.0")
    return request.param == "hopper"


def sequences(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, n) for n in lengths]


def branches(prefix, tails, seed=0):
    """Sequences that share a prefix and go on with a different token each."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 1000, prefix)
    return [np.concatenate([shared, [2000 + i], rng.integers(0, 1000, n - 1)]) for i, n in enumerate(tails)]


def three_levels(seed=0):
    """Branches inside chunks and on their boundaries, three levels deep, one of them the prefix of another."""
    rng = np.random.default_rng(seed)
    root = rng.integers(0, 1000, 320)
    out = []
    for at in (30, 64, 100, 128, 192, 250, 320):
        child = np.concatenate([root[:at], [5000 + at], rng.integers(0, 1000, 200)])
        out.append(child)
        for cut in (at + 1, at + 40, 64 * (at // 64 + 2)):
            grand = np.concatenate([child[:cut], [6000 + cut], rng.integers(0, 1000, 90)])
            out.append(grand)
            out.append(np.concatenate([grand[:cut + 30], [7000]]))
            out.append(np.concatenate([grand[:64 * (cut // 64 + 1)], [7001, 7002]]))
    return out + [root, root[:77]]


TREES = {"three levels": three_levels(), "255 short": branches(700, [3 + i % 17 for i in range(255)]),
         "255 at a boundary": branches(704, [1 + i % 70 for i in range(255)]),
         "questions": branches(200, [137, 400, 64, 65, 1, 300, 222, 90])}


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 127, 139, 700, 2048, 4097])
def test_sizes(rows, hopper):
    p = Problem(sequences(rows), hopper=hopper)
    assert error(p.run(), reference(p.pool, *p.data)) <= LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(kind, hopper):
    p = Problem(sequences(700, 139), kind, hopper=hopper)
    assert error(p.run(), reference(p.pool, *p.data)) <= LIMIT


@pytest.mark.parametrize("tree", TREES)
def test_trees(tree, hopper):
    p = Problem(TREES[tree], hopper=hopper)
    out = p.run()
    assert error(out, reference(p.pool, *p.data)) <= LIMIT
    assert p.pool.n_slots > 0


@pytest.mark.parametrize("kind", ["correlated", "aligned", "half aligned"])
def test_states_kept_for_branches_are_good_enough(kind, hopper):
    """Nearly parallel keys leave the largest error in a state; branches that resume from it must not show it."""
    p = Problem(branches(1000, [40] * 20), kind, hopper=hopper)
    out, ref = p.run(), reference(p.pool, *p.data)
    tails = p.pool.positions >= 1000
    assert error(out[tails], ref[tails]) <= LIMIT
    at_boundary = Problem(branches(1024, [1] * 20), kind, hopper=hopper)
    out, ref = at_boundary.run(), reference(at_boundary.pool, *at_boundary.data)
    tails = at_boundary.pool.positions >= 1024
    assert error(out[tails], ref[tails]) <= LIMIT


@pytest.mark.parametrize("heads", [(2, 4), (1, 4)])
def test_other_numbers_of_heads(heads, hopper):
    p = Problem(TREES["questions"], key_heads=heads[0], value_heads=heads[1], hopper=hopper)
    assert error(p.run(), reference(p.pool, *p.data)) <= LIMIT


def test_states_are_those_of_the_recurrence(hopper):
    p = Problem(branches(128, [5, 6]), hopper=hopper)
    p.run()
    q, k, v, g, beta = (x[:128].double() for x in p.data)
    k = (k * torch.rsqrt((k * k).sum(-1, True) + 1e-6)).repeat_interleave(3, 1)
    s = torch.zeros(48, 128, 128, dtype=torch.float64, device="cuda")
    for t in range(128):
        s = s * torch.exp(g[t])[:, None, None]
        d = beta[t][:, None] * (v[t] - torch.bmm(k[t][:, None], s)[:, 0])
        s = torch.baddbmm(s, k[t][:, :, None], d[:, None])
    stored = torch.from_numpy(np.ascontiguousarray(gdn.state_matrices(p.states.cpu().numpy(), hopper)))
    assert error(stored[0].cuda(), s) <= 1e-3


def keyed(problem, table):
    """Inputs for a problem's rows that depend on the row's prefix alone, so that every pool has the same ones."""
    keys = []
    for t, parent in enumerate(problem.pool.parents):
        keys.append(hash((keys[parent] if parent >= 0 else 0, int(problem.pool.ids[t]))) % len(table[0]))
    at = torch.tensor(keys, device="cuda")
    return tuple(x[at] for x in table)


def same_bits(out, expected, what):
    """Fails with where [positions, heads, 128] differ, and by how much: what a fault of the hardware or a race looks like."""
    different = (out != expected).nonzero().cpu()
    if len(different):
        positions, heads, columns = (sorted(set(x.tolist())) for x in different.T)
        most = (out.float() - expected.float()).abs().max().item()
        pytest.fail(f"{what}: {len(different)} elements differ by up to {most:.3g} "
                    f"(the largest is {expected.abs().max().item():.3g}), at {len(positions)} of {len(out)} positions "
                    f"from {positions[:6]}, heads {heads}, columns {columns[:6]} ...")


def test_bits_depend_on_the_prefix_alone(hopper):
    """Alone, in random groups, in random order: every row of every sequence has the same bits."""
    rng = np.random.default_rng(1)
    pool = three_levels() + branches(700, [3 + i % 17 for i in range(60)]) + sequences(1, 63, 64, 65, 500)
    heads = dict(key_heads=2, value_heads=4, hopper=hopper)
    table = inputs(100_003, "plain", 2, 4)

    def run(chosen):
        data = keyed(Problem(chosen, **heads), table)
        p = Problem(chosen, data=data, **heads)
        out = p.run()
        assert not torch.isnan(out.float()).any()
        return [out[torch.from_numpy(p.rows_of(i)).cuda()] for i in range(len(chosen))]

    alone = [run([s])[0] for s in pool]
    for size in (1000, 40, 9, 3):
        order = rng.permutation(len(pool))
        for at in range(0, min(len(pool), size * 4), size):
            group = order[at:at + size]
            for i, out in zip(group, run([pool[i] for i in group])):
                same_bits(out, alone[i], f"sequence {i} in a group of {len(group)}")


@pytest.mark.parametrize("rows, value_heads", [(64, 48), (400, 48), (1700, 48), (4000, 48), (9000, 48), (2500, 32)])
def test_a_sequence_alone_has_the_bits_it_has_in_company(hopper, rows, value_heads):
    """Alone the scan follows the first kernel chunk by chunk, some of whose blocks leave early: after one item, or after
    two where there are 9,000 rows."""
    table = inputs(10_007, "plain", 16, value_heads)
    mine, other = sequences(rows, 90)
    out = []
    for chosen in ([mine], [mine, other]):
        heads = dict(value_heads=value_heads, hopper=hopper)
        p = Problem(chosen, data=keyed(Problem(chosen, **heads), table), **heads)
        out.append(p.run()[torch.from_numpy(p.rows_of(0)).cuda()])
    same_bits(*out, f"{rows} rows")


@pytest.mark.parametrize("live", [1, 2, 17, 40, 63])
def test_what_follows_in_a_chunk_changes_no_bit(hopper, live):
    """Later rows of a chunk meet coefficients that are zero. Whatever their values and decays: no sum may notice."""
    tokens, = sequences(64)
    q, k, v, g, beta = Problem([tokens], hopper=hopper).data
    v = torch.cat([v[:live] * 1e-4, v[live:] * 3e3])
    g = torch.cat([g[:live], g[live:] * 317 - 40])
    data = (q, k, v, g, beta)
    alone = Problem([tokens[:live]], data=tuple(x[:live].contiguous() for x in data), hopper=hopper).run()
    followed = Problem([tokens], data=data, hopper=hopper).run()
    same_bits(followed[:live], alone, f"{live} rows before large ones")


def test_layers_in_a_graph(hopper):
    """48 calls back to back under dependent launch, replayed, on six sets of inputs, with one scratch, one progress and
    one set of states for all, as in a forward pass: trees, and sequences that are alone, where the two kernels overlap."""
    pools = (TREES["three levels"], sequences(2500), sequences(70), TREES["questions"], sequences(1700), sequences(130))
    layers = [Problem(pool, hopper=hopper, seed=n) for n, pool in enumerate(pools)]
    wanted = []
    for p in layers:
        wanted.append(p.run(pdl=False).clone())
    shared = [max((p.arguments[at] for p in layers), key=lambda a: a.tensor.numel()) for at in (-3, -2, -1)]
    for p in layers:
        p.arguments = (*p.arguments[:-3], *shared)

    def forward():
        for n in range(48):
            layers[n % len(layers)].launch(pdl=True)

    graph = capture(forward)
    for _ in range(5):
        for p in layers:
            p.poison()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert not shared[-1].tensor.any()
        for p, want in zip(layers, wanted):
            assert torch.equal(p.out[:p.pool.n_rows].reshape(want.shape), want)


@pytest.mark.parametrize("rows", [70, 600, 2500])
def test_its_neighbours_in_a_chain(hopper, rows):
    """Convolution, delta rule and gated norm under dependent launch, of two inputs in turn through the same buffers: nothing
    is read before it is there, or overwritten before it has been read."""
    p = Problem(sequences(rows), hopper=hopper)
    capacity, columns = p.qkv.shape
    value_columns = p.out.shape[1]
    parents = Array(torch.arange(-1, capacity - 1, dtype=torch.int32, device="cuda"), "<i4")
    taps = bf16(0.5 * torch.randn(columns, 4, device="cuda").bfloat16())
    weight = bf16(torch.randn(128, device="cuda").bfloat16())
    sets = [[bf16(torch.randn(capacity, n, device="cuda").bfloat16()) for n in (columns, value_columns, value_columns)]
            for _ in range(2)]

    def chain(x, z, y, pdl):
        stream = torch.cuda.current_stream().cuda_stream
        gdn_conv.gdn_conv(stream, x, taps, parents, p.qkv, p.metadata[0], pdl=pdl)
        p.launch(pdl)
        rms_norm.gated_rms_norm(stream, p.arguments[3], z, weight, y, p.metadata[0], 1e-6, pdl=pdl)

    wanted = []
    for x, z, y in sets:
        chain(x, z, y, False)
        torch.cuda.synchronize()
        wanted.append(y.tensor[:rows].clone())
        assert not torch.isnan(wanted[-1].view(torch.bfloat16).float()).any()
    assert not torch.equal(*wanted)
    graph = capture(lambda: [chain(*buffers, True) for buffers in sets], 10)
    for _ in range(10):
        for _, _, y in sets:
            y.tensor.fill_(0x7FC0)
        p.qkv.tensor.fill_(0x7FC0)
        p.poison()
        graph.replay()
        torch.cuda.synchronize()
        for (_, _, y), want in zip(sets, wanted):
            assert torch.equal(y.tensor[:rows], want)


def test_a_graph_follows_its_metadata(hopper):
    """One captured launch serves any pool within the capacities."""
    big = Problem(sequences(1000), hopper=hopper)
    small = Problem(branches(100, [30, 20]), hopper=hopper, data=tuple(x[:150].clone() for x in big.data))
    want = small.run().clone()
    graph = capture(big.launch)
    for to, have in zip(big.metadata, small.metadata):
        n = min(len(to.tensor), len(have.tensor))
        to.tensor[:n].copy_(have.tensor[:n])
    big.poison()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(big.out[:150].reshape(want.shape), want)
    assert torch.isnan(big.out[150:].float()).all()


def test_arguments_are_checked():
    p = Problem(sequences(5))
    names = ("qkv", "g", "beta", "o", "counts", "chunk_rows", "chunk_out_rows", "chunk_slots", "runs", "states",
             "scratch", "progress")
    for at, name in enumerate(names[:None if device.on_hopper() else -2]):        # only the Hopper kernels use the last two
        wrong = list(p.arguments)
        wrong[at] = torch.zeros(3, 3, dtype=torch.float64, device="cuda")
        with pytest.raises(ValueError, match=name):
            gdn.gated_delta_rule(0, *wrong)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool, hopper):
    """One pass over a small tree under compute-sanitizer.

    Where a block fills a stage of its ring again, racecheck reports hazards between the copies and the reads three chunks
    before. What orders them (the reads, bar.warp.sync, one lane's arrival at an mbarrier, the copying threads' wait) is
    followed in the simulator by tests/kernels/test_races.py; racecheck gets blocks that fill no stage twice.
    """
    sanitizer.check(tool, f"from tests.gpu.gdn_problem import one_pass; one_pass({hopper}, {tool == 'memcheck'})")
