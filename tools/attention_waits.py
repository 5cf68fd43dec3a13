"""Says who waits for whom if the Hopper attention ever stops, instead of hanging with it.

    python tools/attention_waits.py --rows 107,139,2334,3399 --launches 200

Every wait at an mbarrier is replaced by one that gives up after --milliseconds: it notes block, warp, barrier, parity
in device memory and goes on, as do all others of its block or cluster from then on. So the kernel ends (with wrong
results) and the notes show the ring or hand-over that stopped. Without a stop, prints the time of a launch and checks
that every launch gave the same bits.
"""
from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jev_kernels.attention import hopper as hopper_attention  # noqa: E402
from jev_kernels.ptx.device import i32, ptx, void  # noqa: E402
from jev_kernels.runtime import cubin, device  # noqa: E402
from tools.tool import Needed  # noqa: E402

with Needed() as needed:
    import torch

    from tests.gpu.attention_problem import Problem, stream, tokens

MOST = 8192                          # notes that are kept
BARRIERS = ("k_full", "k_free", "v_full", "v_free", "q_full", "q_read", "g_full", "q_free")      # two of each, 8 bytes
WAIT = """{{ .reg .pred p, q; .reg .b32 t, c, n; .reg .b64 g, a, start, now; mov.u64 start, %globaltimer;
W: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
@p bra D;
mov.u64 g, {notes};
mov.u32 c, %ctaid.x; div.u32 c, c, {cluster}; add.u32 c, c, 1;
ld.volatile.global.u32 t, [g]; setp.ne.u32 q, t, 0; @q bra R;
mov.u64 now, %globaltimer; sub.u64 now, now, start; setp.lt.u64 q, now, {patience}; @q bra W;
atom.global.cas.b32 t, [g], 0, c; setp.eq.u32 q, t, 0; @q mov.u32 t, c;
R: setp.ne.u32 q, t, c; @q bra D;
atom.global.add.u32 n, [g+4], 1; setp.ge.u32 q, n, {most}; @q bra D;
mad.wide.u32 a, n, 16, g; mov.u32 t, %tid.x; mov.u32 c, %ctaid.x; st.global.v4.b32 [a+16], {{c, t, $0, $1}};
D: }}"""


def watched(cluster: int, milliseconds: float):
    """Make kernels whose waits give up; the notes: flag, count, 0, 0, then (block, thread, barrier, parity) each."""
    notes = torch.zeros(4 * (MOST + 1), dtype=torch.int32, device="cuda")
    text = WAIT.format(notes=notes.data_ptr(), cluster=cluster, patience=int(milliseconds * 1e6), most=MOST)
    cubin.ENABLED = False                             # files of kernels do not know of this
    hopper_attention.mbar_wait = hopper_attention.mbar_wait_covered = ptx("mbar_wait", void, (i32, i32), text, "r,r")
    hopper_attention.make_kernel.cache_clear()
    return notes


def report(notes) -> None:
    """Who waits at which barrier: a line for each block, warp, barrier and parity."""
    found = notes.cpu().numpy()
    lines = Counter((int(block), int(thread) // 32, f"{BARRIERS[at % 1024 // 16]}[{at % 16 // 8}]", int(parity))
                    for block, thread, at, parity in found[4:].reshape(-1, 4)[:min(found[1], MOST)])
    for (block, warp, barrier, parity), lanes in lines.items():
        print(f"block {block:4d} warp {warp:2d} waits for {barrier}, parity {parity} ({lanes} lanes)")


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,40,64,99,107,139,256,936,2048,2334,3399,4097")
    parser.add_argument("--launches", type=int, default=100)
    parser.add_argument("--milliseconds", type=float, default=30.0, help="patience of a wait")
    options = needed.parse(parser, arguments, gpu=True)
    device.find_device()
    problems = {rows: Problem(tokens(int(rows))) for rows in options.rows.split(",")}
    problems["100 options of 10 over 1500"] = Problem(tokens(*[10] * 100, shared=1500))
    for cluster in (1, 2):
        notes = watched(cluster, options.milliseconds)
        for name, problem in problems.items():
            plan = problem.plan(f"hopper{cluster}")
            plan(stream())
            torch.cuda.synchronize()
            first = problem.out.clone()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(options.launches):
                plan(stream())
            end.record()
            torch.cuda.synchronize()
            same = torch.equal(first, problem.out)
            stopped = int(notes[0]) != 0
            print(f"clusters of {cluster}, {name}: {start.elapsed_time(end) / options.launches * 1e3:.1f} us a launch, "
                  f"{'the same bits' if same else 'DIFFERENT BITS'}{', STOPPED' if stopped else ''}", flush=True)
            if stopped:
                return report(notes)


if __name__ == "__main__":
    main()
