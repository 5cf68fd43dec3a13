"""Checks of the row-wise kernels against ``jev_kernels.reference``: small shapes in the simulator, real ones on a GPU.

Outputs start poisoned, live in larger buffers, and what lies around the live rows must not change. A BF16 output may be
one ulp from the rounded reference. Where an operation rounds more than once, float32 may put an inner value on the
other side of a tie, and the next rounding starts from there; so the comparison is with the reference of a few inner
values within float32's error, whichever is nearest.
"""
from __future__ import annotations

import itertools

import numpy as np
from numba import cuda

from jev_kernels import bf16, reference
from jev_kernels.gdn import conv as gdn_conv
from jev_kernels.pool import COUNTS, LASTS, ROWS
from jev_kernels.rowwise import embed, rms_norm, rope, silu

r = bf16.round_float64
POISON = {np.dtype(np.uint16): 0x7FA5, np.dtype(np.float32): np.float32(np.nan), np.dtype(np.int32): -(2**30)}
EPS = 1e-6
NUDGE = (0.0, -2.0**-20, 2.0**-20)          # relative float32 error allowed to a value before an inner rounding


class Matrix:
    """A [capacity, width] device matrix inside a poisoned buffer: rows ``ld`` apart, the first at ``offset`` values."""

    def __init__(self, values, capacity=None, ld=None, offset=0, poisoned=False):
        values = np.asarray(values)
        self.n, self.width = values.shape
        self.capacity = capacity or self.n
        self.ld, self.offset = ld or self.width, offset
        self.before = np.full(offset + self.capacity * self.ld + 64, POISON[values.dtype], values.dtype)
        if not poisoned:
            self._inside(self.before)[:self.n] = values
        self.buffer = cuda.to_device(self.before)
        inside = self.buffer[offset:offset + self.capacity * self.ld]
        self.array = inside.reshape(self.capacity, self.ld)[:, :self.width]

    def _inside(self, flat):
        return flat[self.offset:self.offset + self.capacity * self.ld].reshape(self.capacity, self.ld)[:, :self.width]

    def read(self, n=None):
        """The first n rows; everything else must be as it was."""
        after = self.buffer.copy_to_host()
        n = self.n if n is None else n
        out = self._inside(after)[:n].copy()
        expected = self.before.copy()
        self._inside(expected)[:n] = out
        assert np.array_equal(after.view(np.uint8), expected.view(np.uint8)), "written outside the live rows"
        return out


def output(n, width, dtype=np.uint16, **where) -> Matrix:
    return Matrix(np.zeros((n, width), dtype), poisoned=True, **where)


def counts(rows=0, lasts=0):
    out = np.zeros(COUNTS, np.int32)
    out[ROWS], out[LASTS] = rows, lasts
    return cuda.to_device(out)


def index(values, capacity=None):
    """int32 [capacity] on the device, garbage after the values."""
    out = np.full(capacity or len(values), POISON[np.dtype(np.int32)], np.int32)
    out[:len(values)] = values
    return cuda.to_device(out)


def values(rng, *shape, scale=1.0) -> np.ndarray:
    """Normal BF16 values; large arrays draw from 32,768 of them."""
    if np.prod(shape) <= 1 << 16:
        return bf16.from_float64(rng.standard_normal(shape) * scale)
    return values(rng, 1 << 15, scale=scale)[rng.integers(0, 1 << 15, shape, dtype=np.uint16)]


def sample(rows: int) -> np.ndarray:
    """The rows to compare with float64: all of a few, else the first, the last and some between."""
    return np.arange(rows) if rows <= 160 else np.unique(np.linspace(0, rows - 1, 48).astype(int))


def wide(x) -> np.ndarray:
    return bf16.to_float32(x).astype(np.float64)


def ulps(got, want) -> np.ndarray:
    """Distance in BF16 values, element by element; NaN only matches NaN (distance 0), else 65535."""
    def ordered(x):
        x = x.astype(np.int32)
        return np.where(x & 0x8000, -(x & 0x7FFF), x)
    nan = [(x & 0x7FFF) > 0x7F80 for x in (got, want)]
    return np.where(nan[0] | nan[1], np.where(nan[0] & nan[1], 0, 65535), np.abs(ordered(got) - ordered(want)))


def assert_close(got, candidates) -> int:
    """Within one ulp of the nearest of the float64 references; returns how many differ from the first."""
    distances = [ulps(got, bf16.from_float64(c)) for c in candidates]
    nearest = np.minimum.reduce(distances)
    worst = np.unravel_index(nearest.argmax(), nearest.shape)
    assert nearest[worst] <= 1, (f"{nearest[worst]} ulps at {worst}: {wide(got[worst])} for {candidates[0][worst]}; "
                                 f"{(nearest > 1).sum()} of {got.size} off")
    return int((distances[0] > 0).sum())


def bits(x):
    return np.ascontiguousarray(x).view(np.uint8)


# ---------------------------------------------------------------- the operations
def check_embed(rng, rows, width, capacity=None, stream=0, **where):
    table = Matrix(values(rng, 50, width), **where)
    ids = rng.integers(0, 50, rows)
    x = output(rows, width, capacity=capacity, **where)
    embed.embed(stream, table.array, index(ids, capacity), x.array, counts(rows=rows))
    np.testing.assert_array_equal(x.read(), table.read()[ids])


def check_gather_rows(rng, rows, width, lasts, capacity=None, stream=0, **where):
    x = Matrix(values(rng, rows, width), **where)
    at = rng.integers(0, rows, lasts)
    y = output(lasts, width, capacity=capacity)
    embed.gather_rows(stream, x.array, index(at, capacity), y.array, counts(rows=rows, lasts=lasts))
    np.testing.assert_array_equal(y.read(), x.read()[at])


def check_rms_norm(rng, rows, width, capacity=None, scale=1.0, gathered=False, data=None, stream=0, **where):
    """Returns the output's bits."""
    x = Matrix(values(rng, rows, width, scale=scale) if data is None else data, capacity=capacity, **where)
    w = values(rng, width, scale=0.3)
    at = rng.integers(0, rows, max(1, rows // 2)) if gathered else np.arange(rows)
    y = output(len(at), width, capacity=None if gathered else capacity, **where)
    rms_norm.rms_norm(stream, x.array, cuda.to_device(w), y.array, counts(rows=rows, lasts=len(at)), EPS,
                      rows=index(at) if gathered else None)
    out, pick = y.read(), sample(len(at))
    with np.errstate(invalid="ignore"):
        assert_close(out[pick], [reference.rms_norm(wide(x.read()[at[pick]]), wide(w), EPS)])
    return out


def check_add_rms_norm(rng, rows, width, capacity=None, scale=1.0, in_place=False, gathered=False, stream=0, **where):
    res, delta = (Matrix(values(rng, rows, width, scale=s), capacity=capacity, **where) for s in (scale, scale / 3))
    before = res.read()
    w = values(rng, width, scale=0.3)
    at = rng.integers(0, rows, max(1, rows // 2)) if gathered else np.arange(rows)
    y = output(len(at), width, capacity=None if gathered else capacity, **where)
    out = res if in_place else output(len(at), width, capacity=None if gathered else capacity, **where)
    rms_norm.add_rms_norm(stream, res.array, delta.array, cuda.to_device(w), y.array, counts(rows=rows, lasts=len(at)),
                          EPS, out=None if in_place else out.array, rows=index(at) if gathered else None)
    pick = sample(len(at))
    total = bf16.from_float64(wide(before[at[pick]]) + wide(delta.read()[at[pick]]))
    np.testing.assert_array_equal(out.read()[pick], total)
    norm = y.read()
    assert_close(norm[pick], [reference.rms_norm(wide(total), wide(w), EPS)])
    return norm


def check_gated_rms_norm(rng, rows, heads, capacity=None, scale=1.0, in_place=False, stream=0, **where):
    width = heads * 128
    o, z = (Matrix(values(rng, rows, width, scale=s), capacity=capacity, **where) for s in (scale, min(scale, 8.0)))
    before = o.read()
    w = bf16.from_float64(1 + 0.3 * rng.standard_normal(128))
    y = o if in_place else output(rows, width, capacity=capacity, **where)
    rms_norm.gated_rms_norm(stream, o.array, z.array, cuda.to_device(w), y.array, counts(rows=rows), EPS)
    out, pick = y.read(), sample(rows)
    x, gate = (wide(v[pick]).reshape(len(pick), heads, 128) for v in (before, z.read()))
    scaled = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)
    candidates = [r(r(wide(w) * r(scaled * (1 + a))) * reference.silu(gate)) for a in NUDGE]
    np.testing.assert_array_equal(candidates[0], reference.gated_rms_norm(x, gate, wide(w), EPS, r))
    assert_close(out[pick].reshape(x.shape), candidates)
    return out


def interleaved(gate, up):
    """[rows, 2 width]: four columns of gate, four of up, and so on, as ``reference.gate_and_up`` takes them apart."""
    pairs = [x.reshape(len(x), -1, reference.INTERLEAVE) for x in (gate, up)]
    return np.stack(pairs, 2).reshape(len(gate), -1)


def check_silu_mul(rng, rows, width, capacity=None, scale=2.0, data=None, stream=0, **where):
    x = Matrix(values(rng, rows, 2 * width, scale=scale) if data is None else data, capacity=capacity, **where)
    y = output(rows, width, capacity=capacity)
    silu.silu_mul(stream, x.array, y.array, counts(rows=rows))
    out, pick = y.read(), sample(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        before = wide(x.read()[pick])
        g, u = reference.gate_and_up(before)
        candidates = [r(r(reference.silu(g) * (1 + a)) * u) for a in NUDGE]
        np.testing.assert_array_equal(candidates[0], reference.silu_mul(before, r))
    assert_close(out[pick], candidates)
    return out


def check_qk_rope(rng, rows, q_heads, k_heads, capacity=None, scale=1.0, max_length=300, theta=1e7, stream=0, **where):
    capacity = capacity or rows
    width = 2 * (q_heads + k_heads) * 256
    x = Matrix(values(rng, rows, width, scale=scale), capacity=capacity, **where)
    before = x.read()
    qw, kw = values(rng, 256, scale=0.3), values(rng, 256, scale=0.3)
    table = reference.rope_table(max_length, 64, theta)
    positions = rng.integers(0, max_length, rows)
    rope.qk_rope(stream, x.array, cuda.to_device(qw), cuda.to_device(kw), cuda.to_device(table),
                 index(positions, capacity), counts(rows=rows), q_heads, k_heads, EPS)
    spare = min(capacity, rows + 128) - rows
    k_from = 2 * q_heads * 256
    out = x.read(rows + spare)
    zeroed = out[rows:]
    assert not zeroed[:, k_from:].any(), "k and v after the last row are zeros"
    np.testing.assert_array_equal(zeroed[:, :k_from], POISON[np.dtype(np.uint16)])
    out = out[:rows]
    gate, v = slice(q_heads * 256, k_from), slice(k_from + k_heads * 256, width)
    for untouched in (gate, v):
        np.testing.assert_array_equal(out[:, untouched], before[:, untouched])
    pick = sample(rows)
    at = positions[pick]
    cos, sin = wide(table[:, :32])[at][:, None, :], wide(table[:, 32:])[at][:, None, :]
    q_columns, k_columns = slice(0, q_heads * 256), slice(k_from, k_from + k_heads * 256)
    for columns, heads, w in ((q_columns, q_heads, qw), (k_columns, k_heads, kw)):
        h = wide(before[pick, columns]).reshape(len(pick), heads, 256)
        scaled = h / np.sqrt(np.mean(h * h, -1, keepdims=True) + EPS) * (1 + wide(w))
        variants = [r(scaled * (1 + a)) for a in NUDGE]
        candidates = []
        for a, b in itertools.product(variants, repeat=2):          # either of a pair may be on the other side of a tie
            low, high = a[..., :32], b[..., 32:64]
            candidates.append(np.concatenate([r(r(low * cos) - r(high * sin)), r(r(high * cos) + r(low * sin)),
                                              a[..., 64:]], axis=-1))
        np.testing.assert_array_equal(candidates[0], reference.rotate(variants[0], cos[:, 0], sin[:, 0], r))
        assert_close(out[pick, columns].reshape(h.shape), candidates)
    return out


def tree(rng, rows, branches=3):
    """Parents of a depth-first trie: chains, each starting somewhere in the one before it."""
    parents = np.arange(-1, rows - 1, dtype=np.int32)
    for start in sorted(rng.integers(1, rows, min(branches, rows - 1)) if rows > 1 else ()):
        parents[start] = rng.integers(-1, start)
    return parents


def check_gdn_conv(rng, rows, channels, capacity=None, scale=1.0, parents=None, stream=0, **where):
    capacity = capacity or rows
    x = Matrix(values(rng, rows, channels, scale=scale), capacity=capacity, **where)
    y = output(rows, channels, capacity=capacity)
    w = values(rng, channels, 4, scale=0.5)
    parents = tree(rng, rows) if parents is None else parents
    gdn_conv.gdn_conv(stream, x.array, cuda.to_device(w), index(parents, capacity), y.array, counts(rows=rows))
    out = y.read()
    assert_conv(out, x.read(), parents, wide(w))
    return out


def assert_conv(out, x, parents, w):
    """x BF16; w float64."""
    # The inner sum may cancel: float32's error is relative to its terms, not to what is left.
    pick = sample(len(out))
    exact, terms = _taps(x, parents, w, pick, np.positive), _taps(x, parents, w, pick, np.abs)
    candidates = [r(reference.silu(r(exact + a * 0.25 * terms))) for a in NUDGE]
    if len(pick) == len(out):
        np.testing.assert_array_equal(candidates[0], reference.gdn_conv(wide(x), parents, w, r))
    assert_close(out[pick], candidates)


def _taps(x, parents, w, row, of):
    up, total = np.append(parents, -1), 0.0
    for tap in range(3, -1, -1):
        total = total + of(np.where(row[:, None] < 0, 0.0, wide(x[row])) * w[:, tap])
        row = up[row]
    return total


def check_gdn_gates(rng, rows, heads, capacity=None, scale=3.0, stream=0, **where):
    b, a = (Matrix(values(rng, rows, heads, scale=scale), capacity=capacity, **where) for _ in range(2))
    a_log, dt_bias = values(rng, heads), values(rng, heads, scale=3.0)
    beta, g = output(rows, heads, capacity=capacity), output(rows, heads, np.float32, capacity=capacity)
    gdn_conv.gdn_gates(stream, b.array, a.array, cuda.to_device(a_log), cuda.to_device(dt_bias), beta.array, g.array,
                       counts(rows=rows))
    assert_gates(beta.read(), g.read(), b.read(), a.read(), a_log, dt_bias)
    return beta.read(), g.read()


def assert_gates(beta, g, b, a, a_log, dt_bias):
    want_g, want_beta = reference.gdn_gates(wide(b), wide(a), wide(a_log), wide(dt_bias))
    assert_close(beta, [want_beta])
    np.testing.assert_allclose(g, want_g, rtol=1e-5, atol=1e-37)


def check_gdn_conv_gates(rng, rows, channels, heads, capacity=None, stream=0):
    """One launch gives the bits of two, on the columns of one projection."""
    capacity = capacity or rows
    z = 24
    projected = Matrix(values(rng, rows, channels + z + 2 * heads), capacity=capacity,
                       ld=-(-(channels + z + 2 * heads) // 8) * 8)
    x, b, a = (projected.array[:, s] for s in (slice(0, channels), slice(channels + z, channels + z + heads),
                                               slice(channels + z + heads, channels + z + 2 * heads)))
    w, a_log, dt_bias = values(rng, channels, 4), values(rng, heads), values(rng, heads)
    on_device = [cuda.to_device(v) for v in (w, a_log, dt_bias)]
    parents = tree(rng, rows)
    up, n = index(parents, capacity), counts(rows=rows)
    results = []
    for together in (False, True):
        y, beta = output(rows, channels, capacity=capacity), output(rows, heads, capacity=capacity)
        g = output(rows, heads, np.float32, capacity=capacity)
        if together:
            gdn_conv.gdn_conv_gates(stream, x, on_device[0], up, b, a, *on_device[1:], y.array, beta.array, g.array, n)
        else:
            gdn_conv.gdn_conv(stream, x, on_device[0], up, y.array, n)
            gdn_conv.gdn_gates(stream, b, a, *on_device[1:], beta.array, g.array, n)
        results.append([y.read(), beta.read(), g.read()])
    host = projected.read()
    assert_conv(results[1][0], host[:, :channels], parents, wide(w))
    b_host, a_host = np.split(host[:, channels + z:], 2, axis=1)
    assert_gates(results[1][1], results[1][2], b_host, a_host, a_log, dt_bias)
    for one, two in zip(*results):
        np.testing.assert_array_equal(bits(one), bits(two))


def one_pass():
    """Every kernel once, with 16-byte accesses and without, in buffers no larger than they must be (for a sanitizer)."""
    rng = np.random.default_rng(0)
    for odd in ({}, {"offset": 1}):
        check_embed(rng, 3, 72, **odd)
        check_gather_rows(rng, 5, 72, 3, **odd)
        check_rms_norm(rng, 3, 1100, scale=1e30, **odd)
        check_add_rms_norm(rng, 3, 1100, in_place=True, **odd)
        check_add_rms_norm(rng, 4, 264, gathered=True, **odd)
        check_gated_rms_norm(rng, 3, 3, **odd)
        check_silu_mul(rng, 3, 76, **odd)
        check_gdn_conv(rng, 11, 40, **odd)
        check_gdn_gates(rng, 11, 5, **odd)
    check_qk_rope(rng, 3, 3, 2, capacity=5)
    check_gdn_conv_gates(rng, 11, 64, 5)
    print("one pass: ok")
