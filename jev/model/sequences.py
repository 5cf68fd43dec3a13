"""Token sequences that share prefixes, each token of a shared prefix held once: from the tokenizer to the row pool.

A small body can name many prompts over one long state: 51,000 candidates over 1,000 tokens are 51 million ids, of which
one and a half million differ. So a set of sequences is kept *front coded*: in lexicographic order, each as what it does
not share with the one before it. What precedes the row pool needs falls out of that: common prefixes, the number of
rows, the bound that a forward pass is filled by, and any range of the order as a set of its own.

While a set is made, ids are big-endian bytes, four each, which Python compares and sorts as fast as memory is read; lengths
are in bytes there. ``Sequences`` has arrays and counts tokens.
"""
from __future__ import annotations

import collections.abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ID = np.dtype(">i4")
# Up to so many bytes the sequences of a set are sorted whole but for what all of them share; beyond, a prefix that some
# of them share is compared once.
SORTED_WHOLE = 1 << 18

_ZERO = np.zeros(1, np.intp)


@dataclass(eq=False)
class Sequences(collections.abc.Sequence):
    """One or more token sequences of at least one token: as a Python sequence, int32 arrays in the order they were given.

    All fields but ``order`` follow the lexicographic order. The k-th in it has its first ``shared[k]`` tokens in common
    with the one before, exactly (0 for the first), and goes on with ``tokens[starts[k]:starts[k + 1]]``, which is empty
    for a duplicate.

    tokens: int32 [rows]. starts: intp [n + 1]. shared: intp [n]. order: intp [n], where each was given.
    state_ends: intp [n], tokens of each up to the end of its request's state, where later requests are likely to go on
    differently; 0 where that is not known. forks: intp [n], tokens that all sequences of its request share; 0 where it is
    the only one.
    """
    tokens: np.ndarray
    starts: np.ndarray
    shared: np.ndarray
    order: np.ndarray
    state_ends: np.ndarray
    forks: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> Sequences:
        """Those of whole arrays of ids. Raises ValueError for none, an empty one, or a negative id."""
        if isinstance(sequences, Sequences):
            return sequences
        if not len(sequences):
            raise ValueError("a forward pass needs at least one sequence")
        arrays = [np.asarray(s, np.int32) for s in sequences]
        for i, s in enumerate(arrays):
            if s.ndim != 1 or not len(s):
                raise ValueError(f"sequence {i} must be a non-empty row of token ids, got shape {s.shape}")
            if s.min() < 0:
                raise ValueError(f"sequence {i} holds a negative token id")
        if len(arrays) == 1:
            return cls._single(arrays[0], 0)
        return cls.front_coded([0] * len(arrays), [s.astype(ID).tobytes() for s in arrays])

    @classmethod
    def front_coded(cls, shared: list[int], own: list[bytes], state_end: int = 0) -> Sequences:
        """Those of a front coding in any order: the i-th begins as the one before it does, for ``shared[i]`` bytes or
        more, and goes on with ``own[i]``. state_end: bytes, the same for all."""
        if len(own) == 1:
            return cls._single(np.frombuffer(own[0], ID).astype(np.int32), state_end // ID.itemsize)
        shared, own, order = _sorted(shared, own)
        starts = np.zeros(len(own) + 1, np.intp)
        np.cumsum(list(map(len, own)), out=starts[1:])
        return cls(np.frombuffer(b"".join(own), ID).astype(np.int32), starts // ID.itemsize,
                   np.array(shared, np.intp) // ID.itemsize, np.array(order, np.intp),
                   np.full(len(own), state_end // ID.itemsize, np.intp),
                   np.full(len(own), min(shared[1:]) // ID.itemsize, np.intp))

    @classmethod
    def join(cls, sets: Sequence[Sequences]) -> Sequences:
        """All sequences of several sets, given one set after the other."""
        if len(sets) == 1:
            return sets[0]
        shared, own, given, offset = [], [], [], 0
        for each in sets:
            ids = each.tokens.astype(ID).tobytes()
            cuts = (each.starts * ID.itemsize).tolist()
            own += [ids[a:b] for a, b in zip(cuts, cuts[1:])]
            shared += (each.shared * ID.itemsize).tolist()
            given.append(each.order + offset)
            offset += len(each)
        joined = cls.front_coded(shared, own)
        # What is known of each moves with it: ``order`` says where it stood before.
        joined.state_ends = np.concatenate([each.state_ends for each in sets])[joined.order]
        joined.forks = np.concatenate([each.forks for each in sets])[joined.order]
        joined.order = np.concatenate(given)[joined.order]
        return joined

    @classmethod
    def _single(cls, tokens: np.ndarray, state_end: int) -> Sequences:
        return cls(tokens, np.array([0, len(tokens)]), _ZERO, _ZERO, np.array([state_end]) if state_end else _ZERO, _ZERO)

    def part(self, start: int, end: int) -> Sequences:
        """The sequences at ``start..end`` of the lexicographic order, given in it."""
        if len(self) == 1:
            return self
        first = self.at_rank(start)
        starts = self.starts[start:end + 1] + (len(first) - self.starts[start + 1])
        starts[0] = 0
        shared = self.shared[start:end].copy()
        shared[0] = 0
        tokens = self.tokens[self.starts[start + 1]:self.starts[end]]
        return Sequences(np.concatenate([first, tokens]) if start else self.tokens[:self.starts[end]], starts, shared,
                         np.arange(end - start), self.state_ends[start:end], self.forks[start:end])

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.at_rank(self._ranks[index])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, intp [n]."""
        return self.shared + np.diff(self.starts)

    @cached_property
    def bounds(self) -> np.ndarray:
        """For i in 0..n, at least the rows of the first i sequences, intp [n + 1].

        A duplicate counts as one row, so that many of them do not make a forward pass of unlimited width.
        """
        if len(self) == 1:
            return self.starts
        return np.concatenate([_ZERO, np.maximum(np.diff(self.starts), 1).cumsum()])

    @property
    def rows(self) -> int:
        """Nodes of the token trie: the rows that a forward pass over all of them computes."""
        return len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens of all sequences, shared ones counted in each."""
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @property
    def nbytes(self) -> int:
        """Memory that the set takes, ``lengths`` and ``bounds`` included."""
        return self.tokens.nbytes + 7 * self.starts.nbytes

    @cached_property
    def _ranks(self) -> np.ndarray:
        """The inverse of ``order``."""
        ranks = np.empty(len(self), np.intp)
        ranks[self.order] = np.arange(len(self))
        return ranks

    def at_rank(self, rank: int) -> np.ndarray:
        """All tokens of the sequence at ``rank``: its own, and before them those of its predecessors."""
        if rank == 0:
            return self.tokens[:self.starts[1]]
        shared = self.shared[rank::-1]
        inherited = np.minimum.accumulate(shared)
        pieces, end = [], self.lengths[rank]
        for back in (0, *np.flatnonzero(shared[1:] < inherited[:-1]) + 1):
            start = self.starts[rank - back]
            pieces.append(self.tokens[start:start + end - shared[back]])
            end = shared[back]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces[::-1])


def common_prefix(a: bytes, b: bytes) -> int:
    """Bytes of the ids that two sequences have in common at their start."""
    start, end = 0, min(len(a), len(b))
    if a[:end] == b[:end]:
        return end
    while end - start > 64:                      # halved while comparing is less work than arithmetic
        middle = (start + end) // 2
        if a[start:middle] == b[start:middle]:
            start = middle
        else:
            end = middle
    differ = int.from_bytes(a[start:end], "big") ^ int.from_bytes(b[start:end], "big")
    return (end - (differ.bit_length() + 7) // 8) // ID.itemsize * ID.itemsize


def _sorted(shared: list[int], own: list[bytes]) -> tuple[list[int], list[bytes], Sequence[int]]:
    """A front coding in lexicographic order, with exact common prefixes, and where each sequence stood before.

    Neighbours that share more than all of the set do are a *block*, which is sorted among the others by the prefix that
    its sequences share, and then by itself: so that prefix is compared once. Where it also begins another block, the
    two may interleave, and are sorted as one. Memory is in proportion to what ``own`` holds.
    """
    out: tuple[list[int], list[bytes], list[int]] = ([], [], [])
    waiting: list[tuple[list[int], list[bytes], Sequence[int]]] = [(shared, own, range(len(own)))]
    while waiting:
        shared, own, index = waiting.pop()          # shared[0]: with what precedes it in ``out``; own[0] starts there
        n = len(own)
        low = min(shared[1:], default=shared[0])
        head, own = own[0][:low - shared[0]], [own[0][low - shared[0]:], *own[1:]]
        blocks = [0, *(i for i in range(1, n) if shared[i] == low)]
        if len(blocks) == n or sum(shared[1:]) + sum(map(len, own)) - (n - 1) * low <= SORTED_WHOLE:
            _sort_whole(low, head, shared, own, index, out)
        else:
            waiting += reversed(_sort_blocks(low, head, shared, own, index, blocks))
    return out


def _sort_whole(low: int, head: bytes, shared: list[int], own: list[bytes], index: Sequence[int], out) -> None:
    """Append sequences that share ``low`` bytes, ``head`` the last of them, to ``out`` in lexicographic order."""
    keys, key = [], b""
    for common, rest in zip([low, *shared[1:]], own):
        key = key[:common - low] + rest
        keys.append(key)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    before = keys[order[0]]
    out[0].append(shared[0])
    out[1].append(head + before)
    for i in order[1:]:
        key = keys[i]
        common = common_prefix(before, key)
        out[0].append(low + common)
        out[1].append(key[common:])
        before = key
    out[2].extend(order if isinstance(index, range) and index == range(len(own)) else [index[i] for i in order])


def _sort_blocks(low: int, head: bytes, shared: list[int], own: list[bytes], index: Sequence[int],
                 starts: list[int]) -> list[tuple[list[int], list[bytes], Sequence[int]]]:
    """The blocks that begin at ``starts``, in lexicographic order, those that may interleave made one."""
    ends = [*starts[1:], len(own)]
    keys = [own[a] if b - a == 1 else own[a][:min(shared[a + 1:b]) - low] for a, b in zip(starts, ends)]
    groups: list[tuple[list[int], list[bytes], list[int]]] = []
    leader, before = None, b""
    for block in sorted(range(len(keys)), key=keys.__getitem__):
        a, b, key = starts[block], ends[block], keys[block]
        if leader is not None and key.startswith(leader):
            common, into = len(leader), groups[-1]
        else:
            common, into = common_prefix(before, key), ([], [], [])
            groups.append(into)
            leader = key if b - a > 1 else None
        into[0].extend((low + common, *shared[a + 1:b]))
        into[1].extend((own[a][common:], *own[a + 1:b]))
        into[2].extend(index[a:b])
        before = key
    groups[0][0][0] = shared[0]
    groups[0][1][0] = head + groups[0][1][0]
    return groups
