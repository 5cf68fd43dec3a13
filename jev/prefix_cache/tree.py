"""A radix tree over blocks of 64 token ids: which prefixes are kept, in which places, and which go first.

A forward pass can resume a prefix at a multiple of 64 tokens if two things of it were kept (see ``jev.model.row_pool``):

  - a *page* for each of its blocks: keys and values of the attention layers, for 64 tokens;
  - a *snapshot* at its end: the states of the Gated DeltaNet layers, and the inputs of their convolutions.

Every block in the tree has a page; some have a snapshot as well, and every leaf has one: a page that no snapshot needs is of
no use. Pages and snapshots are numbered places of which there are so many; nothing is allocated.

One forward pass is one *transaction*: it finds what its sequences can resume (and pins it), and reserves places for what it
will keep. Reserved blocks stand in the tree, invisible to others, until ``commit``; ``abort`` takes them out. So what a
failed forward wrote is never read.

Prefixes are compared by their ids, all of them: a block's key is its 64 ids, and it is looked up below its parent. Not for
several threads at a time, but for ``length``.
"""
from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jev_kernels.pool import CHUNK


class Block:
    """64 tokens below ``parent``. depth: blocks from the start up to and including this one; the root has 0.

    page: its place. snapshot: the place of the state after it, or None. pins: transactions that need it to stay.
    owner: the transaction that is about to write it, None once it is there to be used.
    """
    __slots__ = ("parent", "key", "depth", "children", "page", "snapshot", "pins", "owner", "snapshot_owner")

    def __init__(self, parent: Block | None, key: bytes, page: int | None, owner: Transaction | None) -> None:
        self.parent, self.key, self.page, self.owner = parent, key, page, owner
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[bytes, Block] = {}
        self.snapshot: int | None = None
        self.snapshot_owner: Transaction | None = None
        self.pins = 0

    def chain(self) -> list[Block]:
        """The blocks from the start up to this one, the root left out."""
        out: list[Block] = []
        block: Block | None = self
        while block is not None and block.depth:
            out.append(block)
            block = block.parent
        return out[::-1]


@dataclass(frozen=True)
class Resumed:
    """A prefix of ``tokens`` tokens (a multiple of 64) that is kept: its pages in order, and the snapshot at its end."""
    tokens: int
    pages: tuple[int, ...]
    snapshot: int


@dataclass(frozen=True)
class Kept:
    """What a forward pass has to write for one sequence: block numbers (0 is the first 64 tokens) with their places."""
    pages: tuple[tuple[int, int], ...]
    snapshots: tuple[tuple[int, int], ...]


@dataclass
class Counters:
    """Since the start. evictions: snapshots that made room. skipped: boundaries not kept for want of room."""
    evictions: int = 0
    skipped: int = 0


def keys(ids: np.ndarray) -> Iterator[bytes]:
    """The keys of the whole blocks of ``ids``, int32 [length], made as they are asked for: most walks end soon."""
    raw = np.ascontiguousarray(ids, np.int32).tobytes()
    size = 4 * CHUNK
    return (raw[at:at + size] for at in range(0, len(raw) - size + 1, size))


class PrefixTree:
    """Pages and snapshots: how many places of each there are."""

    def __init__(self, pages: int, snapshots: int) -> None:
        if pages < 0 or snapshots < 0:
            raise ValueError(f"a cache cannot have {pages} pages and {snapshots} snapshots")
        self.n_pages, self.n_snapshots = pages, snapshots
        self.counters = Counters()
        self.clear()

    def clear(self) -> None:
        """Forget everything. Transactions under way end without effect."""
        self.root = Block(None, b"", None, None)
        self._free_pages = list(range(self.n_pages))[::-1]
        self._free_snapshots = list(range(self.n_snapshots))[::-1]
        self._recent: OrderedDict[Block, None] = OrderedDict()         # blocks with a snapshot, least recently used first
        self._age = getattr(self, "_age", 0) + 1

    @property
    def pages_in_use(self) -> int:
        return self.n_pages - len(self._free_pages)

    @property
    def snapshots_in_use(self) -> int:
        return self.n_snapshots - len(self._free_snapshots)

    def length(self, ids: np.ndarray) -> int:
        """Tokens of ``ids`` that could be resumed now, less than all of them. Pins nothing and counts nothing: an estimate
        for whoever composes forward passes, from any thread."""
        best, block = 0, self.root
        for key in keys(ids[:len(ids) - 1]):
            found = block.children.get(key)
            if found is None or found.owner is not None:
                break
            block = found
            if block.snapshot is not None and block.snapshot_owner is None:
                best = block.depth * CHUNK
        return best

    def begin(self) -> Transaction:
        return Transaction(self, self._age)

    # What transactions do --------------------------------------------------------------------------------------------

    def _walk(self, ids: np.ndarray, owner: Transaction | None) -> list[Block]:
        """The blocks of the tree along ``ids`` that ``owner`` may see; None sees what is there to be used."""
        found: list[Block] = []
        children = self.root.children
        if not children:
            return found
        for key in keys(ids):
            block = children.get(key)
            if block is None or block.owner is not None and block.owner is not owner:
                break
            found.append(block)
            children = block.children
        return found

    def _touch(self, block: Block) -> None:
        if block in self._recent:
            self._recent.move_to_end(block)

    def _page(self) -> int | None:
        """A free page, made free if need be; None if everything is needed."""
        while not self._free_pages:
            victim = next((b for b in self._recent if not (b.children or b.pins or b.snapshot_owner)), None)
            if victim is None:
                return None
            self._drop_snapshot(victim)
            self.counters.evictions += 1
        return self._free_pages.pop()

    def _snapshot(self) -> int | None:
        """A free snapshot, made free if need be: the least recently used goes, whether or not blocks follow it."""
        if not self._free_snapshots:
            victim = next((b for b in self._recent if not (b.pins or b.snapshot_owner)), None)
            if victim is None:
                return None
            self._drop_snapshot(victim)
            self.counters.evictions += 1
        return self._free_snapshots.pop()

    def _drop_snapshot(self, block: Block) -> None:
        """Free a block's snapshot, and the pages that only it needed."""
        assert block.snapshot is not None
        self._free_snapshots.append(block.snapshot)
        block.snapshot = block.snapshot_owner = None
        del self._recent[block]
        self._prune(block)

    def _prune(self, block: Block) -> None:
        """Take out blocks that nothing needs, from this one upwards."""
        while block.parent is not None and not (block.children or block.pins) and block.snapshot is None:
            assert block.page is not None
            self._free_pages.append(block.page)
            del block.parent.children[block.key]
            block = block.parent


@dataclass(eq=False)
class Transaction:
    """What one forward pass reads and writes. Ends with ``commit`` or ``abort``; neither has an effect after ``clear``.

    settled: tokens. Sequences that share so many with the one that was last given to ``resume`` resume what it does.
    """
    tree: PrefixTree
    age: int
    settled: float = math.inf
    _pinned: list[Block] = field(default_factory=list)
    _tips: list[Block] = field(default_factory=list)            # the deepest block of each chain that was pinned
    _blocks: list[Block] = field(default_factory=list)
    _snapshots: list[Block] = field(default_factory=list)
    _ended: bool = False

    def resume(self, ids: np.ndarray) -> Resumed | None:
        """The longest kept prefix of ``ids`` (int32 [length]) that leaves at least one token to compute, pinned."""
        self._check()
        tree = self.tree
        found = tree._walk(ids[:len(ids) - 1], None)
        last = found[-1] if found else tree.root
        if not last.children:
            self.settled = len(found) * CHUNK
        else:                                           # unless its own end stopped it
            self.settled = (len(found) + 1) * CHUNK if (len(ids) - 1) // CHUNK > len(found) else math.inf
        at = next((b for b in reversed(found) if b.snapshot is not None and b.snapshot_owner is None), None)
        if at is None:
            return None
        chain = found[:at.depth]
        self._pin(chain)
        tree._touch(at)
        assert at.snapshot is not None
        tokens = at.depth * CHUNK
        return Resumed(tokens, tuple(b.page for b in chain if b.page is not None), at.snapshot)

    def keep(self, ids: np.ndarray, boundaries: Iterable[int], resumed: int = 0, most: int = 1 << 30,
             least: int = CHUNK) -> Kept:
        """Reserve what makes ``ids`` resumable at each of ``boundaries`` (tokens, multiples of 64).

        resumed: tokens of ids that this forward does not compute; boundaries at or before it can not be kept by it. Where
        there is no room a boundary is left out, the deepest ones first to be tried. A block of the tree from which ids
        part with what is known, gets a snapshot too: there prefixes fork. most: snapshots to reserve. least: tokens, of
        less than which none is worth it.
        """
        self._check()
        tree, computed = self.tree, resumed // CHUNK
        known = tree._walk(ids, self)
        if any(b % CHUNK for b in boundaries):
            raise ValueError(f"boundaries must be multiples of {CHUNK}")
        wanted = sorted({b // CHUNK for b in boundaries if b >= least and computed < b // CHUNK <= len(ids) // CHUNK})
        if not wanted:
            return Kept((), ())
        fork = known[-1] if known else None
        if fork is not None and computed < fork.depth < wanted[-1] and fork.children and fork.depth * CHUNK >= least:
            wanted = sorted({*wanted, fork.depth})
        names = list(keys(ids[:wanted[-1] * CHUNK]))
        pages: list[tuple[int, int]] = []
        snapshots: list[tuple[int, int]] = []
        self._pin(known)
        for depth in list(reversed(wanted))[:max(most, 0)]:
            added = self._extend(known, names[:depth])
            if added is None:
                tree.counters.skipped += 1
                continue
            pages += added
            block = known[depth - 1]
            if block.snapshot is None:
                place = tree._snapshot()
                if place is None:
                    tree.counters.skipped += 1
                    self._retract(known, len(added), pages)
                    continue
                block.snapshot, block.snapshot_owner = place, self
                tree._recent[block] = None
                self._snapshots.append(block)
                snapshots.append((depth - 1, place))
            tree._touch(block)
        return Kept(tuple(sorted(pages)), tuple(sorted(snapshots)))

    def commit(self) -> None:
        """The forward has ended well: what it wrote is there for others."""
        if self._finish():
            for block in self._blocks:
                block.owner = None
            for block in self._snapshots:
                block.snapshot_owner = None
            self._unpin()

    def abort(self) -> None:
        """Nothing that the forward wrote is to be used. What it read stays."""
        if self._finish():
            for block in self._snapshots:               # pinned, as all that this transaction reserved
                self.tree._drop_snapshot(block)
            self._unpin()

    # ------------------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._ended or self.age != self.tree._age:
            raise RuntimeError("this transaction has ended")

    def _finish(self) -> bool:
        """Whether there is something to end: not twice, and not after the tree was cleared."""
        first, self._ended = not self._ended, True
        return first and self.age == self.tree._age

    def _pin(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.pins += 1
        if blocks:
            self._pinned += blocks
            self._tips.append(blocks[-1])

    def _unpin(self) -> None:
        for block in self._pinned:
            block.pins -= 1
        for block in self._tips:                        # what is above a block is needed as long as the block is
            if block.parent is not None and block.parent.children.get(block.key) is block:
                self.tree._prune(block)

    def _extend(self, known: list[Block], names: list[bytes]) -> list[tuple[int, int]] | None:
        """Blocks for ``names`` below ``known``, which grows by them; (block number, page) of each, or None without room."""
        added: list[tuple[int, int]] = []
        block = known[-1] if known else self.tree.root
        for at in range(len(known), len(names)):
            page = self.tree._page()
            if page is None:
                self._retract(known, len(added), added)
                return None
            below = Block(block, names[at], page, self)
            below.pins = 1
            block.children[below.key] = block = below
            self._blocks.append(block)
            self._pinned.append(block)
            known.append(block)
            added.append((at, page))
        if added:
            self._tips.append(block)
        return added

    def _retract(self, known: list[Block], n: int, pages: list[tuple[int, int]]) -> None:
        """Give back the last ``n`` blocks of ``known``, which this call had reserved."""
        for _ in range(n):
            block = known.pop()
            pages.remove((len(known), block.page))          # type: ignore[arg-type]
            block.pins -= 1
            self._pinned.remove(block)
            self._blocks.remove(block)
            self.tree._prune(block)
