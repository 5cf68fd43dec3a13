"""The CUDA backbone as a whole: near float64, the same bits in any company, with graphs and without."""
from __future__ import annotations

import json
import os

import numpy as np
import pytest

from jev import contract
from jev.audit import paired
from jev.checkpoint.config import ModelConfig
from jev.engine import Engine
from jev.model import row_pool
from jev.model.backends import open_backbone
from jev.model.forward import forward
from jev.model.numpy_backbone import NumpyBackbone
from jev.model.ops.audit import AuditOps, Pair
from jev.model.ops.numpy import NumpyOps
from jev.model.weights import assemble
from jev.settings import Settings
from jev_kernels import bf16
from tests import fakes, yardstick
from tools import synthetic
from tools.bench_forward import synthetic_backbone

pytestmark = pytest.mark.gpu

SMALL = ModelConfig(hidden_size=256, intermediate_size=512, layer_types=("linear_attention",) * 3 + ("full_attention",),
                    num_attention_heads=6, num_key_value_heads=1, head_dim=256, rotary_dim=64, linear_num_key_heads=2,
                    linear_num_value_heads=6, linear_key_head_dim=128, linear_value_head_dim=128, conv_kernel=4,
                    vocab_size=1000, rms_norm_eps=1e-6, rope_theta=1e7)


QUICK = dict(log=lambda line: None, ready_rows=0, tune=False)      # timing GEMMs of a small model teaches nothing


@pytest.fixture(scope="module")
def small():
    made = synthetic_backbone(SMALL, **QUICK)
    yield made
    made.close()


def tree(rng, n: int, vocabulary: int, longest: int = 300) -> list[np.ndarray]:
    """n sequences, most of them branching off an earlier one somewhere: on chunk boundaries, inside, at the start."""
    out: list[np.ndarray] = []
    for _ in range(n):
        tail = rng.integers(0, vocabulary, rng.integers(1, 90)).astype(np.int32)
        if out and rng.random() < 0.8:
            base = out[rng.integers(len(out))]
            cut = int(rng.choice([1, 3, 4, 63, 64, 65, 127, 128, 129, len(base) // 2, len(base)]))
            tail = np.concatenate([base[:cut], tail])[:longest]
        out.append(tail)
    return out


def held_as_numpy(model, precision: str):
    """(NumpyOps, its model) with the weights of a CudaBackbone."""
    ops = NumpyOps(model.config, precision, 4096)
    held = {key: bf16.to_float32(w.array.copy_to_host()).astype(np.float64) for key, w in model.weights.held.items()}
    return ops, assemble(held, model.config)


def test_as_close_to_float64_as_the_numpy_statement(small):
    rng = np.random.default_rng(0)
    sequences = tree(rng, 40, SMALL.vocab_size)
    pool = row_pool.build(sequences)
    exact, rounded = (forward(*held_as_numpy(small, p), pool) for p in ("float64", "bf16"))
    ours = bf16.to_float32(small.hidden(sequences)[0]).astype(np.float64)
    assert yardstick.distance(ours, exact) <= 1.1 * yardstick.distance(rounded, exact)


def test_every_operation_is_near_float64(small):
    sequences = tree(np.random.default_rng(1), 12, SMALL.vocab_size)
    reference, weights = held_as_numpy(small, "float64")
    bound = small.bound(row_pool.build(sequences))
    audited = AuditOps(bound.ops, reference)
    forward(audited, paired(bound.model, weights), Pair(bound.pool, bound.rows))
    assert set(audited.records) == set(AuditOps.OPERATIONS)
    # Several roundings in a row where there is a gate; tests of the kernels hold each to its own limit.
    limits = {"embed": 0, "gather_rows": 0, "gated_attention": 3.5e-3, "gated_delta_rule": 4e-3, "gated_rms_norm": 3.5e-3,
              "swiglu": 4.5e-3}
    for name, records in audited.records.items():
        worst = max(r.relative for r in records)
        assert worst <= limits.get(name, 3e-3), (name, worst)


def test_no_grouping_changes_a_bit(small):
    rng = np.random.default_rng(2)
    for n in (1, 2, 7, 40, 255):
        sequences = tree(rng, n, SMALL.vocab_size)
        alone = {}
        for s in sequences[:60]:
            alone[s.tobytes()] = small.hidden([s])[0][0]
        order = rng.permutation(n)
        for group in np.array_split(order, min(n, 3)):
            together = small.hidden([sequences[i] for i in group])[0]
            for i, got in zip(group, together):
                if sequences[i].tobytes() in alone:
                    assert (got == alone[sequences[i].tobytes()]).all(), (n, i)


def test_many_options_over_a_long_state(small):
    rng = np.random.default_rng(3)
    state = rng.integers(0, 1000, 1500).astype(np.int32)
    options = [np.concatenate([state, [i], rng.integers(0, 1000, rng.integers(1, 12))]).astype(np.int32) for i in range(255)]
    together, rows, _ = small.hidden(options)
    assert rows == row_pool.count_rows(options)
    for i in (0, 1, 100, 254):
        assert (small.hidden([options[i]])[0][0] == together[i]).all()


def test_graphs_and_eager_launches_give_the_same_bits(small):
    eager = synthetic_backbone(SMALL, graph=False, **QUICK)
    rng = np.random.default_rng(4)
    for _ in range(10):
        sequences = tree(rng, int(rng.integers(1, 30)), SMALL.vocab_size)
        assert (eager.hidden(sequences)[0] == small.hidden(sequences)[0]).all()
    eager.close()


def test_a_thousand_requests(small):
    """Random requests of one to six prompts: the same bits alone, in random company, and without graphs."""
    eager = synthetic_backbone(SMALL, graph=False, **QUICK)
    rng = np.random.default_rng(8)
    requests = [tree(rng, int(rng.integers(1, 7)), SMALL.vocab_size, longest=int(rng.choice([40, 120, 400])))
                for _ in range(1000)]
    alone = [small.hidden(request)[0] for request in requests]
    order = rng.permutation(len(requests))
    while len(order):
        group, order = np.split(order, [min(len(order), int(rng.integers(1, 30)))])
        for made in (small, eager):
            together = made.hidden([s for i in group for s in requests[i]])[0]
            parts = np.split(together, np.cumsum([len(requests[i]) for i in group])[:-1])
            assert all((part == alone[i]).all() for i, part in zip(group, parts)), group
    eager.close()


def test_every_bucket_gives_the_same_bits(small):
    """The graph of each bucket, also far larger than the pool needs."""
    rng = np.random.default_rng(5)
    sequences = tree(rng, 6, SMALL.vocab_size, longest=60)
    pool = row_pool.build(sequences)
    lasts, where = np.unique(pool.last_rows, return_inverse=True)
    expected = small.hidden(sequences)[0]
    for bucket in small.buckets:
        if bucket.holds(pool):
            runner = small.runner(bucket)
            runner.upload(pool, lasts)
            runner.graph().launch(small.stream)
            small.stream.synchronize()
            got = runner.hidden.array[:len(lasts)].copy_to_host()
            assert (got[where] == expected).all(), bucket
            assert (runner.run(pool, use_graph=True) == expected).all(), bucket


def test_more_than_a_forward_holds_is_split(small):
    rng = np.random.default_rng(6)
    sequences = [rng.integers(0, 1000, 3000).astype(np.int32) for _ in range(4)]
    together, rows, _ = small.hidden(sequences)
    assert rows == 12000
    assert all((small.hidden([s])[0][0] == t).all() for s, t in zip(sequences, together))


def test_repeated_runs_are_bit_equal_and_stale_rows_do_not_matter(small):
    rng = np.random.default_rng(7)
    sequences = tree(rng, 30, SMALL.vocab_size)
    first = small.hidden(sequences)[0]
    for i in range(20):
        small.hidden(tree(rng, 5, SMALL.vocab_size))
        assert (small.hidden(sequences)[0] == first).all(), i


def decision(answer: dict) -> tuple[object, float]:
    """What a client acts on (the option, the more probable truth, the most probable level), and how clear it is: the
    probability of that less the next one's."""
    probabilities = answer.get("probabilities") or {True: answer["noul"], False: 1 - answer["noul"]}
    second, first = sorted(probabilities, key=probabilities.get)[-2:]
    return first, probabilities[first] - probabilities[second]


def test_the_demo_checkpoint_decides_as_on_a_cpu(tmp_path):
    """The same decisions where they are clear; hidden states as far from float64 as the NumPy backend's, by the yardstick.

    BF16 moves a difference of two probabilities of this model by up to 0.03: one decision of NumPy's, clear by 0.011, is
    another in float64.
    """
    export = fakes.demo_export(tmp_path)
    exact = NumpyBackbone(export, precision="float64")
    numpy, cuda = (Engine(export, open_backbone(export, name, cache_gb=0.1, log=lambda line: None), Settings())
                   for name in ("numpy", "cuda"))
    rng = np.random.default_rng(9)
    words = "late broken early intact lost found paid owed red blue".split()
    distances, clear = [], 0
    for i in range(12):
        names = {f"{rng.choice(words)} {n}": None for n in range(int(rng.integers(2, 12)))}
        body = json.dumps({"state": " ".join(rng.choice(words, int(rng.integers(3, 200)))), "questions": {
            "pick": {"type": "choice", "instructions": "Which?", "criteria": names},
            "yes": {"type": "noul", "instructions": "Is it so?"},
            "grade": {"type": "score", "instructions": "How good?", "criteria": ["bad", "fair", "good"]}}}).encode()
        ours, theirs = (engine.answer(body)["answers"] for engine in (cuda, numpy))
        for question, answer in theirs.items():
            wanted, margin = decision(answer)
            if margin > 0.05:
                clear += 1
                assert decision(ours[question])[0] == wanted, (i, question, ours[question], answer)
        ids = cuda.processor.encode(contract.parse_request(body, export.model_names))
        right = exact.hidden(ids)[0]
        distances.append([yardstick.distance(bf16.to_float32(e.backbone.hidden(ids)[0]).astype(np.float64), right)
                          for e in (cuda, numpy)])
    assert clear >= 20
    ratio = np.mean(distances, axis=0)
    assert ratio[0] <= yardstick.MEAN_RATIO * ratio[1], ratio
    for engine in (numpy, cuda):
        engine.close()


@pytest.mark.parametrize("model", ["27b", "9b"])
def test_four_layers_of_true_width_against_transformers(model):
    from tools.gpu_parity import distances
    ratios = []
    for seed in range(4):
        d = distances(synthetic.config(model, 4), seed, graph=False, **QUICK)
        ratios.append(d["ratio"])
    yardstick.check(model, ratios)


def test_the_whole_model():
    """64 layers of the 27B: finite, the same bits 20 times, as near to float64 as Transformers, within the memory."""
    from tools.gpu_parity import distances
    d = distances(synthetic.config("27b"), repeats=20, graph=True, **QUICK)
    print({name: float(f"{value:.4g}") for name, value in d.items()})
    yardstick.check("27b", [d["ratio"]])
    if "PYTEST_XDIST_WORKER" not in os.environ:         # other tests' memory would count
        assert d["gb"] <= 58
