"""The tree of kept prefixes, against a model of its own: what is resumed is what was written for these very ids."""
from __future__ import annotations

import gc
import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jev.prefix_cache import tree as prefix_tree
from jev.prefix_cache.tree import PrefixTree, Resumed
from jev_kernels.pool import CHUNK

SOME = settings(max_examples=150, deadline=None)


def ids(*blocks: int, rest: int = 1) -> np.ndarray:
    """A sequence of whole blocks, each full of one number, and ``rest`` tokens more."""
    return np.concatenate([np.full(CHUNK, b, np.int32) for b in blocks] + [np.full(rest, 9, np.int32)])


def kept(tree: PrefixTree, sequence: np.ndarray, *boundaries: int):
    """One forward pass over one sequence that ends well: (what it resumed, what it kept)."""
    transaction = tree.begin()
    resumed = transaction.resume(sequence)
    out = transaction.keep(sequence, [b * CHUNK for b in boundaries], resumed.tokens if resumed else 0)
    transaction.commit()
    return resumed, out


def test_what_was_kept_is_resumed_at_the_deepest_snapshot_that_leaves_a_token():
    tree = PrefixTree(pages=8, snapshots=8)
    assert kept(tree, ids(1, 2, 3), 1, 3)[0] is None
    assert tree.length(ids(1, 2, 3)) == 3 * CHUNK
    assert tree.length(ids(1, 2, 3, rest=0)) == CHUNK           # something has to be computed
    assert tree.length(ids(1, 2, 4)) == CHUNK and tree.length(ids(2, 2)) == 0
    resumed, out = kept(tree, ids(1, 2, 3, 4), 4)
    assert resumed.tokens == 3 * CHUNK and len(set(resumed.pages)) == 3
    assert [at for at, _ in out.pages] == [3] and [at for at, _ in out.snapshots] == [3]


def test_a_boundary_before_the_resumed_prefix_is_not_kept():
    tree = PrefixTree(8, 8)
    kept(tree, ids(1, 2), 2)
    transaction = tree.begin()
    assert transaction.resume(ids(1, 2, 3)).tokens == 2 * CHUNK
    out = transaction.keep(ids(1, 2, 3), [CHUNK, 2 * CHUNK], 2 * CHUNK)
    assert out.pages == () and out.snapshots == ()
    transaction.commit()


def test_where_a_second_child_begins_a_snapshot_is_kept():
    tree = PrefixTree(8, 8)
    kept(tree, ids(1, 2, 3), 3)
    _, out = kept(tree, ids(1, 2, 4), 3)
    assert [at for at, _ in out.snapshots] == [1, 2] and [at for at, _ in out.pages] == [2]
    assert tree.length(ids(1, 2, 5)) == 2 * CHUNK


def test_nothing_is_visible_before_commit_and_after_abort():
    tree = PrefixTree(8, 8)
    kept(tree, ids(1), 1)
    transaction = tree.begin()
    transaction.resume(ids(1, 2))
    transaction.keep(ids(1, 2), [2 * CHUNK], CHUNK)
    assert tree.length(ids(1, 2)) == CHUNK
    transaction.abort()
    transaction.commit()                                        # too late
    assert tree.length(ids(1, 2)) == CHUNK
    assert tree.pages_in_use == tree.snapshots_in_use == 1


def test_the_least_recently_used_goes_and_its_pages_with_it():
    tree = PrefixTree(pages=4, snapshots=8)
    kept(tree, ids(1, 2), 2)
    kept(tree, ids(3, 4), 2)
    kept(tree, ids(1, 2, rest=3))                               # used again
    kept(tree, ids(5), 1)
    assert tree.length(ids(1, 2)) == 2 * CHUNK and tree.length(ids(3, 4)) == 0 and tree.pages_in_use == 3
    assert tree.counters.evictions == 1


def test_what_is_in_use_stays_and_what_finds_no_room_is_left_out():
    tree = PrefixTree(pages=2, snapshots=2)
    kept(tree, ids(1, 2), 2)
    transaction = tree.begin()
    assert transaction.resume(ids(1, 2)).tokens == 2 * CHUNK
    out = transaction.keep(ids(3, 4, 5), [CHUNK, 3 * CHUNK])
    assert out.pages == out.snapshots == () and tree.counters.skipped == 2
    transaction.commit()
    assert tree.length(ids(1, 2)) == 2 * CHUNK
    _, out = kept(tree, ids(3, 4, 5), 1, 3)
    assert [at for at, _ in out.snapshots] == [0], "three blocks do not fit, one does"


def test_after_clear_an_open_transaction_has_no_effect():
    tree = PrefixTree(4, 4)
    transaction = tree.begin()
    transaction.keep(ids(1, 2), [2 * CHUNK])
    tree.clear()
    transaction.commit()
    assert tree.length(ids(1, 2)) == tree.pages_in_use == tree.snapshots_in_use == 0
    with pytest.raises(RuntimeError, match="has ended"):
        transaction.resume(ids(1))


def test_boundaries_are_multiples_of_a_chunk():
    with pytest.raises(ValueError, match="multiples of 64"):
        PrefixTree(4, 4).begin().keep(ids(1, 2), [65])


def test_prefixes_are_compared_by_their_ids(monkeypatch):
    """Also where all keys have one hash."""
    class Colliding(bytes):
        def __hash__(self) -> int:
            return 0

    made = prefix_tree.keys
    monkeypatch.setattr(prefix_tree, "keys", lambda tokens: map(Colliding, made(tokens)))
    tree = PrefixTree(8, 8)
    kept(tree, ids(1, 2), 1, 2)
    for block, at in ((0, 0), (0, CHUNK - 1), (1, 17)):
        other = ids(1, 2)
        other[block * CHUNK + at] += 1
        assert tree.length(other) == block * CHUNK and tree.begin().resume(other) is None or block
        _, out = kept(tree, other, 2)
        assert len(out.pages) == 2 - block
    assert tree.length(ids(1, 2)) == 2 * CHUNK


def test_who_shares_enough_resumes_the_same():
    """``settled``: nobody who shares so much finds more or less than the one that was looked up."""
    tree = PrefixTree(16, 16)
    kept(tree, ids(1, 2, 3), 1, 3)
    for blocks, rest, settled in (((), 9, math.inf), ((5,), 1, CHUNK), ((1,), 1, math.inf), ((1, 5), 1, 2 * CHUNK),
                                  ((1, 2, 3), 1, 3 * CHUNK), ((1, 2, 3, 4), 5, 3 * CHUNK), ((1, 2, 3), 0, math.inf)):
        transaction = tree.begin()
        transaction.resume(ids(*blocks, rest=rest))
        assert transaction.settled == settled, blocks
        transaction.abort()


def test_ten_thousand_requests_take_bounded_memory():
    """Transcripts that grow and are given up, over a tree with room for a few: what is held stays what fits, no block is
    left behind, and nothing is pinned."""
    tree, rng = PrefixTree(pages=40, snapshots=9), np.random.default_rng(0)
    texts = [rng.integers(0, 50, 6 * CHUNK + 20).astype(np.int32) for _ in range(12)]
    resumed = 0
    for step in range(10_000):
        which = int(rng.integers(len(texts)))
        if rng.random() < 0.02:
            texts[which] = rng.integers(0, 50, 6 * CHUNK + 20).astype(np.int32)
        end = int(rng.integers(CHUNK, len(texts[which])))
        transaction = tree.begin()
        for asked in (texts[which][:end], np.append(texts[which][:end - 9], 99).astype(np.int32)):
            found = transaction.resume(asked)
            resumed += found is not None
            transaction.keep(asked, [len(asked) // CHUNK * CHUNK], found.tokens if found else 0)
        (transaction.abort if rng.random() < 0.1 else transaction.commit)()
        if step % 100 == 0:
            check(tree)
            if rng.random() < 0.02:
                tree.clear()
    check(tree)
    assert resumed > 2000 and tree.counters.evictions > 1000
    del transaction
    gc.collect()
    held = [block for block in gc.get_objects() if isinstance(block, prefix_tree.Block)]
    assert sum(block.chain()[0].parent is tree.root for block in held if block.depth) == tree.pages_in_use


@st.composite
def traces(draw):
    """(pages, snapshots, forwards); a forward: [(blocks, boundaries)] of its sequences, and how it ends."""
    block = st.integers(0, 2)
    sequence = st.tuples(st.lists(block, max_size=6), st.sets(st.integers(0, 6), max_size=3))
    forward = st.tuples(st.lists(sequence, min_size=1, max_size=4), st.sampled_from(["commit", "commit", "abort", "clear"]))
    return draw(st.integers(0, 12)), draw(st.integers(0, 8)), draw(st.lists(forward, max_size=25))


def check(tree: PrefixTree) -> None:
    """What must hold between forward passes."""
    pages, snapshots, blocks = [], [], [*tree.root.children.values()]
    while blocks:
        block = blocks.pop()
        blocks += block.children.values()
        pages.append(block.page)
        assert block.pins == 0 and block.owner is None and block.snapshot_owner is None
        assert block.children or block.snapshot is not None, "a leaf that nobody can resume"
        if block.snapshot is not None:
            snapshots.append(block.snapshot)
            assert block in tree._recent
    assert sorted(pages + tree._free_pages) == list(range(tree.n_pages))
    assert sorted(snapshots + tree._free_snapshots) == list(range(tree.n_snapshots))
    assert len(tree._recent) == len(snapshots)


@SOME
@given(traces())
def test_random_traces_resume_only_what_was_written_for_the_same_ids(trace):
    n_pages, n_snapshots, forwards = trace
    tree = PrefixTree(n_pages, n_snapshots)
    pages: dict[int, tuple] = {}                # what the memory behind a place holds: the ids of the prefix up to its end
    snapshots: dict[int, tuple] = {}
    for sequences, end in forwards:
        transaction = tree.begin()
        read: list[tuple[Resumed, np.ndarray]] = []
        written: list[tuple[dict, int, tuple]] = []
        for blocks, boundaries in sequences:
            tokens = ids(*blocks)
            resumed = transaction.resume(tokens)
            if resumed is not None:
                assert resumed.tokens < len(tokens) and len(resumed.pages) == resumed.tokens // CHUNK
                read.append((resumed, tokens))
            start = resumed.tokens if resumed else 0
            out = transaction.keep(tokens, [b * CHUNK for b in boundaries], start)
            for at, place in out.pages:
                assert at >= start // CHUNK, "a block that this forward does not compute"
                written.append((pages, place, tuple(tokens[:(at + 1) * CHUNK])))
            for at, place in out.snapshots:
                assert at >= start // CHUNK
                written.append((snapshots, place, tuple(tokens[:(at + 1) * CHUNK])))
        for memory, place, content in written:
            memory[place] = content
        for resumed, tokens in read:            # what is read has outlived everything that was reserved meanwhile
            for at, place in enumerate(resumed.pages):
                assert pages[place] == tuple(tokens[:(at + 1) * CHUNK])
            assert snapshots[resumed.snapshot] == tuple(tokens[:resumed.tokens])
        assert len({(id(m), p) for m, p, _ in written}) == len(written), "a place written twice in one forward"
        if end == "clear":
            tree.clear()
        getattr(transaction, "commit" if end == "clear" else end)()
        check(tree)


@SOME
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60), st.integers(1, 5))
def test_with_room_for_some_the_most_recently_used_are_there(uses, room):
    """Prefixes of one block: the tree is a plain least-recently-used cache of them."""
    tree, model = PrefixTree(room, room), OrderedDict()
    for block, keep in uses:
        resumed, _ = kept(tree, ids(block), *([1] if keep else []))
        assert (resumed is not None) == (block in model)
        if keep or block in model:
            model[block] = None
            model.move_to_end(block)
        while len(model) > room:
            model.popitem(last=False)
    assert {b for b in range(10) if tree.length(ids(b))} == set(model)
