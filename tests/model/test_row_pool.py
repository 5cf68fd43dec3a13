"""The row pool: its indices, and that no grouping of sequences changes a bit of any of them."""
from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jev.model import row_pool, weights
from jev.model.forward import forward
from jev.model.ops.numpy import NumpyOps
from jev.model.sequences import Sequences
from jev.prefix_cache.tree import Kept, Resumed
from jev_kernels import pool as layout
from tests import models

CHUNK = layout.CHUNK
# Lengths at which something begins or ends: chunks of 64, convolution windows of 4, single tokens.
EDGES = st.sampled_from([1, 2, 3, 4, 5, 61, 62, 63, 64, 65, 66, 67, 68, 127, 128, 129, 130, 150])


@st.composite
def trees(draw, max_sequences: int = 8):
    """Sequences with shared prefixes: each is new, or continues a prefix of an earlier one (so trees get several levels)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out = []
    for _ in range(draw(st.integers(1, max_sequences))):
        tail = rng.integers(0, 101, draw(EDGES)).astype(np.int32)
        kind = draw(st.sampled_from(["new", "branch", "branch", "branch", "duplicate", "prefix"]))
        base = out[draw(st.integers(0, len(out) - 1))] if out else tail
        if kind == "branch":
            tail = np.concatenate([base[:draw(EDGES)], tail])[:200]
        elif kind == "duplicate":
            tail = base.copy()
        elif kind == "prefix":
            tail = base[:draw(EDGES)].copy()
        out.append(tail)
    return out


def nodes(sequences) -> int:
    return len({tuple(s[:n + 1]) for s in map(list, sequences) for n in range(len(s))})


@settings(max_examples=150, deadline=None)
@given(trees(12))
def test_rows_are_the_nodes_of_the_trie_and_indices_lead_along_it(sequences):
    pool = row_pool.build(sequences)
    assert pool.n_rows == row_pool.count_rows(sequences) == nodes(sequences)

    def prefix(row):
        tokens = []
        while row >= 0:
            tokens.append(pool.ids[row])
            row = pool.parents[row]
        return tokens[::-1]

    for sequence, last in zip(sequences, pool.last_rows):
        assert prefix(last) == list(sequence)
    assert (pool.parents < np.arange(pool.n_rows)).all()
    owned = np.zeros(pool.n_rows, int)
    for path, start in pool.branches:
        assert prefix(path[-1]) == list(pool.ids[path]) and (pool.positions[path] == np.arange(len(path))).all()
        owned[path[start:]] += 1
        assert (np.diff(path[start:]) == 1).all()
    assert (owned == 1).all()


@settings(max_examples=150, deadline=None)
@given(trees(12))
def test_every_row_has_one_tile_and_one_chunk_that_writes_it(sequences):
    pool = row_pool.build(sequences)
    tiled = np.zeros(pool.n_rows, int)
    for first, count, position, start in pool.tiles:
        assert 1 <= count <= layout.TILE_ROWS
        rows = np.arange(first, first + count)
        tiled[rows] += 1
        assert (pool.paths[start + position:start + position + count] == rows).all()
    assert (tiled == 1).all()
    assert (np.diff(pool.tiles[:, 1] + pool.tiles[:, 2]) <= 0).all()

    written = pool.chunk_out_rows[pool.chunk_out_rows >= 0]
    assert sorted(written) == list(range(pool.n_rows))
    stored: dict[int, int] = {}
    for first, count, slot, _ in pool.runs:
        before = stored[slot] if slot >= 0 else -1                # parents come first: KeyError otherwise
        for chunk in range(first, first + count):
            rows = pool.chunk_rows[chunk]
            live = rows[rows >= 0]
            assert (rows[:len(live)] == live).all() and len(live)
            assert (pool.positions[live] % CHUNK == np.arange(len(live))).all()
            assert pool.parents[live[0]] == before and (pool.parents[live[1:]] == live[:-1]).all()
            out = pool.chunk_out_rows[chunk]
            assert ((out == rows) | (out == -1)).all()
            before = live[-1]
            if pool.chunk_slots[chunk] >= 0:
                assert len(live) == CHUNK
                stored[pool.chunk_slots[chunk]] = before
    assert sorted(stored) == list(range(pool.n_slots))


def of_one(length: int):
    """Plans for a sequence of so many tokens: nothing; resumed, kept and both, as far as there are whole blocks."""
    blocks = (length - 1) // CHUNK
    yield row_pool.Plan((), np.array([-1]), ())
    for known in {0, 1, blocks} if blocks else ():
        resumed = (Resumed(known * CHUNK, tuple(range(9, 9 + known)), 3),) if known else ()
        for ends in ((), (known + 1,), (known + 1, length // CHUNK)):
            if all(known < end <= length // CHUNK for end in ends):
                kept = Kept(tuple((block, 50 + block) for block in range(known, max(ends))),
                            tuple((end - 1, 5 + end) for end in sorted(set(ends)))) if ends else None
                yield row_pool.Plan(resumed, np.array([0 if known else -1]), ((0, kept),) if kept else ())


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200, 1000])
def test_a_single_sequence_is_a_trie_of_one(length):
    sequence = np.random.default_rng(length).integers(0, 9, length)
    for plan in of_one(length):
        pool, trie = row_pool.build([sequence], plan), row_pool._trie(Sequences.of([sequence]), plan)
        for field in fields(row_pool.RowPool):
            a, b = getattr(pool, field.name), getattr(trie, field.name)
            if field.name == "branches":
                assert [start for _, start in a] == [start for _, start in b]
                a, b = a[0].path, b[0].path
            assert np.array_equal(a, b) and (field.name == "n_slots" or a.dtype == b.dtype == np.int32), field.name
            assert field.name == "n_slots" or a.shape == b.shape, field.name
        assert np.array_equal(pool.tiles, trie.tiles) and pool.tiles.dtype == np.int32


def test_a_page_that_several_prefixes_begin_with_is_restored_once():
    """Two prefixes, one of which begins with the other, resumed by sequences that part in the second block."""
    rng = np.random.default_rng(0)
    long = rng.integers(0, 9, 200)
    short = np.concatenate([long[:100], rng.integers(9, 18, 40)])
    one, two = Resumed(CHUNK, (7,), 0), Resumed(2 * CHUNK, (7, 4), 1)
    pool = row_pool.build([long, short], row_pool.Plan((two, one), np.array([0, 1]), ()))
    n = pool.n_rows
    assert n == 200 - 128 + 140 - 64 and pool.restored_pages.tolist() == [7, 4]
    assert pool.branches[0].path[:128].tolist() == list(range(n, n + 128))
    assert pool.branches[1].path[:64].tolist() == list(range(n, n + 64))
    assert pool.parents[[0, 72]].tolist() == [n + 2, n + 5]


@pytest.mark.parametrize("bad, message", [
    ([], "at least one sequence"), ([np.array([], np.int32)], "sequence 0 must be a non-empty"),
    ([np.array([1]), np.array([[1]])], "sequence 1 must be a non-empty"), ([np.array([1, -2])], "negative token id")])
def test_bad_sequences_are_refused(bad, message):
    for function in (row_pool.build, row_pool.count_rows):
        with pytest.raises(ValueError, match=message):
            function(bad)


@pytest.fixture(scope="module", params=["bf16", "float64"])
def run(request):
    """hidden(sequences) on a small model with every kind of layer."""
    c = models.config("grouped", hidden_size=48, intermediate_size=64)
    ops = NumpyOps(c, request.param, max_length=512)
    model = weights.load(models.tensors(c), c, ops)
    return lambda sequences: forward(ops, model, row_pool.build(sequences))


@settings(max_examples=25, deadline=None)
@given(trees(7), st.randoms(use_true_random=False))
def test_no_grouping_order_or_company_changes_a_bit(run, sequences, random):
    alone = np.concatenate([run([s]) for s in sequences])
    together = run(sequences)
    assert (together == alone).all()
    order = list(range(len(sequences)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    for group in (order[:cut], order[cut:]):
        if group:
            assert (run([sequences[i] for i in group]) == alone[group]).all()


@settings(max_examples=10, deadline=None)
@given(trees(4))
def test_other_sequences_in_the_pool_change_nothing(run, sequences):
    rng = np.random.default_rng(len(sequences[0]))
    alone = run(sequences)
    crowd = models.sequences(rng, 101, rng.integers(1, 90, 5))
    assert (run(crowd + sequences)[len(crowd):] == alone).all()
