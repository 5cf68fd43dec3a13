"""What one forward pass resumes and keeps, for all of its sequences.

A sequence resumes at the deepest snapshot on its own path. Kept are the places where the next request will probably go on
differently, each rounded down to a multiple of 64:

  - the end of a request's state: another question about it starts there, and a state that has grown goes on from there. A
    request with one sequence (a single noul) keeps this one alone;
  - the deepest point that all sequences of a request share, if that is further on: the same question with other options,
    or the rest of a request that one forward pass does not hold;
  - where a sequence leaves what is known already (``Transaction.keep``): what two requests had in common a third is likely to
    have too.

What is shorter than LEAST_TOKENS is neither kept nor looked for: the rows that it would save cost a GPU nothing, since it
has to read all weights for the rows that are left, and a snapshot is 154 MB to copy and to hold for the 27B. So prompts of
up to LEAST_TOKENS tokens have nothing to do with the cache. A forward pass keeps at most so many snapshots as ``most_kept``
says; those of the first sequences in lexicographic order.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jev.model.sequences import Sequences
from jev.prefix_cache.tree import Kept, Resumed, Transaction
from jev_kernels.pool import CHUNK

# Up to so many rows take a GPU as long as one: the weights have to be read.
LEAST_TOKENS = 2 * CHUNK
# Sequences of a forward pass that are looked up one by one; others go on from what their neighbours resume.
MOST_LOOKUPS = 256


@dataclass(frozen=True)
class Plan:
    """resumed: the prefixes that are resumed. of: intp [n], for each sequence in lexicographic order the index of its own
    in ``resumed``, or -1. kept: (rank in that order, places of its blocks)."""
    resumed: tuple[Resumed, ...]
    of: np.ndarray
    kept: tuple[tuple[int, Kept], ...]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens of each sequence, in lexicographic order, that are not computed, intp [n]."""
        lengths = np.array([0, *(r.tokens for r in self.resumed)], np.intp)
        return lengths[self.of + 1]


def plan(transaction: Transaction, sequences: Sequences, most_resumed: int, most_kept: int) -> Plan:
    """What a forward pass over ``sequences`` resumes and keeps: at most so many prefixes, and so many snapshots."""
    if sequences.rows <= LEAST_TOKENS:                       # a rough guess that is right for the small ones, which count
        return Plan((), np.full(len(sequences), -1, np.intp), ())
    resumed, of = _resumed(transaction, sequences, most_resumed)
    kept, snapshots = [], 0
    for rank, boundaries in _boundaries(sequences):
        start = resumed[of[rank]].tokens if of[rank] >= 0 else 0
        places = transaction.keep(sequences.at_rank(rank), boundaries, start, most_kept - snapshots, LEAST_TOKENS)
        snapshots += len(places.snapshots)
        if places.pages or places.snapshots:
            kept.append((rank, places))
    return Plan(tuple(resumed), np.array(of, np.intp), tuple(kept))


def _resumed(transaction: Transaction, sequences: Sequences, most: int) -> tuple[list[Resumed], list[int]]:
    """What is resumed, and for each sequence in lexicographic order its index there, or -1.

    Few are looked up: one that shares enough with the one before it resumes what that does. What finds no room among
    ``most``, or is not looked up, resumes the deepest prefix of its own that others resume; and so do those behind it that
    share with it what they could resume, since its rows are computed anyway.
    """
    resumed: list[Resumed] = []
    index: dict[tuple[int, int], int] = {}
    of: list[int] = []
    path: list[int] = []                # resumed prefixes of the current sequence, deeper ones last
    lookups, settled = 0, math.inf
    for rank, shared in enumerate(sequences.shared.tolist()):
        while path and resumed[path[-1]].tokens > shared:
            path.pop()
        if rank and shared >= settled:
            of.append(of[-1])
            continue
        settled = math.inf
        if lookups < MOST_LOOKUPS:
            lookups += 1
            found = transaction.resume(sequences.at_rank(rank))
            settled = transaction.settled
            if found is not None and (not rank or found.tokens > shared):
                key = found.tokens, found.snapshot
                if key not in index and len(resumed) < most:
                    index[key] = len(resumed)
                    resumed.append(found)
                at = index.get(key)
                if at is not None and (not path or path[-1] != at):
                    path.append(at)
        of.append(path[-1] if path else -1)
    return resumed, of


def _boundaries(sequences: Sequences) -> list[tuple[int, list[int]]]:
    """(rank, tokens): the first sequence through each place that is worth keeping."""
    if len(sequences) == 1:
        end = int(sequences.state_ends[0]) // CHUNK * CHUNK
        return [(0, [end])] if end >= LEAST_TOKENS else []
    ends, forks = (x // CHUNK * CHUNK for x in (sequences.state_ends, sequences.forks))
    least = np.maximum(sequences.shared, LEAST_TOKENS - 1)
    return [(rank, sorted({at for at in (int(ends[rank]), int(forks[rank])) if at > least[rank]}))
            for rank in np.flatnonzero(np.maximum(ends, forks) > least).tolist()]
