"""One forward pass with a prefix cache: what it wrote is there for others only if it ended well."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from jev.model.sequences import Sequences
from jev.prefix_cache.plan import Plan, plan
from jev.prefix_cache.tree import PrefixTree
from jev_kernels.pool import PADDING, TAPS

MOST_RESUMED = PADDING // TAPS       # prefixes of a forward pass: their tails have room for so many
MOST_KEPT = 24               # snapshots of a forward pass: they take slots of the delta rule, which branches need too


class Cache(Protocol):
    """The memory of a backend's prefix cache."""
    tree: PrefixTree


class Pass:
    """plan: what is resumed and kept. ``done`` has to be told the hidden states."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.finite = False

    def done(self, hidden: np.ndarray) -> None:
        """hidden: BF16 (uint16) or floats. Where one is not finite, nothing of this pass may be used again."""
        if hidden.dtype == np.uint16:
            self.finite = not ((hidden & 0x7F80) == 0x7F80).any()
        else:
            self.finite = bool(np.isfinite(hidden).all())


@contextmanager
def forward_pass(cache: Cache, sequences: Sequences, keep: bool = True) -> Iterator[Pass]:
    """The plan of a forward pass over ``sequences``, which happens inside the block. keep: False only resumes.

    An exception leaves the cache as it was; whoever knows that the device has failed clears it.
    """
    transaction = cache.tree.begin()
    try:
        made = Pass(plan(transaction, sequences, MOST_RESUMED, MOST_KEPT if keep else 0))
        yield made
    except BaseException:
        transaction.abort()
        raise
    if made.finite:
        transaction.commit()
    else:
        transaction.abort()
