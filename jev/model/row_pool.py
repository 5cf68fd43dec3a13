"""Many candidates, one forward pass: the token trie of a set of sequences, as rows and the indices over them.

Causal layers make a row's hidden state a function of its prefix alone, so sequences that share a prefix share its rows.
``build`` puts sequences into a trie whose nodes are rows, numbered depth first: the rows that a sequence does not share
with the one before it (in lexicographic order, see ``Sequences``) are its *branch*, consecutive rows at consecutive
positions. What mixes along a sequence reads the indices described in ``jev_kernels.pool``.

A prefix that is kept from an earlier forward pass has no rows: branches go on behind it (``jev.prefix_cache``). Its keys and
values are *history*, counted as rows behind the pool's own, ``n_rows`` and further, a page that several prefixes begin with
once; so are, separately, three inputs of the convolution for each resumed prefix, its *tail*.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jev.model.sequences import Sequences
from jev.prefix_cache.plan import Plan
from jev_kernels.pool import CHUNK, TAPS, TILE_ROWS

_ZERO = np.zeros(1, np.int32)
_NOTHING = Plan((), _ZERO, ())
_NO_PAGES, _NO_STATES, _NO_PAIRS = (np.zeros(shape, np.int32) for shape in (0, (0, 4), (0, 2)))


class Branch(NamedTuple):
    """path: int32, the row at every position of a sequence; positions >= start are rows of this branch alone."""
    path: np.ndarray
    start: int


@dataclass(frozen=True)
class RowPool:
    """The rows of one forward pass. All arrays are int32, laid out as ``jev_kernels.pool`` says.

    path_starts: int32, where each branch's path begins in ``paths``. parents has the tails' entries behind the rows' own.
    """
    ids: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    last_rows: np.ndarray
    branches: tuple[Branch, ...]
    paths: np.ndarray
    path_starts: np.ndarray
    chunk_rows: np.ndarray
    chunk_out_rows: np.ndarray
    chunk_slots: np.ndarray
    runs: np.ndarray
    n_slots: int
    restored_pages: np.ndarray = field(default_factory=lambda: _NO_PAGES)
    restored_states: np.ndarray = field(default_factory=lambda: _NO_STATES)
    kept_pages: np.ndarray = field(default_factory=lambda: _NO_PAIRS)
    kept_states: np.ndarray = field(default_factory=lambda: _NO_PAIRS)

    @property
    def n_rows(self) -> int:
        return len(self.ids)

    @cached_property
    def tiles(self) -> np.ndarray:
        """Query tiles of attention, longest first."""
        if len(self.branches) == 1:     # the GPU waits for it, and a few numbers are sooner made one by one
            n, start = self.n_rows, self.branches[0].start
            return np.array([(at, min(TILE_ROWS, n - at), start + at, 0) for at in range((n - 1) // TILE_ROWS * TILE_ROWS, -1,
                                                                                         -TILE_ROWS)], np.int32)
        lengths = np.array([len(path) for path, _ in self.branches])
        starts = np.array([start for _, start in self.branches])
        counts = -(-(lengths - starts) // TILE_ROWS)
        first = np.repeat(starts, counts) + TILE_ROWS * _within(counts)
        size = np.minimum(TILE_ROWS, np.repeat(lengths, counts) - first)
        at = np.repeat(self.path_starts, counts)
        tiles = np.stack([self.paths[at + first], size, first, at], axis=1).astype(np.int32)
        return tiles[np.argsort(-(first + size), kind="stable")]


def _within(counts: np.ndarray) -> np.ndarray:
    """0..n-1 for each n of ``counts``, one after another."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)


def count_rows(sequences: Sequence[np.ndarray]) -> int:
    """Nodes of the sequences' token trie: the rows that a forward pass over them computes."""
    return Sequences.of(sequences).rows


def build(sequences: Sequence[np.ndarray], plan: Plan | None = None) -> RowPool:
    """The row pool of one or more token sequences: ``Sequences``, or arrays (int32 [length], length >= 1), in any order,
    duplicates welcome.

    plan: what is resumed and what is to be kept of them. ``last_rows`` follows the order given. Raises ValueError for an
    empty set or sequence, or a negative id.
    """
    sequences = Sequences.of(sequences)
    if plan is None or not (plan.resumed or plan.kept):
        return _single(sequences.tokens) if len(sequences) == 1 else _trie(sequences)
    return _resumed(sequences.tokens, plan) if len(sequences) == 1 else _trie(sequences, plan)


def _single(tokens: np.ndarray) -> RowPool:
    """The pool of one sequence: what ``_trie`` gives, without a trie's work, which the GPU would have to wait for."""
    rows = np.arange(len(tokens), dtype=np.int32)
    chunks = -(-len(tokens) // CHUNK)
    chunk_rows = np.full(chunks * CHUNK, -1, np.int32)
    chunk_rows[:len(tokens)] = rows
    chunk_rows = chunk_rows.reshape(-1, CHUNK)
    return RowPool(ids=tokens, positions=rows, parents=rows - 1, last_rows=rows[-1:], branches=(Branch(rows, 0),),
                   paths=rows, path_starts=_ZERO, chunk_rows=chunk_rows, chunk_out_rows=chunk_rows,
                   chunk_slots=np.full(chunks, -1, np.int32), runs=np.array([(0, chunks, -1, 0)], np.int32), n_slots=0)


def _resumed(tokens: np.ndarray, plan: Plan) -> RowPool:
    """The pool of one sequence of which something is resumed or kept, likewise."""
    known = plan.resumed[0].tokens if plan.resumed else 0
    ids, first = tokens[known:], known // CHUNK
    n = len(ids)
    rows = np.arange(n, dtype=np.int32)
    path, parents, restored_pages, restored_states = rows, rows - 1, _NO_PAGES, _NO_STATES
    chunks = -(-n // CHUNK)
    chunk_rows = np.full(chunks * CHUNK, -1, np.int32)
    chunk_rows[:n] = rows
    chunk_rows = chunk_rows.reshape(-1, CHUNK)
    chunk_slots = np.full(chunks, -1, np.int32)
    n_slots = 0
    if known:
        path = np.concatenate([np.arange(n, n + known, dtype=np.int32), rows])
        parents = np.arange(-1, n + TAPS - 1, dtype=np.int32)
        parents[n] = -1
        parents[0] = n + TAPS - 1
        restored_pages = np.array(plan.resumed[0].pages, np.int32)
        restored_states = np.array([(plan.resumed[0].snapshot, 0, n, 0)], np.int32)
        n_slots = 1
    kept_pages, kept_states = _NO_PAIRS, _NO_PAIRS
    for _, places in plan.kept:
        kept_pages = np.array([(page, block - first) for block, page in places.pages], np.int32).reshape(-1, 2)
        kept_states = np.array([(snapshot, block - first) for block, snapshot in places.snapshots], np.int32).reshape(-1, 2)
        chunk_slots[kept_states[:, 1]] = np.arange(n_slots, n_slots + len(kept_states))
        n_slots += len(kept_states)
    return RowPool(ids=ids, positions=rows + known if known else rows, parents=parents, last_rows=rows[-1:],
                   branches=(Branch(path, known),), paths=path, path_starts=_ZERO, chunk_rows=chunk_rows,
                   chunk_out_rows=chunk_rows, chunk_slots=chunk_slots,
                   runs=np.array([(0, chunks, 0 if known else -1, 0)], np.int32), n_slots=n_slots,
                   restored_pages=restored_pages, restored_states=restored_states, kept_pages=kept_pages,
                   kept_states=kept_states)


def _history(plan: Plan, n_rows: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """(pages that are restored, each once; the rows of every resumed prefix)."""
    places: dict[int, int] = {}
    of = [[places.setdefault(page, len(places)) for page in r.pages] for r in plan.resumed]
    rows = [(n_rows + CHUNK * np.array(at)[:, None] + np.arange(CHUNK)).reshape(-1) for at in of]
    return np.array(list(places), np.int32), rows


def _computed(sequences: Sequences, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, starts, shared, ranks): the first three as in ``Sequences``, of what is not resumed.

    Sequences that resume the same prefix, or none, are a trie of their own: they come one after the other, in lexicographic
    order, and share the rows of what they have in common behind it. ranks: intp [n], which each one is.
    """
    n = len(sequences)
    if not plan.resumed:
        return sequences.tokens, sequences.starts, sequences.shared, np.arange(n)
    ranks = np.argsort(plan.of, kind="stable")
    resumed, alike = plan.tokens[ranks], plan.of[ranks][1:] == plan.of[ranks][:-1]
    shared = resumed.copy()
    if n > 1:                          # with one some ranks before: the least of what neighbours between them share
        between = np.stack([ranks[:-1], ranks[1:]], axis=1).reshape(-1) + 1
        shared[1:][alike] = np.minimum.reduceat(np.append(sequences.shared, 0), between)[::2][alike]
    pieces = []
    for rank, start, before in zip(ranks.tolist(), shared.tolist(), sequences.shared[ranks].tolist()):
        if start < before:
            pieces.append(sequences.at_rank(rank)[start:])
        else:
            pieces.append(sequences.tokens[sequences.starts[rank] + start - before:sequences.starts[rank + 1]])
    starts = np.zeros(n + 1, np.intp)
    np.cumsum([len(piece) for piece in pieces], out=starts[1:])
    return np.concatenate(pieces), starts, shared, ranks


def _trie(sequences: Sequences, plan: Plan = _NOTHING) -> RowPool:
    """Rows are the sequences' own tokens, in the order of ``_computed``: all that depends on a branch's length alone is made
    for all branches at once, paths and what is read from them branch by branch."""
    tokens, row_starts, shared, ranks = _computed(sequences, plan)
    n_rows = len(tokens)
    own = np.diff(row_starts)
    last_rows = np.empty(len(sequences), np.int32)
    last_rows[sequences.order[ranks]] = row_starts[1:] - 1          # a duplicate ends where the one before it does

    branching = np.flatnonzero(own)
    starts, first_rows, branching = shared[branching], row_starts[branching], ranks[branching]
    lengths = sequences.lengths[branching]
    path_ends = lengths.cumsum()
    first_chunks = starts // CHUNK                                  # of a branch: the one that holds its first own position
    n_chunks = -(-lengths // CHUNK) - first_chunks
    chunk_ends = n_chunks.cumsum()

    rows = np.arange(n_rows, dtype=np.int32)
    parents = np.arange(-1, n_rows + TAPS * len(plan.resumed) - 1, dtype=np.int32)
    parents[n_rows::TAPS] = -1                                      # tails begin like sequences: nothing reads further up
    paths = np.empty(path_ends[-1], np.int32)
    chunk_rows = np.full(chunk_ends[-1] * CHUNK, -1, np.int32)
    chunk_out = chunk_rows.copy()
    chunk_slots = np.full(chunk_ends[-1], -1, np.int32)
    slots, branches = [], []
    chain = [0] * int(-(-lengths.max() // CHUNK))                   # chunks along the current path
    kept_pages: list[tuple[int, int]] = []
    kept_states: list[tuple[int, int]] = []
    keeping = dict(plan.kept)
    restored_pages, history = _history(plan, n_rows)
    restored = [[r.snapshot, -1, n_rows + TAPS * i, 0] for i, r in enumerate(plan.resumed)]
    before, n_slots = paths, 0
    for rank, start, length, row, path_end, first, count, chunk_end in zip(
            branching.tolist(), starts.tolist(), lengths.tolist(), first_rows.tolist(), path_ends.tolist(),
            first_chunks.tolist(), n_chunks.tolist(), chunk_ends.tolist()):
        path = paths[path_end - length:path_end]
        path[start:] = rows[row:row + length - start]
        resumed = int(plan.of[rank]) if plan.resumed else -1
        known = plan.resumed[resumed].tokens if resumed >= 0 else 0       # tokens that nobody computes
        path[known:start] = before[known:start]
        if known:
            path[:known] = history[resumed]
        if start > known:
            parents[row] = path[start - 1]
        else:
            parents[row] = n_rows + TAPS * resumed + TAPS - 1 if known else -1
        branches.append(Branch(path, start))
        before = path

        slot = -1
        if first and first * CHUNK == known:
            slot = restored[resumed][1]
            if slot < 0:
                slot = restored[resumed][1] = n_slots
                n_slots += 1
        elif first:
            slot = int(chunk_slots[chain[first - 1]])
            if slot < 0:
                slot = chunk_slots[chain[first - 1]] = n_slots
                n_slots += 1
        slots.append(slot)
        chunk = chunk_end - count
        chain[first:first + count] = range(chunk, chunk_end)
        skipped, at = first * CHUNK, chunk * CHUNK
        chunk_rows[at:at + length - skipped] = path[skipped:]
        chunk_out[at + start - skipped:at + length - skipped] = path[start:]
        if rank in keeping:
            places = keeping[rank]
            kept_pages += [(page, chain[block]) for block, page in places.pages]
            for block, snapshot in places.snapshots:
                kept_states.append((snapshot, chain[block]))
                if chunk_slots[chain[block]] < 0:
                    chunk_slots[chain[block]] = n_slots
                    n_slots += 1
    runs = np.stack([chunk_ends - n_chunks, n_chunks, slots, np.zeros_like(n_chunks)], axis=1).astype(np.int32)
    return RowPool(ids=tokens, positions=(rows - np.repeat(row_starts[:-1] - shared, own)).astype(np.int32),
                   parents=parents, last_rows=last_rows, branches=tuple(branches), paths=paths,
                   path_starts=(path_ends - lengths).astype(np.int32), chunk_rows=chunk_rows.reshape(-1, CHUNK),
                   chunk_out_rows=chunk_out.reshape(-1, CHUNK), chunk_slots=chunk_slots, runs=runs, n_slots=n_slots,
                   restored_pages=restored_pages,
                   restored_states=np.array(restored, np.int32).reshape(-1, 4),
                   kept_pages=np.array(kept_pages, np.int32).reshape(-1, 2),
                   kept_states=np.array(kept_states, np.int32).reshape(-1, 2))
