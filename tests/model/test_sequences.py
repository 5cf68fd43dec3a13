"""Sequences with their shared prefixes kept once: the same tokens, order and row pool as the whole sequences have."""
from __future__ import annotations

from dataclasses import fields
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from jev.model import row_pool, sequences as module
from jev.model.row_pool import CHUNK, TILE_ROWS, RowPool
from jev.model.sequences import ID, Sequences, common_prefix
from tests.model.test_row_pool import trees

# Few ids, so that there are prefixes of prefixes and duplicates; some of several bytes, whose order in memory matters.
short = st.lists(st.sampled_from([0, 1, 2, 255, 256, 70_000]), min_size=1, max_size=7)
sets = st.lists(short, min_size=1, max_size=14)
# Limits of what is sorted whole: nothing, a few tokens, everything.
limits = st.sampled_from([0, 12, 40, 1 << 18])


def shared_prefix(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def coded(given: list[list[int]], less=lambda common: common) -> Sequences:
    """Made from what each does not share with the one before it; ``less``: or a shorter common prefix."""
    shared, own = [0], [given[0]]
    for before, this in zip(given, given[1:]):
        shared.append(less(shared_prefix(before, this)))
        own.append(this[shared[-1]:])
    return Sequences.front_coded([c * ID.itemsize for c in shared], [np.array(o, ID).tobytes() for o in own])


def check(found: Sequences, given: list[list[int]]) -> None:
    assert [s.tolist() for s in found] == given and len(found) == len(given)
    assert all(s.dtype == np.int32 for s in found)
    ordered = [given[i] for i in found.order]
    assert ordered == sorted(given)
    assert found.shared.tolist() == [0, *map(shared_prefix, ordered, ordered[1:])]
    assert found.lengths.tolist() == list(map(len, ordered))
    assert found.total == sum(map(len, given)) and found.longest == max(map(len, given))
    assert found.rows == len({tuple(s[:n + 1]) for s in given for n in range(len(s))})
    bounds = accumulate((max(1, len(s) - c) for s, c in zip(ordered, found.shared.tolist())), initial=0)
    assert found.bounds.tolist() == list(bounds)


@settings(max_examples=300, deadline=None)
@given(sets, limits, st.randoms(use_true_random=False))
@example([[1, 2, 1], [1, 2, 2], [1, 2], [1], [1, 2, 1], [1, 2, 1, 0], [1, 2, 1, 1]], 0, None)
def test_a_front_coding_in_any_order_gives_the_sequences_their_order_and_exact_prefixes(given, limit, random):
    less = (lambda common: random.randint(0, common)) if random else (lambda common: common)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SORTED_WHOLE", limit)
        check(coded(given), given)
        check(coded(given, less), given)
        check(Sequences.of([np.array(s) for s in given]), given)


@settings(max_examples=150, deadline=None)
@given(sets, sets, limits, st.data())
def test_parts_and_joins(given, others, limit, data):
    start = data.draw(st.integers(0, len(given) - 1))
    end = data.draw(st.integers(start + 1, len(given)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SORTED_WHOLE", limit)
        whole, more = coded(given), coded(others)
        whole.state_ends = np.arange(len(given)) + 10
        part = whole.part(start, end)
        check(part, sorted(given)[start:end])
        assert part.state_ends.tolist() == whole.state_ends[start:end].tolist()
        check(whole, given)                                          # is what it was
        joined = Sequences.join([part, more, whole])
        check(joined, sorted(given)[start:end] + others + given)
        ends = dict(zip(joined.order.tolist(), joined.state_ends.tolist()))
        assert [ends[i] for i in range(len(part))] == part.state_ends.tolist()
        assert not any(ends[len(part) + i] for i in range(len(others)))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 700), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_common_prefixes(common, more, others, seed):
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 300, common)
    a, b = (np.concatenate([prefix, rng.integers(0, 3, n)]).astype(ID) for n in (more, others))
    assert common_prefix(a.tobytes(), b.tobytes()) == ID.itemsize * shared_prefix(a.tolist(), b.tolist())


def whole_pool(sequences: list[np.ndarray]) -> RowPool:
    """The row pool of whole sequences, one after another in lexicographic order, from the definition of its arrays."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    arrays = [sequences[i] for i in order]
    ids, positions, parents, paths, starts = [], [], [], [], []
    chunk_rows, chunk_out, runs, slot_of, chain = [], [], [], {}, []
    last_rows, path = [0] * len(arrays), []
    for index, tokens, before in zip(order, arrays, [None, *arrays]):
        start = 0 if before is None else shared_prefix(before, tokens)
        if start < len(tokens):
            path = path[:start] + list(range(len(ids), len(ids) + len(tokens) - start))
            ids += tokens[start:].tolist()
            positions += range(start, len(tokens))
            parents += [-1, *path][start:len(tokens)]
            paths.append(path)
            starts.append(start)
            first, end = start // CHUNK, -(-len(tokens) // CHUNK)
            slot = slot_of.setdefault(chain[first - 1], len(slot_of)) if first else -1
            runs.append((len(chunk_rows), end - first, slot, 0))
            chain = chain[:first] + list(range(len(chunk_rows), len(chunk_rows) + end - first))
            for chunk in range(first, end):
                positions_in = range(chunk * CHUNK, (chunk + 1) * CHUNK)
                chunk_rows.append([path[p] if p < len(path) else -1 for p in positions_in])
                chunk_out.append([path[p] if start <= p < len(path) else -1 for p in positions_in])
        last_rows[index] = path[-1]
    path_starts = list(accumulate(map(len, paths[:-1]), initial=0))
    slots = [slot_of.get(chunk, -1) for chunk in range(len(chunk_rows))]
    arrays = {name: np.array(value, np.int32) for name, value in {
        "ids": ids, "positions": positions, "parents": parents, "last_rows": last_rows, "paths": sum(paths, []),
        "path_starts": path_starts, "chunk_rows": chunk_rows, "chunk_out_rows": chunk_out, "chunk_slots": slots,
        "runs": runs}.items()}
    branches = tuple(row_pool.Branch(np.array(p, np.int32), s) for p, s in zip(paths, starts))
    return RowPool(branches=branches, n_slots=len(slot_of), **arrays)


def same(found: RowPool, expected: RowPool) -> None:
    for f in fields(RowPool):
        a, b = getattr(found, f.name), getattr(expected, f.name)
        if f.name == "branches":
            assert len(a) == len(b)
            for (path, start), (expected_path, expected_start) in zip(a, b):
                assert start == expected_start
                np.testing.assert_array_equal(path, expected_path)
        else:
            np.testing.assert_array_equal(a, b, f.name)
            assert not isinstance(a, np.ndarray) or a.dtype == np.int32, f.name
    tiles = [(path[at], min(TILE_ROWS, len(path) - at), at, path_start)
             for (path, start), path_start in zip(expected.branches, expected.path_starts)
             for at in range(start, len(path), TILE_ROWS)]
    np.testing.assert_array_equal(found.tiles, sorted(tiles, key=lambda tile: -tile[1] - tile[2]))
    assert found.tiles.dtype == np.int32


@settings(max_examples=150, deadline=None)
@given(trees(10), trees(4), st.data())
def test_the_pool_built_from_parts_is_the_pool_of_the_whole_sequences(given, others, data):
    expected = whole_pool(given)
    same(row_pool.build(given), expected)
    parts = coded([s.tolist() for s in given])
    same(row_pool.build(parts), expected)
    start = data.draw(st.integers(0, len(given) - 1))
    part = parts.part(start, data.draw(st.integers(start + 1, len(given))))
    ranked = [given[i] for i in parts.order]
    same(row_pool.build(part), whole_pool(ranked[start:start + len(part)]))
    joined = Sequences.join([part, coded([s.tolist() for s in others])])
    same(row_pool.build(joined), whole_pool(ranked[start:start + len(part)] + others))
