"""Stand-ins for the slow parts: a backbone whose hidden states depend on a sequence's tokens alone, at no cost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jev.row_pool import count_rows

BF16_NAN = 0x7FC0


class FakeBackbone:
    """Hidden states are BF16 noise seeded by the token ids, so the same in any company.

    ``gate``, an Event, holds every forward until it is set. ``fail`` maps a forward to an exception or None; ``poison``
    maps a sequence to whether its hidden state is NaN. ``forwards`` lists the number of sequences and rows of each.
    """

    name = "numpy"

    def __init__(self, hidden_size: int = 256, max_rows: int = 8192, seconds: float = 0.0) -> None:
        self.hidden_size, self.max_rows, self.seconds = hidden_size, max_rows, seconds
        self.gate = threading.Event()
        self.gate.set()
        self.fail = lambda sequences: None
        self.poison = lambda sequence: False
        self.forwards: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self.closed = False

    def hidden(self, sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        self.threads.add(threading.get_ident())
        self.forwards.append((len(sequences), count_rows(sequences)))
        assert self.gate.wait(30), "nobody opened the gate"
        time.sleep(self.seconds)
        error = self.fail(sequences)
        if error is not None:
            raise error
        hidden = np.empty((len(sequences), self.hidden_size), np.uint16)
        for row, sequence in zip(hidden, sequences):
            noise = np.random.default_rng(sequence.tolist()).standard_normal(self.hidden_size, np.float32)
            row[:] = BF16_NAN if self.poison(sequence) else noise.view(np.uint32) >> 16
        return hidden, self.forwards[-1][1]

    def close(self) -> None:
        self.closed = True


def demo_export(folder: Path):
    """The demo Export of ``folder/demo``, written there on the first call."""
    from jev.checkpoint import open_export
    from jev.demo_checkpoint import write_demo_checkpoint
    path = folder / "demo"
    if not path.exists():
        write_demo_checkpoint(path)
    return open_export(path)


def request(state: Any = "The parcel is late.", **questions: Any) -> dict[str, Any]:
    """A request; by default with one noul question."""
    return {"state": state, "questions": questions or {"late": {"type": "noul", "instructions": "Is it late?"}}}


def choice(options: int, instructions: str = "Which?") -> dict[str, Any]:
    return {"type": "choice", "instructions": instructions, "criteria": {f"option {i}": None for i in range(options)}}


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def eventually(condition, seconds: float = 10.0) -> None:
    """Wait until ``condition()`` holds; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
