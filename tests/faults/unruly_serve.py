"""`jev serve` whose backbone does as it is told by files in a folder; what it wraps is the real one.

    python -m tests.faults.unruly_serve FOLDER serve --model EXPORT ...

Before each forward it looks for: `hold` (waits until the file is gone, with a file `held` there meanwhile), and then,
each once, `raise` (an exception with the content of the file as its message), `memory` (out of device memory), `nan`
(hidden states of NaN).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import jev.cli
import jev.model.backbone
import jev.model.backends
from jev.model.backbone import Computed

BF16_NAN = 0x7FC0


class UnrulyBackbone:
    """Has the surface of jev.model.backbone.Backbone."""

    def __init__(self, backbone: jev.model.backbone.Backbone, folder: Path) -> None:
        self.backbone = backbone
        self.folder = folder
        self.name, self.max_rows = backbone.name, backbone.max_rows

    def _told(self, what: str) -> str | None:
        """The content of the file `what`, which is gone after this, or None."""
        path = self.folder / what
        if not path.exists():
            return None
        content = path.read_text()
        path.unlink()
        return content

    def hidden(self, sequences: Sequence[np.ndarray]) -> Computed:
        if (self.folder / "hold").exists():
            (self.folder / "held").touch()
            while (self.folder / "hold").exists():
                time.sleep(0.005)
            (self.folder / "held").unlink()
        if (message := self._told("raise")) is not None:
            raise RuntimeError(message)
        if self._told("memory") is not None:
            raise jev.model.backbone.BackendError("out of device memory: 64 MiB wanted")
        hidden, rows, resumed = self.backbone.hidden(sequences)
        if self._told("nan") is not None:
            hidden = np.full_like(hidden, BF16_NAN)
        return Computed(hidden, rows, resumed)

    def resumable(self, ids: np.ndarray) -> int:
        return self.backbone.resumable(ids)

    def close(self) -> None:
        self.backbone.close()


def main() -> int:
    folder = Path(sys.argv[1])
    opened = jev.model.backends.open_backbone
    jev.model.backends.open_backbone = lambda *args, **named: UnrulyBackbone(opened(*args, **named), folder)
    return jev.cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
