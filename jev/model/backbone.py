"""A loaded model as the engine sees it, whatever computes it."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jev.errors import JevError
from jev.model.ops import Ops, Pool
from jev.model.row_pool import RowPool
from jev.model.weights import Model


class BackendError(JevError, RuntimeError):
    """A backend cannot be used, or a forward pass failed; the message says what is needed or what happened."""


class BackendLost(BackendError):
    """The backend is lost to this process for good; only a new process can use it. What asked for it ends."""


class Bound(NamedTuple):
    """What ``forward`` takes for one pass over a pool, and the pool itself, each last row of it once and ascending."""
    ops: Ops
    model: Model
    pool: Pool
    rows: RowPool


class Backbone(Protocol):
    """A loaded backbone. For one thread at a time, whichever."""
    name: str           # "cuda" or "numpy"
    max_rows: int       # rows that one forward pass takes

    def hidden(self, sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        """(BF16 hidden states uint16 [n, h] of each sequence's last token in the order given, rows computed).

        ``Sequences`` come as they are; arrays of ids (int32 [length]) are put in order first. Raises BackendError.
        """

    def bound(self, pool: RowPool) -> Bound:
        """For a pass operation by operation over this pool, as ``jev.audit`` makes it. Raises BackendError."""

    def close(self) -> None:
        """Release what the backend holds."""
