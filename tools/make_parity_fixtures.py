"""Write tests/data/transformers_<config>.npz: what Transformers gives on the tiny seeded models of tests/models.py.

    python tools/make_parity_fixtures.py        (needs torch and transformers: the environment of `make parity`)

Each file holds float32 [3 * positions, h] of the float32 run for the first seeds, and uint16 (BF16) of the BF16 run for
every seed, at the positions of tests/yardstick.py. `make test` compares with these; `make parity` compares live.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.tool import Needed  # noqa: E402

FLOAT32_SEEDS = 3


def main() -> None:
    with Needed() as needed:
        import torch
        import transformers

        from tests import parity_reference
    needed.parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    from jev_kernels import bf16
    from tests import models, yardstick
    for name in models.CONFIGS:
        c = models.config(name)
        exact, rounded = [], []
        for seed in yardstick.SEEDS:
            tensors = models.tensors(c, seed)
            ids = yardstick.sequences(c, seed)
            for dtype, out in ((torch.float32, exact), (torch.bfloat16, rounded)):
                if dtype is torch.float32 and seed >= FLOAT32_SEEDS:
                    continue
                model = parity_reference.build(c, tensors, dtype)
                out.append(np.concatenate([parity_reference.all_hidden(model, s)[yardstick.POSITIONS] for s in ids]))
        path = ROOT / "tests" / "data" / f"transformers_{name}.npz"
        np.savez_compressed(path, float32=np.array(exact, np.float32), bf16=bf16.from_float64(np.array(rounded)),
                            versions=np.array([transformers.__version__, torch.__version__]))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
