"""The CUDA backend as a whole in the simulator: the real launchers and portable kernels, only the GEMMs are NumPy's.

What kernels compute has its own tests. Here it is the wiring: which buffer is whose, which columns, how many rows.
"""
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import jev.model.cuda_backbone
import jev.model.ops.cuda
import jev.model.ops.cuda_buffers
import jev.model.ops.cuda_cache
from jev.audit import paired
from jev.model import row_pool, weights
from jev.model.backbone import BackendError
from jev.model.buckets import Bucket
from jev.model.finite import explain
from jev.model.forward import forward
from jev.model.ops.audit import AuditOps, Pair
from jev.model.ops.numpy import NumpyOps
from jev.model.sequences import ID, Sequences
from jev_kernels import bf16
from jev_kernels.rowwise.exchange import Entries
from jev_kernels.runtime.graph import CaptureError
from tests import models, yardstick
from tests.kernels import cuda_ops_sim

LENGTH = 96
# Records of an operation: one for each output and call. Limits are those of tests/gpu/test_backbone.py.
RECORDS = {"embed": 1, "rms_norm": 1, "add_rms_norm": 8, "linear": 6, "swiglu": 2, "gdn_conv_gates": 3, "gated_delta_rule": 1,
           "gated_rms_norm": 1, "qk_rope": 1, "gated_attention": 1, "gather_rows": 2}
LIMITS = {"embed": 0, "gather_rows": 0, "gated_attention": 3.5e-3, "gated_delta_rule": 4e-3, "gated_rms_norm": 3.5e-3,
          "swiglu": 4.5e-3}
LIMIT = 3e-3


@pytest.fixture(autouse=True)
def simulated_device(monkeypatch):
    for module in (jev.model.cuda_backbone, jev.model.ops.cuda, jev.model.ops.cuda_buffers, jev.model.ops.cuda_cache):
        monkeypatch.setattr(module, "device", cuda_ops_sim)


def config(*kinds, heads, value_heads):
    """The smallest model with the kernels' head dims."""
    return models.config("plain", hidden_size=64, intermediate_size=64, layer_types=kinds, num_attention_heads=heads,
                         num_key_value_heads=1, head_dim=256, rotary_dim=64, linear_num_key_heads=1,
                         linear_num_value_heads=value_heads, linear_key_head_dim=128, linear_value_head_dim=128,
                         vocab_size=50)


def numpy_model(c, tensors, precision):
    ops = NumpyOps(c, precision, LENGTH)
    return ops, weights.load(tensors, c, ops)


def test_forward():
    """Each operation near float64 and the result by the yardstick. Then the same bits with the capacities of another
    bucket, over memory full of garbage, for the sequences in another order, and nothing written beyond the live rows but
    the zeros that GEMMs read there.
    """
    c = config(models.L, models.F, heads=2, value_heads=2)
    tensors = models.tensors(c, 3)
    root = np.array([7, 3, 3, 41, 0, 12, 49, 5], np.int32)
    sequences = [root, np.r_[root[:5], 8, 1].astype(np.int32), root.copy()]        # a branch, a duplicate
    pool = row_pool.build(sequences)
    tight, other = Bucket(10, wide=True), Bucket(13)
    made = cuda_ops_sim.Backbone(c, tensors, [tight, other], LENGTH)

    ops, model, on_device, bound = made.bound(pool)
    assert ops.bucket == tight and pool.n_rows == 10 and len(bound.last_rows) == 2
    reference, exact_model = numpy_model(c, tensors, "float64")
    audited = AuditOps(ops, reference)
    hidden = ops.values(forward(audited, paired(model, exact_model), Pair(on_device, bound)))
    assert {name: len(records) for name, records in audited.records.items()} == RECORDS
    worst = {name: max(r.relative for r in records) for name, records in audited.records.items()}
    assert all(worst[name] <= LIMITS.get(name, LIMIT) for name in worst), worst

    exact = forward(reference, exact_model, bound)
    rounded = forward(*numpy_model(c, tensors, "bf16"), bound)
    assert yardstick.distance(hidden, exact) <= yardstick.MEAN_RATIO * yardstick.distance(rounded, exact)

    made.buckets = [other]
    made.poison()
    again, rows, _ = made.hidden([sequences[i] for i in (1, 0, 2)])
    assert rows == 10
    lasts = np.searchsorted(bound.last_rows, pool.last_rows[[1, 0, 2]])
    np.testing.assert_array_equal(bf16.to_float32(again), hidden[lasts])
    for x in made.runner(other).ops.activations.values():               # but by GEMMs, which know no counts
        if x.name not in ("projected", "gate_up", "delta") and x.kind != "linear_attention":
            beyond = x.array[2 if x.last else rows:].copy_to_host()
            cleared = not x.last and x.name in ("x", "act", "mixed")
            expected = 0 if cleared else cuda_ops_sim.POISON
            assert len(beyond) and (beyond.view(np.uint16) == expected).all(), x.name


def test_a_forward_that_is_not_finite_is_looked_into():
    c = config(models.L, models.F, heads=1, value_heads=1)
    tensors = models.tensors(c)
    tensors["layers.1.self_attn.q_norm.weight"][3] = 0x7FC0
    made = cuda_ops_sim.Backbone(c, tensors, [Bucket(8)], LENGTH)
    assert explain(SimpleNamespace(tensors=tensors), made, [np.array([7, 3], np.int32)]) == (
        "the first result that is not finite is that of qk_rope in layers.1 with layers.1.q_norm, layers.1.k_norm, "
        "and layers.1.self_attn.q_norm.weight[3] is NaN")


def test_what_gemms_read_is_zero_behind_the_live_rows_whatever_came_before():
    c = config(models.L, models.F, heads=1, value_heads=2)
    buckets = [Bucket(rows) for rows in (16, 32, 64)]
    made = cuda_ops_sim.Backbone(c, models.tensors(c), buckets, LENGTH)
    rng = np.random.default_rng(0)
    for rows in rng.integers(1, 65, 40):
        bucket = next(b for b in buckets if b.rows >= rows)
        ops = made.runner(bucket).ops
        ops.clear(int(rows))
        for name, kind in (("x", ""), ("act", ""), ("mixed", "full_attention"), ("mixed", "linear_attention")):
            read = ops.activation(name, kind).array
            assert not read[rows:].copy_to_host().any(), (name, rows)
            read[:rows] = cuda_ops_sim.POISON


def test_a_branch_starts_from_a_stored_state():
    """More than a chunk: the delta rule's runs, slots and states, with other buffers' garbage in them."""
    c = config(models.L, heads=1, value_heads=1)
    root = np.arange(65, dtype=np.int32) % 50
    pool = row_pool.build([root, np.r_[root[:64], 33].astype(np.int32)])
    assert pool.n_slots == 1 and len(pool.runs) == 2
    made = cuda_ops_sim.Backbone(c, models.tensors(c), [Bucket(70)], LENGTH)
    ops, _, on_device, pool = made.bound(pool)
    rng, n = np.random.default_rng(0), pool.n_rows
    qkv, g, beta = (ops.activation(name) for name in ("conv", "g", "beta"))
    qkv.array[:n] = bf16.from_float64(rng.standard_normal((n, c.conv_dim)))
    g.array[:n] = -0.1 * rng.random((n, 1))
    beta.array[:n] = bf16.from_float64(rng.random((n, 1)))
    inputs = [ops.values(x) for x in (qkv, g, beta)]
    out = ops.values(ops.gated_delta_rule(qkv, g, beta, on_device))
    expected = NumpyOps(c, "float64", LENGTH).gated_delta_rule(*inputs, pool)
    for rows in (slice(n), slice(64, n)):
        assert np.linalg.norm(out[rows] - expected[rows]) <= 4e-3 * np.linalg.norm(expected[rows])


def test_what_a_kernel_would_trust_is_refused():
    c = config(models.F, heads=1, value_heads=1)
    made = cuda_ops_sim.Backbone(c, models.tensors(c), [Bucket(128)], LENGTH)
    assert made.bound(row_pool.build([np.zeros(LENGTH, np.int32)]))
    with pytest.raises(BackendError, match="97 tokens is longer than 96"):
        made.hidden([np.zeros(LENGTH + 1, np.int32)])
    with pytest.raises(BackendError, match="token 50 is not in the vocabulary"):
        made.hidden([np.array([3, 50], np.int32)])
    with pytest.raises(BackendError, match="129 tokens does not fit in 128 rows"):
        made.hidden([np.zeros(129, np.int32)])


def test_what_no_bucket_holds_is_computed_in_parts_that_share_prefixes(monkeypatch):
    """Halves of the lexicographic order; hidden states, here the last tokens, in the order given."""
    c = config(models.F, heads=1, value_heads=1)
    made = cuda_ops_sim.Backbone(c, models.tensors(c), [Bucket(16)], LENGTH)
    uploaded = []

    def to_host(out, source, stream):
        pool, last_rows = uploaded[-1]
        out[:] = pool.ids[last_rows][:, None]
    runner = made.runner(made.buckets[0])
    monkeypatch.setattr(runner, "upload", lambda pool, last_rows: uploaded.append((pool, last_rows)))
    monkeypatch.setattr(runner, "launch", lambda: None)
    monkeypatch.setattr(cuda_ops_sim, "to_host", to_host)
    lasts = [30, 10, 41, 20, 10, 7, 35, 3, 28, 19, 11, 49, 2]
    sequences = [np.r_[np.arange(6), last].astype(np.int32) for last in lasts]
    for given in (sequences, Sequences.of(sequences)):
        hidden, rows, _ = made.hidden(given)
        assert hidden[:, 0].tolist() == lasts
        assert rows == 2 * 6 + 12 and [pool.n_rows for pool, _ in uploaded] == [11, 13]
        uploaded.clear()


@pytest.mark.parametrize("error", [CaptureError("not allowed"), RuntimeError("CUDA: STREAM_CAPTURE_INVALIDATED")])
def test_what_cannot_be_captured_is_launched(monkeypatch, error):
    """For every request; the capture is not tried again."""
    def fails(*args, **kwargs):
        raise error

    c = config(models.F, heads=1, value_heads=1)
    made = cuda_ops_sim.Backbone(c, models.tensors(c), [Bucket(128)], LENGTH)
    launched, said = [], []
    made.use_graphs, made.log = True, said.append
    monkeypatch.setattr(made.runner(made.buckets[0]), "launch", lambda: launched.append(None))
    monkeypatch.setattr(jev.model.cuda_backbone.graphs, "capture", fails)
    for _ in range(2):
        made.hidden([np.zeros(3, np.int32)])
    assert len(launched) == 2 and len(said) == 1 and str(error) in said[0]


def test_every_failure_is_a_backend_error(monkeypatch):
    """Whatever class the driver's binding, Numba or cuBLASLt raise."""
    class LibraryError(Exception):
        pass

    c = config(models.F, heads=1, value_heads=1)
    made = cuda_ops_sim.Backbone(c, models.tensors(c), [Bucket(128)], LENGTH)
    for error in (LibraryError("status 13"), RuntimeError("CUDA: CUDA_ERROR_ILLEGAL_ADDRESS")):
        def fails(error=error):
            raise error
        monkeypatch.setattr(made.runner(made.buckets[0]), "launch", fails)
        with pytest.raises(BackendError, match=f"the forward pass failed on the GPU: .*{error}") as caught:
            made.hidden([np.zeros(3, np.int32)])
        assert caught.value.__cause__ is error


def test_a_resumed_prefix_gives_the_same_bits(monkeypatch):
    """With a prefix cache: what is new is computed, from rows, states and inputs that were garbage before."""
    monkeypatch.setattr("jev.prefix_cache.plan.LEAST_TOKENS", 64)
    monkeypatch.setattr("jev_kernels.rowwise.exchange.BLOCKS", 2)
    c = config(models.L, models.F, heads=1, value_heads=1)
    tensors = models.tensors(c, 3)
    rng = np.random.default_rng(4)
    state = rng.integers(0, 50, 64).astype(np.int32)
    first, second = ([np.r_[state, tail].astype(np.int32) for tail in tails] for tails in (([7],), ([8, 1], [9])))

    def asked(sequences):
        return Sequences.front_coded([0] * len(sequences), [s.astype(ID).tobytes() for s in sequences], 4 * len(state))
    plain = cuda_ops_sim.Backbone(c, tensors, [Bucket(80)], LENGTH)
    cached = cuda_ops_sim.Backbone(c, tensors, [Bucket(4, True, 64), Bucket(80, False, 64)], LENGTH, cache_bytes=1 << 20)
    assert cached.hidden(asked(first)).resumed.tolist() == [0]
    cached.poison()
    found = cached.hidden(asked(second))
    assert found.resumed.tolist() == [64, 64] and found.rows == 3
    np.testing.assert_array_equal(found.hidden, plain.hidden(asked(second)).hidden)
    assert cached.resumable(second[0]) == 64 and plain.resumable(second[0]) == 0


def test_states_of_a_layer_are_kept_by_the_next_ones_exchange(monkeypatch):
    """One launch a layer: each linear layer's exchange also keeps what the one before it left in its slots."""
    c = config(models.L, models.F, models.L, models.L, heads=1, value_heads=1)
    made = cuda_ops_sim.Backbone(c, models.tensors(c, 3), [Bucket(16, False, 64)], LENGTH, cache_bytes=1 << 21)
    ops, launched = made.runner(made.buckets[0]).ops, []
    for name in ("exchange_inputs", "keep_states"):
        monkeypatch.setattr(f"jev_kernels.rowwise.exchange.{name}", lambda stream, *args, pdl, name=name: launched.append(
            (name, [a for a in args if isinstance(a, Entries) or a is None])))
    projected = ops.activation("projected", models.L)
    for layer in range(3):
        ops.exchange_inputs(projected, layer, ops.pool)
        ops.keep_states(layer, ops.pool)
    inputs, states = made.cache.inputs, made.cache.states
    assert launched == [("exchange_inputs", [inputs(0), states(0), None]),
                        ("exchange_inputs", [inputs(1), states(1), states(0)]),
                        ("exchange_inputs", [inputs(2), states(2), states(1)]), ("keep_states", [states(2)])]
