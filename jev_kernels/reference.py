"""The float64 NumPy statement of every operation of the backbone, one function each, named as the kernels are.

Values are float64 arrays. Where the model rounds to BF16 a function calls ``r``: pass ``bf16.round_float64`` for the
model as it runs (every rounding point of the BF16 model, float64 between them), or ``exact`` for the same function in
float64 throughout, which is what error is measured against. NumpyOps runs on these functions; kernels are held to them.

Shapes: T rows, h hidden size, Hq/Hk query/key heads of dim D, Lk/Lv linear key/value heads of dims dk/dv. Rows are nodes
of a token trie in depth-first order: ``parents[t]`` is the row of the previous token, -1 at a sequence's start, and a
parent always has a smaller index. Source of the formulas: ``transformers.models.qwen3_5.modeling_qwen3_5`` (5.10.2);
the gated delta rule is that of Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024).
"""
from __future__ import annotations

import numpy as np

from jev_kernels import bf16
from jev_kernels.pool import CHUNK

L2_EPS = 1e-6          # of the q and k normalisation inside the gated delta rule
INTERLEAVE = 4         # columns of the MLP's gate, then as many of its up, and so on: see ``gate_and_up``


def exact(x: np.ndarray) -> np.ndarray:
    """The rounding function that does not round."""
    return x


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)); x itself above 20, as PyTorch's softplus."""
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def embed(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Rows ``ids`` [T] of the embedding table [V, h]."""
    return table[ids]


def gather_rows(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows ``rows`` of x."""
    return x[rows]


def linear(x: np.ndarray, weight: np.ndarray, r=exact) -> np.ndarray:
    """r(x W^T): x [T, K], weight [N, K]."""
    return r(x @ weight.T)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, r=exact) -> np.ndarray:
    """r(x * rsqrt(mean(x^2) + eps) * (1 + w)) over the last axis; one rounding."""
    return r(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * (1.0 + weight))


def add_rms_norm(residual, delta, weight, eps: float, r=exact) -> tuple[np.ndarray, np.ndarray]:
    """(res, norm): res = r(residual + delta) is kept, norm = rms_norm of the rounded res."""
    residual = r(residual + delta)
    return residual, rms_norm(residual, weight, eps, r)


def gate_and_up(gate_up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(g, u) [T, I] of rows [T, 2I] that hold INTERLEAVE values of g, as many of u, and so on."""
    pairs = gate_up.reshape(len(gate_up), -1, 2, INTERLEAVE)
    return pairs[:, :, 0].reshape(len(gate_up), -1), pairs[:, :, 1].reshape(len(gate_up), -1)


def silu_mul(gate_up: np.ndarray, r=exact) -> np.ndarray:
    """r( r(silu(g)) * u ) of the g and u in a row, see ``gate_and_up``."""
    g, u = gate_and_up(gate_up)
    return r(r(silu(g)) * u)


def gated_rms_norm(o: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float, r=exact) -> np.ndarray:
    """Per head [.., dv]: n = r(o * rsqrt(mean(o^2) + eps)); m = r(w * n); r(m * silu(z))."""
    n = r(o / np.sqrt(np.mean(o * o, -1, keepdims=True) + eps))
    return r(r(weight * n) * silu(z))


def rope_table(max_length: int, rotary_dim: int, theta: float) -> np.ndarray:
    """uint16 [max_length, rotary_dim]: r(cos) | r(sin) of position * theta^(-2i / rotary_dim), computed in float32.

    The float32 steps are Transformers': inverse frequencies first, then their products with positions.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequency = np.float32(1) / np.power(np.float32(theta), exponents)
    angle = np.arange(max_length, dtype=np.float32)[:, None] * frequency
    return bf16.from_float32(np.concatenate([np.cos(angle), np.sin(angle)], axis=1))


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, r=exact) -> np.ndarray:
    """RoPE on the first 2 * cos.shape[-1] dims of x [T, H, D]: pairs (i, i + half); y = r( r(x c) + r(rot(x) s) ).

    cos, sin [T, half] already rounded as the model rounds them. rot(x) = (-x[i + half], x[i]).
    """
    half = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    a, b = x[..., :half], x[..., half:2 * half]
    return np.concatenate([r(r(a * c) - r(b * s)), r(r(b * c) + r(a * s)), x[..., 2 * half:]], axis=-1)


def qk_rope(q, k, q_weight, k_weight, cos, sin, eps: float, r=exact) -> tuple[np.ndarray, np.ndarray]:
    """Per head: rms_norm with (1 + w), rounded, then RoPE. q [T, Hq, D], k [T, Hk, D]; cos, sin [T, rotary / 2]."""
    return (rotate(rms_norm(q, q_weight, eps, r), cos, sin, r), rotate(rms_norm(k, k_weight, eps, r), cos, sin, r))


def gdn_conv(x: np.ndarray, parents: np.ndarray, weight: np.ndarray, r=exact) -> np.ndarray:
    """Causal depthwise convolution along each row's path, then SiLU: r(silu(r(sum_j w_j x[t - taps + 1 + j]))).

    x [T, C]; weight [C, taps], the last tap is the row itself; zero before a sequence's start.
    """
    taps = weight.shape[1]
    up = np.append(parents, -1)
    rows = [np.arange(len(x))]                  # of each row and of the rows above it, -1 before a sequence's start
    for _ in range(taps - 1):
        rows.append(up[rows[-1]])
    out = np.empty(x.shape)
    for part in np.array_split(np.arange(len(x)), -(-len(x) // 128)):          # some rows at a time stay in the cache
        total = np.zeros((len(part), x.shape[1]))
        for back in range(taps):
            at = rows[back][part]
            total += np.where(at[:, None] < 0, 0.0, x[at]) * weight[:, taps - 1 - back]
        out[part] = r(silu(r(total)))
    return out


def gdn_gates(b, a, a_log, dt_bias, r=exact) -> tuple[np.ndarray, np.ndarray]:
    """(g, beta): g = -exp(A_log) * softplus(a + dt_bias), never rounded; beta = r(sigmoid(b)). b, a [T, Lv]."""
    return -np.exp(a_log) * softplus(a + dt_bias), r(sigmoid(b))


def _normalised(q, k, heads: int):
    """q / (|q| sqrt(dk)) and k / |k| per head, each key head repeated for its value heads. q, k [T, Lk, dk]."""
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + L2_EPS) / np.sqrt(q.shape[-1])
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + L2_EPS)
    repeat = heads // q.shape[1]
    return np.repeat(q, repeat, axis=1), np.repeat(k, repeat, axis=1)


def gated_delta_rule(q, k, v, g, beta, parents, r=exact) -> np.ndarray:
    """The recurrence, token by token along each path; the state starts at 0. Returns r(o) [T, Lv, dv].

    S *= exp(g);  d = beta (v - S^T k);  S += k d^T;  o = S^T q      with S [dk, dv] per value head,
    q = q / |q| / sqrt(dk), k = k / |k| of key head hv // (Lv / Lk). q, k [T, Lk, dk]; v [T, Lv, dv]; g, beta [T, Lv].
    """
    q, k = _normalised(q, k, v.shape[1])
    decay = np.exp(g)
    children = np.bincount(parents[parents >= 0], minlength=len(q))
    states: dict[int, np.ndarray] = {}
    out = np.empty_like(v)
    for t, parent in enumerate(parents):
        if parent < 0:
            state = np.zeros((v.shape[1], k.shape[-1], v.shape[-1]))
        else:
            children[parent] -= 1
            state = states[parent].copy() if children[parent] else states.pop(parent)
        state *= decay[t][:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state += k[t][:, :, None] * d[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
        if children[t]:
            states[t] = state
    return r(out)


BLOCK = 16      # tokens that ``gated_delta_rule_chunked`` takes at a time


def gated_delta_rule_chunked(q, k, v, g, beta, pool, r=exact) -> np.ndarray:
    """The same function over ``pool``'s tree of chunks (see jev_kernels.pool), by blocks of 16 absolute positions.

    With c = cumsum(g) in a block, A the strict lower triangle of beta_i (k_i k_j) exp(c_i - c_j), T = (I + A)^-1:
    V' = T beta (v - exp(c) k S);  o = exp(c) q S + tril((q k^T) exp(c_i - c_j)) V';
    S' = exp(c_last) S + k^T (exp(c_last - c) V'). Every product has one shape whatever the number of rows, so a row's
    bits are batch-invariant.
    """
    heads, dv, dk = v.shape[1], v.shape[2], k.shape[2]
    q, k = _normalised(q, k, heads)
    out = np.empty_like(v)
    keep = np.tril(np.ones((BLOCK, BLOCK), bool))
    slots: dict[int, np.ndarray] = {}
    for first, count, start, _ in pool.runs:
        state = np.zeros((heads, dk, dv)) if start < 0 else slots[start]
        blocks = [(chunk, slice(at, at + BLOCK)) for chunk in range(first, first + count)
                  for at in range(0, CHUNK, BLOCK) if pool.chunk_rows[chunk, at] >= 0]
        for chunk, part in blocks:
            rows = pool.chunk_rows[chunk, part]
            absent = rows < 0
            # [heads, 16, .]: absent rows are zero rows, which change nothing
            qc, kc, vc = (np.where(absent[:, None, None], 0.0, x[rows]).transpose(1, 0, 2) for x in (q, k, v))
            gc, bc = (np.where(absent[:, None], 0.0, x[rows]).T for x in (g, beta))
            c = np.cumsum(gc, axis=1)
            ratio = np.exp(np.where(keep, c[:, :, None] - c[:, None, :], -np.inf))
            inner = np.tril(bc[:, :, None] * (kc @ kc.transpose(0, 2, 1)) * ratio, -1)
            t = np.linalg.inv(np.eye(BLOCK) + inner)
            new = t @ (bc[:, :, None] * (vc - np.exp(c)[:, :, None] * (kc @ state)))
            o = np.exp(c)[:, :, None] * (qc @ state) + ((qc @ kc.transpose(0, 2, 1)) * ratio) @ new
            last = c[:, -1:]
            state = np.exp(last)[:, :, None] * state + kc.transpose(0, 2, 1) @ (np.exp(last - c)[:, :, None] * new)
            to = pool.chunk_out_rows[chunk, part]
            out[to[to >= 0]] = o.transpose(1, 0, 2)[to >= 0]
            if pool.chunk_slots[chunk] >= 0:        # the last block of the chunk comes last
                slots[pool.chunk_slots[chunk]] = state
    return r(out)


QUERIES, KEYS, TOGETHER = 8, 512, 32     # of ``gated_attention``: positions of a block of queries, of keys; blocks at once


def gated_attention(q, k, v, gate, branches, scale: float, r=exact) -> np.ndarray:
    """r( r(softmax(q k^T scale) v) * r(sigmoid(gate)) ), each row over its own path up to itself. [T, Hq, D]

    q, gate [T, Hq, D]; k, v [T, Hk, D]; query head h reads key head h // (Hq / Hk). branches: pairs (path, start) as in
    ``RowPool.branches``: path is the row at each position, positions >= start are the branch's own. Blocks of queries and
    keys begin at absolute positions, and block after block is summed in rising order, so that shapes and order, and with
    them bits, follow positions only. Many blocks of queries meet a block of keys while it is in the cache.
    """
    out = np.empty_like(q)
    blocks = [(path, start, low) for path, start in branches
              for low in range(start // QUERIES * QUERIES, len(path), QUERIES)]
    for at in range(0, len(blocks), TOGETHER):
        _attend(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2), blocks[at:at + TOGETHER], scale, out)
    return r(r(out) * r(sigmoid(gate)))


def _attend(q, k, v, blocks, scale: float, out) -> None:
    """Attention of some blocks (path, start, first position) into the rows of ``out`` that are theirs. k, v [Hk, T, D]."""
    heads, _, d = k.shape
    rows = [_rows(path, low, low + QUERIES) for path, _, low in blocks]
    # The query heads of a key head one below the other: [heads of k, group * 8, .] against its keys.
    qs = [q[at].reshape(QUERIES, heads, -1, d).transpose(1, 2, 0, 3).reshape(heads, -1, d) for at in rows]
    parts = [(i, at, _block(path, at, min(at + KEYS, low + QUERIES)))
             for i, (path, _, low) in enumerate(blocks) for at in range(0, low + QUERIES, KEYS)]
    parts.sort(key=lambda part: part[1])
    scores = [np.empty((*x.shape[:2], low + QUERIES)) for x, (_, _, low) in zip(qs, blocks)]
    for i, at, keys in parts:
        scores[i][..., at:at + KEYS] = qs[i] @ k[:, keys].transpose(0, 2, 1)
    totals = []
    for s, (_, _, low) in zip(scores, blocks):
        s *= scale
        shaped = s.reshape(heads, -1, QUERIES, low + QUERIES)
        shaped[..., np.arange(low + QUERIES) > np.arange(low, low + QUERIES)[:, None]] = -np.inf
        s -= s.max(-1, keepdims=True)
        np.exp(s, out=s)
        totals.append(s.sum(-1, keepdims=True))
    outs = [np.zeros(x.shape) for x in qs]
    for i, at, keys in parts:
        outs[i] += scores[i][..., at:at + KEYS] @ v[:, keys]
    for o, total, at, (path, start, low) in zip(outs, totals, rows, blocks):
        mine = slice(max(start - low, 0), min(len(path) - low, QUERIES))
        o = (o / total).reshape(heads, -1, QUERIES, d).transpose(2, 0, 1, 3).reshape(QUERIES, -1, d)
        out[at[mine]] = o[mine]


def _rows(path: np.ndarray, low: int, end: int) -> np.ndarray:
    """Rows at positions low..end-1 of a path; positions beyond its end read row 0, which their masks keep out."""
    rows = np.zeros(end - low, np.int64)
    rows[:len(path) - low] = path[low:end]
    return rows


def _block(path: np.ndarray, low: int, end: int):
    """The same as an index: a slice, which copies nothing, where the rows are consecutive."""
    rows = _rows(path, low, end)
    first = int(rows[0])
    return slice(first, first + end - low) if (np.diff(rows) == 1).all() else rows
