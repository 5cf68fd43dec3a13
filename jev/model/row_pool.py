"""Many candidates, one forward pass: the token trie of a set of sequences, as rows and the indices over them.

Causal layers make a row's hidden state a function of its prefix alone, so sequences that share a prefix share its rows.
``build`` puts sequences into a trie whose nodes are rows, numbered depth first: the rows that a sequence does not share
with the one before it (in sorted order) are its *branch*, consecutive rows at consecutive positions. What mixes along a
sequence reads the indices described in ``jev_kernels.pool``.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from jev_kernels.pool import CHUNK, TILE_ROWS


class Branch(NamedTuple):
    """path: int32, the row at every position of a sequence; positions >= start are rows of this branch alone."""
    path: np.ndarray
    start: int


@dataclass(frozen=True)
class RowPool:
    """The rows of one forward pass. All arrays are int32, laid out as ``jev_kernels.pool`` says."""
    ids: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    last_rows: np.ndarray
    branches: tuple[Branch, ...]
    chunk_rows: np.ndarray
    chunk_out_rows: np.ndarray
    chunk_slots: np.ndarray
    runs: np.ndarray
    n_slots: int

    @property
    def n_rows(self) -> int:
        return len(self.ids)

    @cached_property
    def path_starts(self) -> list[int]:
        """Where each branch's path begins in ``paths``."""
        return list(accumulate((len(b.path) for b in self.branches[:-1]), initial=0))

    @cached_property
    def paths(self) -> np.ndarray:
        return self.branches[0].path if len(self.branches) == 1 else np.concatenate([b.path for b in self.branches])

    @cached_property
    def tiles(self) -> np.ndarray:
        """Query tiles of attention, longest first."""
        tiles = []
        for (path, start), at in zip(self.branches, self.path_starts):
            for first in range(start, len(path), TILE_ROWS):
                tiles.append((path[first], min(TILE_ROWS, len(path) - first), first, at))
        return np.array(sorted(tiles, key=lambda tile: -tile[1] - tile[2]), np.int32)


def shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two sequences have in common at their start."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def sorted_order(sequences: Sequence[np.ndarray]) -> list[int]:
    """Indices of the sequences in lexicographic order, in which those that share a prefix stand together."""
    if len(sequences) == 1:
        return [0]
    keys = [s.astype(">u4").tobytes() for s in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _sorted_unique(sequences: Sequence[np.ndarray]) -> tuple[list[int], list[np.ndarray], list[int]]:
    """(order, arrays, shared): indices in lexicographic order, and per entry the tokens shared with the one before.

    A duplicate of the entry before it shares all of its tokens.
    """
    order = sorted_order(sequences)
    arrays = [sequences[i] for i in order]
    return order, arrays, [0] + [shared_prefix(a, b) for a, b in zip(arrays, arrays[1:])]


def _checked(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    if not len(sequences):
        raise ValueError("a forward pass needs at least one sequence")
    arrays = [np.asarray(s, np.int32) for s in sequences]
    for i, s in enumerate(arrays):
        if s.ndim != 1 or not len(s):
            raise ValueError(f"sequence {i} must be a non-empty row of token ids, got shape {s.shape}")
        if s.min() < 0:
            raise ValueError(f"sequence {i} holds a negative token id")
    return arrays


def count_rows(sequences: Sequence[np.ndarray]) -> int:
    """Nodes of the sequences' token trie: the rows that a forward pass over them computes."""
    _, arrays, shared = _sorted_unique(_checked(sequences))
    return sum(map(len, arrays)) - sum(shared)


def build(sequences: Sequence[np.ndarray]) -> RowPool:
    """The row pool of one or more token sequences (int32 [length], length >= 1, in any order, duplicates welcome).

    ``last_rows`` follows the order given. Raises ValueError for an empty set or sequence, or a negative id.
    """
    arrays = _checked(sequences)
    return _single(*arrays) if len(arrays) == 1 else _trie(arrays)


def _single(tokens: np.ndarray) -> RowPool:
    """The pool of one sequence: what ``_trie`` gives, without a trie's work, which the GPU would have to wait for."""
    rows = np.arange(len(tokens), dtype=np.int32)
    chunks = -(-len(tokens) // CHUNK)
    chunk_rows = np.full(chunks * CHUNK, -1, np.int32)
    chunk_rows[:len(tokens)] = rows
    chunk_rows = chunk_rows.reshape(-1, CHUNK)
    return RowPool(ids=tokens, positions=rows, parents=rows - 1, last_rows=rows[-1:], branches=(Branch(rows, 0),),
                   chunk_rows=chunk_rows, chunk_out_rows=chunk_rows, chunk_slots=np.full(chunks, -1, np.int32),
                   runs=np.array([(0, chunks, -1, 0)], np.int32), n_slots=0)


def _trie(sequences: Sequence[np.ndarray]) -> RowPool:
    order, arrays, shared = _sorted_unique(sequences)
    last_rows = np.empty(len(arrays), np.int32)
    ids, positions, parents, branches = [], [], [], []
    chunk_rows, chunk_out, runs, slot_of = [], [], [], {}
    n_rows = total_chunks = 0
    path = np.empty(0, np.int32)
    chain: list[int] = []                       # chunks along the current path
    for index, tokens, start in zip(order, arrays, shared):
        if start < len(tokens) or not n_rows:
            own = np.arange(n_rows, n_rows + len(tokens) - start, dtype=np.int32)
            path = np.concatenate([path[:start], own])
            ids.append(tokens[start:])
            positions.append(np.arange(start, len(tokens), dtype=np.int32))
            up = own - 1
            up[0] = path[start - 1] if start else -1
            parents.append(up)
            branches.append(Branch(path, start))
            n_rows += len(own)

            first = start // CHUNK              # the chunk that holds the first own position
            n_chunks = -(-len(tokens) // CHUNK) - first
            rows = np.full(n_chunks * CHUNK, -1, np.int32)
            rows[:len(tokens) - first * CHUNK] = path[first * CHUNK:]
            out = rows.copy()
            out[:start - first * CHUNK] = -1
            base = total_chunks
            slot = slot_of.setdefault(chain[first - 1], len(slot_of)) if first else -1
            runs.append((base, n_chunks, slot, 0))
            chain = chain[:first] + list(range(base, base + n_chunks))
            total_chunks += n_chunks
            chunk_rows.append(rows.reshape(-1, CHUNK))
            chunk_out.append(out.reshape(-1, CHUNK))
        last_rows[index] = path[-1]
    rows = np.concatenate(chunk_rows)
    slots = np.full(len(rows), -1, np.int32)
    for chunk, slot in slot_of.items():
        slots[chunk] = slot
    return RowPool(ids=np.concatenate(ids), positions=np.concatenate(positions), parents=np.concatenate(parents),
                   last_rows=last_rows, branches=tuple(branches), chunk_rows=rows, chunk_out_rows=np.concatenate(chunk_out),
                   chunk_slots=slots, runs=np.array(runs, np.int32), n_slots=len(slot_of))
