"""The row-wise kernels on a GPU, at the widths of the models, against float64; the same bits in any company."""
from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from jev_kernels import reference
from jev_kernels.gdn import conv as gdn_conv
from jev_kernels.rowwise import embed, rms_norm, rope, silu
from jev_kernels.runtime import device
from jev_kernels.runtime.graph import capture
from tests.gpu import sanitizer
from tests.kernels import checks

pytestmark = pytest.mark.gpu
ROWS = [1, 2, 63, 64, 65, 127, 139, 700, 2048, 4097]
H, I, HQ, HK, LV, CONV = 5120, 17408, 24, 4, 48, 10240                    # the 27B


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def room(rows):
    """Capacity of a bucket, and rows farther apart than they are wide."""
    return rows + rows // 16 + 1


@pytest.mark.parametrize("rows", ROWS)
def test_embed_and_gather(rows, rng):
    checks.check_embed(rng, rows, H, capacity=room(rows), ld=H + 8)
    checks.check_gather_rows(rng, rows, 6144, min(rows, 300))
    checks.check_embed(rng, min(rows, 139), 1021, offset=1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [H, 4096])
def test_norms(rows, width, rng):
    checks.check_rms_norm(rng, rows, width, capacity=room(rows), ld=width + 8)
    checks.check_add_rms_norm(rng, rows, width, capacity=room(rows))
    checks.check_add_rms_norm(rng, rows, width, in_place=True, ld=width + 24)
    checks.check_add_rms_norm(rng, rows, width, gathered=True)


@pytest.mark.parametrize("width", [1, 7, 96, 255, 1000, 2049, 4104, 12288, 20000, rms_norm.MAX_WIDTH])
@pytest.mark.parametrize("offset", [0, 1])
def test_norms_of_any_width(width, offset, rng):
    a = checks.check_rms_norm(np.random.default_rng(1), 9, width, offset=offset)
    b = checks.check_rms_norm(np.random.default_rng(1), 9, width, ld=-(-width // 8) * 8 + 8, capacity=12)
    np.testing.assert_array_equal(a, b)
    checks.check_add_rms_norm(rng, 9, width, offset=offset, in_place=True)


@pytest.mark.parametrize("rows", ROWS)
def test_gated_norm(rows, rng):
    checks.check_gated_rms_norm(rng, rows, LV, capacity=room(rows), ld=LV * 128 + 40)
    checks.check_gated_rms_norm(rng, rows, LV, in_place=True)
    checks.check_gated_rms_norm(rng, min(rows, 139), 3, offset=1)


@pytest.mark.parametrize("rows", ROWS)
def test_silu(rows, rng):
    checks.check_silu_mul(rng, rows, I, capacity=room(rows))
    checks.check_silu_mul(rng, min(rows, 139), 1020, offset=3)


def test_silu_of_every_gate(rng):
    gate = np.tile(np.arange(2**16, dtype=np.uint16), 1)[None]
    for up in (0x3F80, 0xC2F7, 0x0080):
        checks.check_silu_mul(rng, 1, 2**16, data=checks.interleaved(gate, np.full_like(gate, up)))


@pytest.mark.parametrize("rows", ROWS)
def test_qk_rope(rows, rng):
    checks.check_qk_rope(rng, rows, HQ, HK, capacity=room(rows), max_length=8192)
    checks.check_qk_rope(rng, min(rows, 139), 16, 4, capacity=rows + 131)


@pytest.mark.parametrize("rows", ROWS)
def test_conv_and_gates(rows, rng):
    checks.check_gdn_conv(rng, rows, CONV, capacity=room(rows), ld=16480, parents=checks.tree(rng, rows, branches=40))
    checks.check_gdn_gates(rng, rows, LV, capacity=room(rows), ld=16480)
    checks.check_gdn_conv_gates(rng, rows, 1024 if rows > 139 else CONV, LV, capacity=room(rows))
    checks.check_gdn_conv(rng, min(rows, 139), 1021)


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e-4, 1e4, 1e18, 1e30, 1e38])
def test_extreme_amplitudes(scale, rng):
    checks.check_rms_norm(rng, 70, H, scale=scale)
    checks.check_add_rms_norm(rng, 70, H, scale=scale)
    checks.check_gated_rms_norm(rng, 70, LV, scale=scale)
    checks.check_qk_rope(rng, 70, HQ, HK, scale=scale)
    checks.check_silu_mul(rng, 20, 4096, scale=scale)
    if scale < 1e30:
        checks.check_gdn_conv(rng, 70, 2048, scale=scale)
    checks.check_gdn_gates(rng, 70, LV, scale=min(scale, 1e4))


def test_the_same_bits_in_any_company(rng):
    """A row's outputs for 4,097 rows, and among any smaller number of them."""
    most = ROWS[-1]
    conv_width = 2048
    x, z, big = (cuda.to_device(checks.values(rng, most, w)) for w in (H, H, 2 * H))
    qkv = checks.values(rng, most, 2 * 10 * 256)
    w, w128, w256 = (cuda.to_device(checks.values(rng, n)) for n in (H, 128, 256))
    taps, heads = cuda.to_device(checks.values(rng, conv_width, 4)), cuda.to_device(checks.values(rng, 40))
    table = cuda.to_device(reference.rope_table(5000, 64, 1e7))
    positions = checks.index(np.arange(most))
    parents = checks.index(checks.tree(rng, most, branches=100))

    def run(n, capacity):
        """All outputs of n rows in buffers of ``capacity``."""
        live = checks.counts(rows=n, lasts=n)
        shapes = {"norm": H, "sum": H, "add": H, "gated": H, "silu": H, "conv": conv_width, "beta": 40}
        out = {k: cuda.to_device(np.full((capacity, v), 0x7FA5, np.uint16)) for k, v in shapes.items()}
        g = cuda.to_device(np.full((capacity, 40), np.nan, np.float32))
        heads_in_place = cuda.to_device(qkv[:capacity])
        a, b, c = x[:capacity], z[:capacity], big[:capacity]
        rms_norm.rms_norm(0, a, w, out["norm"], live, 1e-6)
        rms_norm.add_rms_norm(0, a, b, w, out["add"], live, 1e-6, out=out["sum"])
        rms_norm.gated_rms_norm(0, a, b, w128, out["gated"], live, 1e-6)
        silu.silu_mul(0, c, out["silu"], live)
        rope.qk_rope(0, heads_in_place, w256, w256, table, positions, live, 8, 2, 1e-6)
        gdn_conv.gdn_conv_gates(0, a[:, :conv_width], taps, parents, b[:, :40], b[:, 40:80], heads, heads, out["conv"],
                                out["beta"], g, live)
        return {**{k: v.copy_to_host()[:n] for k, v in out.items()}, "g": g.copy_to_host()[:n],
                "rope": heads_in_place.copy_to_host()[:n]}

    full = run(most, most)
    for n in ROWS[:-1]:
        for name, part in run(n, min(most, n + n // 8 + 3)).items():
            assert np.array_equal(checks.bits(part), checks.bits(full[name][:n])), (name, n)


@pytest.mark.parametrize("rows", [1, 107, 2048])
def test_chains_with_programmatic_dependent_launch(rows, rng):
    """Every kernel reads what the one before it wrote; replayed over poisoned buffers, it is always the same bits."""
    capacity, width = rows + 9, 2560
    stream, n = device.Stream(), checks.counts(rows=rows, lasts=rows)
    table = cuda.to_device(checks.values(rng, 999, 2 * width))
    ids, up = checks.index(rng.integers(0, 999, rows), capacity), checks.index(checks.tree(rng, rows, 9), capacity)
    order, at = checks.index(rng.permutation(rows), capacity), checks.index(np.arange(rows), capacity)
    w2, w, w128, w256 = (cuda.to_device(checks.values(rng, k)) for k in (2 * width, width, 128, 256))
    taps, heads = cuda.to_device(checks.values(rng, width, 4)), cuda.to_device(checks.values(rng, 20))
    angles = cuda.to_device(reference.rope_table(rows, 64, 1e7))
    a, b = (cuda.device_array((capacity, 2 * width), np.uint16) for _ in range(2))
    c, d, e, f = (cuda.device_array((capacity, width), np.uint16) for _ in range(4))
    beta, g = cuda.device_array((capacity, 20), np.uint16), cuda.device_array((capacity, 20), np.float32)

    def chain(pdl):
        embed.embed(stream, table, ids, a, n, pdl=False)
        rms_norm.rms_norm(stream, a, w2, b, n, 1e-6, pdl=pdl)
        silu.silu_mul(stream, b, c, n, pdl=pdl)
        gdn_conv.gdn_conv_gates(stream, c, taps, up, c[:, :20], c[:, 20:40], heads, heads, d, beta, g, n, pdl=pdl)
        rms_norm.gated_rms_norm(stream, d, c, w128, e, n, 1e-6, pdl=pdl)
        rms_norm.add_rms_norm(stream, c, e, w, f, n, 1e-6, pdl=pdl)
        rope.qk_rope(stream, f, w256, w256, angles, at, n, 3, 2, 1e-6, pdl=pdl)
        embed.gather_rows(stream, f, order, d, n, pdl=pdl)

    def run(go):
        for buffer in (a, b, c, d, e, f, beta):
            device.fill(buffer, 0x7FA5, stream)
        go()
        stream.synchronize()
        return [checks.bits(v.copy_to_host()[:rows]) for v in (c, d, f, beta, g)]

    want = run(lambda: chain(False))
    graph = capture(stream, lambda: chain(True))
    for go in [lambda: chain(True)] + [lambda: graph.launch(stream)] * 20:
        for got, right in zip(run(go), want):
            np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    """One pass of each kernel under compute-sanitizer."""
    sanitizer.check(tool, "from tests.kernels.checks import one_pass; one_pass()")
