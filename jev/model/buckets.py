"""Row buckets: the fixed capacities that a captured forward pass is launched with, and the metadata packed for it.

Kernels read how much there is to do from int32 arrays in device memory (``jev_kernels.pool``), so one captured graph
serves every pool that fits its bucket. A bucket is a number of rows and a class: *narrow* buckets hold what ordinary
requests need, a choice of 255 options among them; *wide* ones have room for more branches, at the price of a last layer
over as many rows.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jev.model.row_pool import RowPool
from jev.prefix_cache.passes import MOST_RESUMED
from jev_kernels.pool import (
    CHUNK,
    CHUNKS,
    COUNTS,
    KEPT_PAGES,
    KEPT_STATES,
    LASTS,
    PADDING,
    RESTORED_PAGES,
    RESTORED_STATES,
    ROWS,
    RUNS,
    TILE_ROWS,
    TILES,
)

MAX_BRANCHES = 1024          # of a wide bucket
MAX_SLOTS = 64               # states kept for branching; one is 3 MB for the 27B
MAX_PATHS = 4 << 20          # entries of ``paths``: 16 MB
ALIGN = 64                   # int32 entries: sections start at multiples of 256 bytes


class Section(NamedTuple):
    """Where an array lies in the metadata: first int32 entry, shape."""
    at: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Capacities of one captured forward pass. rows: activations have this many; wide: many branches.

    Multiples of 16: each number of last rows is then also a bucket's number of rows, and GEMMs are tuned for both at once.
    """
    rows: int
    wide: bool = False
    history: int = 0             # rows behind them for keys and values of resumed prefixes, a multiple of 64

    @property
    def branches(self) -> int:
        if self.wide:
            return min(self.rows, MAX_BRANCHES)
        return max(16, self.rows // 4 // 16 * 16) if self.rows < 512 else 256

    @property
    def lasts(self) -> int:
        """Distinct last rows."""
        return self.branches

    @property
    def tiles(self) -> int:
        return self.rows // TILE_ROWS + self.branches

    @property
    def chunks(self) -> int:
        """A branch of n rows touches at most n / 64 + 2 chunks."""
        return self.rows // CHUNK + 2 * self.branches

    @property
    def paths(self) -> int:
        """Room for every branch's path; what is not in use is not uploaded and costs nothing."""
        return min(self.branches * (self.rows + self.history), MAX_PATHS)

    @property
    def tails(self) -> int:
        """The first row for inputs of the convolution that stand before resumed prefixes' continuations."""
        return self.rows

    @property
    def first_history(self) -> int:
        return self.rows + PADDING

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The arrays of the metadata, paths last: only the part of it that is in use is uploaded."""
        out, at = {}, 0
        for name, shape in (("counts", (COUNTS,)), ("ids", (self.rows,)), ("positions", (self.rows + PADDING,)),
                            ("parents", (self.rows + PADDING,)), ("last_rows", (self.lasts,)), ("tiles", (self.tiles, 4)),
                            ("runs", (self.branches, 4)), ("chunk_slots", (self.chunks,)),
                            ("chunk_rows", (self.chunks, CHUNK)), ("chunk_out_rows", (self.chunks, CHUNK)),
                            ("restored_pages", (max(1, self.history // CHUNK),)), ("restored_states", (MOST_RESUMED, 4)),
                            ("kept_pages", (self.chunks, 2)), ("kept_states", (MAX_SLOTS, 2)),
                            ("paths", (self.paths,))):
            out[name] = Section(at, shape)
            at += -(-int(np.prod(shape)) // ALIGN) * ALIGN
        return out

    @property
    def size(self) -> int:
        """int32 entries of the whole metadata."""
        last = self.sections["paths"]
        return last.at + -(-last.shape[0] // ALIGN) * ALIGN

    def holds(self, pool: RowPool) -> bool:
        """Whether the pool fits."""
        return (pool.n_rows <= self.rows and len(pool.branches) <= self.branches and len(pool.tiles) <= self.tiles
                and len(pool.chunk_rows) <= self.chunks and len(pool.paths) <= self.paths and pool.n_slots <= MAX_SLOTS
                and CHUNK * len(pool.restored_pages) <= self.history and len(pool.restored_states) <= MOST_RESUMED
                and len(pool.kept_pages) <= self.chunks and len(pool.kept_states) <= MAX_SLOTS)

    def pack(self, pool: RowPool, last_rows: np.ndarray, out: np.ndarray) -> int:
        """Write the pool's metadata into ``out`` (int32 [>= size]); returns how many entries of it are in use."""
        counts = np.zeros(COUNTS, np.int32)
        for at, n in ((ROWS, pool.n_rows), (TILES, len(pool.tiles)), (CHUNKS, len(pool.chunk_rows)), (RUNS, len(pool.runs)),
                      (LASTS, len(last_rows)), (RESTORED_PAGES, len(pool.restored_pages)),
                      (RESTORED_STATES, len(pool.restored_states)), (KEPT_PAGES, len(pool.kept_pages)),
                      (KEPT_STATES, len(pool.kept_states))):
            counts[at] = n
        for name, (at, _) in self.sections.items():
            x = counts if name == "counts" else last_rows if name == "last_rows" else getattr(pool, name)
            out[at:at + x.size] = x.reshape(-1)
        if len(pool.restored_states):
            self._place(pool, out)
        return self.sections["paths"].at + len(pool.paths)

    def _place(self, pool: RowPool, out: np.ndarray) -> None:
        """Rows that a pool counts on behind its own, to where this bucket has them."""
        def section(name: str, size: int) -> np.ndarray:
            return out[self.sections[name].at:][:size]
        paths, parents = section("paths", len(pool.paths)), section("parents", self.rows + PADDING)
        np.add(paths, self.first_history - pool.n_rows, out=paths, where=paths >= pool.n_rows)
        moved = np.where(pool.parents >= pool.n_rows, pool.parents + self.tails - pool.n_rows, pool.parents)
        parents[:pool.n_rows], tails = moved[:pool.n_rows], moved[pool.n_rows:]
        parents[self.tails:self.tails + len(tails)] = tails
        restored = section("restored_states", pool.restored_states.size).reshape(-1, 4)
        restored[:, 2] += self.tails - pool.n_rows


def row_counts(max_rows: int) -> Iterator[int]:
    """The row counts of buckets, up to the first that holds ``max_rows``.

    Rows between the live ones and the bucket's are multiplied like any other: finer steps save that, 3 % of the time of
    prompts of 512 to 2,400 tokens, and cost graphs (0.1 s of the start-up each, for the 27B).
    """
    rows = 0
    while rows < max_rows:
        rows += 16 if rows < 1024 else 64 if rows < 4096 else 512
        yield rows


def all_buckets(max_rows: int, history: bool) -> list[Bucket]:
    """Narrow buckets, then wide ones, ascending, up to the first row count that holds ``max_rows``.

    history: with room behind their rows for resumed prefixes: what they leave of the largest one's rows, and at least 64.
    """
    counts = list(row_counts(max_rows))
    return [Bucket(rows, wide, max(CHUNK, (counts[-1] - rows) // CHUNK * CHUNK) if history else 0)
            for wide in (False, True) for rows in counts]


def choose(pool: RowPool, buckets: list[Bucket]) -> Bucket | None:
    """The first of ``buckets`` (narrow before wide, ascending) that holds the pool, or None."""
    return next((b for b in buckets if b.rows >= pool.n_rows and b.holds(pool)), None)
