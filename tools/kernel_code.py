"""What the compiler makes of every kernel, without a GPU: to see that a change of source changed no machine code, or what.

    python -m tools.kernel_code before.json                    # every kernel: digest, instructions, registers, spills
    ... change a kernel ...
    python -m tools.kernel_code after.json --against before.json [--only attention]

Two builds with equal digests are the same instructions, so they give the same bits in the same time. Prints a line for
each kernel that differs and exits with 1 if one does. A few seconds a kernel; not under the simulator.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import sys
from pathlib import Path

INSTRUCTION = 16                        # bytes, since sm_70


def text_section(cubin: bytes) -> bytes:
    """The instructions in machine code: the section .text.<kernel> of a 64-bit ELF file."""
    table, = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + n * size) for n in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length in headers:
        start = strings + name
        if cubin[start:start + 6] == b".text.":
            return cubin[offset:offset + length]
    raise ValueError("no kernel in the machine code")


def describe(kernel, cc: tuple) -> dict:
    """{digest, instructions, registers, spills} of a kernel for a compute capability."""
    from jev_kernels.runtime import cubin
    code, log = cubin.assemble(kernel.compile_ltoir(cc), kernel.name, cc, verbose=True)
    text = text_section(code)
    return {"digest": hashlib.sha256(text).hexdigest()[:16], "instructions": len(text) // INSTRUCTION,
            "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
            "spills": max(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--against", type=Path, help="JSON file of another build to compare with")
    parser.add_argument("--only", default="", help="kernels with this in their name")
    args = parser.parse_args()
    from tests.compiled.registered import kernels
    found = {}
    for name, kernel, capabilities, *_ in kernels():
        for cc in capabilities:
            key = f"{name}-sm_{''.join(map(str, cc))}"
            if re.search(args.only, key):
                found[key] = describe(kernel, cc)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.against is None:
        return 0
    before = {k: v for k, v in json.loads(args.against.read_text()).items() if re.search(args.only, k)}
    changed = [key for key in sorted(before.keys() | found.keys()) if before.get(key) != found.get(key)]
    for key in changed:
        old, new = before.get(key, {}), found.get(key, {})
        print(f"{key}: " + (", ".join(f"{field} {old.get(field)} -> {new.get(field)}" for field in (new or old)
                                      if old.get(field) != new.get(field))))
    print(f"{len(found)} kernels, {len(changed)} differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
