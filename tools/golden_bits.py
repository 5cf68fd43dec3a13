"""Golden bits: what the simulated kernels give for fixed inputs (tests/kernels/golden.py), kept as digests of rows.

    python -m tools.golden_bits                      # what differs from tests/data/golden_bits.json; 1 if anything does
    python -m tools.golden_bits --only attention     # some cases
    python -m tools.golden_bits --accept             # write what there is now: a change of bits that is meant

A change of bits is never an accident that may stay: say in the commit which kernel's arithmetic changed and why.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

if "numba" not in sys.modules:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "golden_bits.json"


def digests(array) -> dict:
    """{shape, dtype, rows}: a digest of each entry of the first dimension, 8 hexadecimal digits, joined."""
    import numpy as np
    rows = [hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest()[:8] for row in array]
    return {"shape": list(array.shape), "dtype": str(array.dtype), "rows": " ".join(rows)}


def run(case) -> list[dict]:
    """The digests of a case's outputs."""
    return [digests(array) for array in case()]


def differences(case: str, kept: list[dict] | None, found: list[dict]) -> list[str]:
    """A line for each output of a case that differs from what is kept."""
    if kept is None:
        return [f"{case}: new"]
    lines = [f"{case}: {len(kept)} outputs are now {len(found)}"] if len(kept) != len(found) else []
    for n, (old, new) in enumerate(zip(kept, found)):
        if (old["shape"], old["dtype"]) != (new["shape"], new["dtype"]):
            lines.append(f"{case}, output {n}: {old['dtype']} {old['shape']} is now {new['dtype']} {new['shape']}")
        elif old["rows"] != new["rows"]:
            pairs = zip(old["rows"].split(), new["rows"].split())
            changed = [i for i, (a, b) in enumerate(pairs) if a != b]
            shown = ", ".join(map(str, changed[:8])) + (", ..." if len(changed) > 8 else "")
            lines.append(f"{case}, output {n}: {len(changed)} of {new['shape'][0]} rows differ: {shown}")
    return lines


def read() -> dict:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--accept", action="store_true", help="keep what there is now")
    parser.add_argument("--seconds", action="store_true", help="say how long each case took")
    options = parser.parse_args(arguments)
    from tests.kernels.golden import CASES
    kept, changed = read(), []
    for name, case in CASES.items():
        if options.only in name:
            started = time.perf_counter()
            found = run(case)
            changed += differences(name, kept.get(name), found)
            kept[name] = found
            if options.seconds:
                print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    for name in sorted(kept.keys() - CASES.keys()):
        changed.append(f"{name}: gone")
        del kept[name]
    print("\n".join(changed) or "every bit is as it was")
    if options.accept:
        FILE.write_text(json.dumps({name: kept[name] for name in CASES if name in kept}, indent=1) + "\n")
        print(f"wrote {FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE}")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
