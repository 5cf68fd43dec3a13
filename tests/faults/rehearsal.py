"""`jev` with one more pinned checkpoint: the tiny one of tests/export_inputs.py, for following the recipe with it.

    python -m tests.faults.rehearsal inputs FOLDER      writes FOLDER/base and FOLDER/checkpoint
    python -m tests.faults.rehearsal export|check|serve|frontend ...

Where torch and transformers are not installed, the three steps of the export that need them are done in NumPy.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np

from jev import checkpoint, cli, export
from jev.demo_checkpoint import CHAT_PREFIX, CHAT_SUFFIX
from tests.export_inputs import CONFIG, SOURCE, write_base, write_checkpoint

WEIGHT, BIAS = [0.25, -0.125] * (CONFIG.hidden_size // 2), 0.5


def inputs(folder: Path) -> None:
    write_base(folder / "base")
    write_checkpoint(folder / "checkpoint")
    if importlib.util.find_spec("torch") is None:
        (folder / "checkpoint/head.pt").write_bytes(b"stands for the head, which takes torch to write and to read")
    else:
        import torch
        torch.save({"weight": torch.tensor([WEIGHT]), "bias": torch.tensor([BIAS])}, folder / "checkpoint/head.pt")


def main(argv: list[str]) -> int:
    checkpoint.PINNED = (*checkpoint.PINNED, SOURCE)
    if argv[0] == "inputs":
        inputs(Path(argv[1]))
        return 0
    if importlib.util.find_spec("torch") is None:
        export.torch_matmul = np.matmul
        export.read_head = lambda path, width: (WEIGHT, BIAS)
    if importlib.util.find_spec("transformers") is None:
        export.chat_frame = lambda base: (CHAT_PREFIX, CHAT_SUFFIX)
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
