"""What one forward pass resumes and keeps, for all of its sequences.

A sequence resumes at the deepest snapshot on its own path. Kept are the places where the next request will probably go on
differently: the end of a request's state, and the deepest point that all candidates of a request share; each rounded down
to a multiple of 64. Where the tree forks it adds a snapshot by itself (``Transaction.keep``).
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jev.model.sequences import Sequences
from jev.prefix_cache.tree import Kept, Resumed, Transaction
from jev_kernels.pool import CHUNK

# Computing fewer rows than this takes a GPU as long as computing none more: the weights have to be read.
LEAST_TOKENS = 2 * CHUNK
# Sequences of a forward pass that are looked up one by one; others go on from what their neighbour resumes.
MOST_LOOKUPS = 256


@dataclass(frozen=True)
class Plan:
    """resumed: the prefixes that are resumed. of: intp [n], for each sequence in lexicographic order the index of its own
    in ``resumed``, or -1. kept: (rank in that order, places of its blocks)."""
    resumed: tuple[Resumed, ...]
    of: np.ndarray
    kept: tuple[tuple[int, Kept], ...]

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each sequence, in lexicographic order, that are not computed, intp [n]."""
        lengths = np.array([0, *(r.tokens for r in self.resumed)], np.intp)
        return lengths[self.of + 1]


def plan(transaction: Transaction, sequences: Sequences, most_resumed: int, most_kept: int) -> Plan:
    """What a forward pass over ``sequences`` resumes and keeps: at most so many prefixes, and so many snapshots."""
    of = _resumed(transaction, sequences, most_resumed)
    distinct: dict[int, int] = {}
    resumed: list[Resumed] = []
    index = np.full(len(sequences), -1, np.intp)
    for rank, found in enumerate(of):
        if found is not None:
            if id(found) not in distinct:
                distinct[id(found)] = len(resumed)
                resumed.append(found)
            index[rank] = distinct[id(found)]
    kept, snapshots = [], 0
    for rank, boundaries in _boundaries(sequences):
        start = of[rank]
        places = transaction.keep(sequences.at_rank(rank), boundaries, start.tokens if start else 0,
                                  most_kept - snapshots)
        snapshots += len(places.snapshots)
        if places.pages or places.snapshots:
            kept.append((rank, places))
    return Plan(tuple(resumed), index, tuple(kept))


def _resumed(transaction: Transaction, sequences: Sequences, most: int) -> list[Resumed | None]:
    """For each sequence in lexicographic order. A neighbour's prefix serves if both share it and nothing deeper can be
    looked up."""
    out: list[Resumed | None] = []
    seen: dict[tuple[int, int], Resumed] = {}
    lookups = 0
    for rank, (length, shared) in enumerate(zip(sequences.lengths.tolist(), sequences.shared.tolist())):
        before = out[-1] if out else None
        whole_blocks = (length - 1) // CHUNK
        found = before if before is not None and before.tokens <= min(shared, length - 1) else None
        if whole_blocks > shared // CHUNK or found is None and whole_blocks:
            if lookups < MOST_LOOKUPS or rank == 0:
                lookups += 1
                deepest = transaction.resume(sequences.at_rank(rank))
                if deepest is not None:
                    key = deepest.tokens, deepest.snapshot
                    if key not in seen and len(seen) < most:
                        seen[key] = deepest
                    found = seen.get(key, found)
        out.append(found)
    return out


def _boundaries(sequences: Sequences) -> list[tuple[int, set[int]]]:
    """(rank, tokens): the first sequence through each place that is worth keeping."""
    ends, forks, shared = sequences.state_ends, sequences.forks, sequences.shared
    out = []
    for rank in np.flatnonzero((np.maximum(ends, forks) >= LEAST_TOKENS)
                               & ((ends // CHUNK * CHUNK > shared) | (forks // CHUNK * CHUNK > shared))).tolist():
        places = {int(at) // CHUNK * CHUNK for at in (ends[rank], forks[rank])}
        out.append((rank, {at for at in places if at >= LEAST_TOKENS and at > shared[rank]}))
    return out
