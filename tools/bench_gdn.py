"""Times the gated delta rule: single sequences and trees, both kernels together and each alone, error to float64.

    python tools/bench_gdn.py --json gdn.json

Needs torch. A figure is the median over replays of a CUDA graph of ten calls under programmatic dependent launch, in
us a call; FLA's Triton kernel runs beside it where it can be imported. rows: unique rows, what a forward pass computes;
chunks: what of them the branching makes.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jev_kernels.gdn import (
    hopper as hopper_gdn,  # noqa: E402
)
from jev_kernels.pool import RUNS  # noqa: E402
from jev_kernels.runtime import device  # noqa: E402
from tools.tool import Needed  # noqa: E402

with Needed() as needed:
    import torch

    from tests.gpu.gdn_problem import Problem, capture, error, reference

HEADS = {"27b": (16, 48), "9b": (16, 32)}
LENGTHS = (107, 250, 512, 936, 2334, 3399)


def options(prefix: int, n: int, tail: int) -> list[np.ndarray]:
    """n sequences over one prefix, with tails of 1 to 2 tail - 1 tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 1000, prefix)
    tails = [rng.integers(0, 1000, int(rng.integers(0, 2 * tail - 1))) for _ in range(n)]
    return [np.concatenate([shared, [2000 + i], more]) for i, more in enumerate(tails)]


def cases(lengths) -> dict[str, list[np.ndarray]]:
    out = {str(n): [np.arange(n)] for n in lengths}
    out["5 options of 8 over 900"] = options(900, 5, 8)
    out["8 questions of 400"] = [np.arange(400) + 1000 * i for i in range(8)]
    out["255 options of 10 over 300"] = options(300, 255, 10)
    out["255 options of 10 over 3000"] = options(3000, 255, 10)
    return out


def timed(call, n: int = 10, repeats: int = 9) -> float:
    """Median us a call."""
    graph, out = capture(call, n), []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        out.append(start.elapsed_time(end) / n * 1e3)
    return sorted(out)[repeats // 2]


def alone(problem: Problem, which: int) -> float:
    """us of one of the two Hopper kernels, run by itself on what the other has left.

    Over one sequence they wait for each other. A second run without chunks keeps them from that.
    """
    real, counts, runs = hopper_gdn.kernels, problem.metadata[0].tensor, problem.metadata[4].tensor
    n_runs = int(counts[RUNS])
    runs[n_runs], counts[RUNS] = 0, n_runs + 1
    try:
        hopper_gdn.kernels = lambda *heads: tuple(
            kernel if i == which else lambda *args, **options: None for i, kernel in enumerate(real(*heads)))
        return timed(problem.launch)
    finally:
        hopper_gdn.kernels, counts[RUNS] = real, n_runs


def fla(problem: Problem) -> float | None:
    """us of FLA's kernel on one sequence, or None."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    q, k, v, g, beta = (x[None] for x in problem.data)
    with torch.inference_mode():
        return timed(lambda: chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True))


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=HEADS, default="27b")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--portable", action="store_true", help="also time the portable kernel")
    parser.add_argument("--json", help="also write everything here")
    options_ = needed.parse(parser, arguments, gpu=True)
    heads = HEADS[options_.model]
    hopper = device.on_hopper()
    print(f"{torch.cuda.get_device_name()}, {heads[0]} key heads, {heads[1]} value heads; us a call")
    titles = (("case", 28), ("rows", 5), ("chunks", 6), ("both", 7), ("prepare", 7), ("scan", 7), ("portable", 8),
              ("FLA", 7))
    print(*(title.rjust(width) for title, width in titles), " error", flush=True)
    results = []
    for name, sequences in cases([int(n) for n in options_.lengths.split(",") if n]).items():
        p = Problem(sequences, key_heads=heads[0], value_heads=heads[1])
        row = {"case": name, "rows": p.pool.n_rows, "chunks": len(p.pool.chunk_rows), "error": error(
            p.run(), reference(p.pool, *p.data)), "both": timed(p.launch)}
        row["prepare"], row["scan"] = (alone(p, 0), alone(p, 1)) if hopper else (None, None)
        row["portable"] = None
        if options_.portable:
            other = Problem(sequences, data=p.data, key_heads=heads[0], value_heads=heads[1], hopper=False)
            row["portable"] = timed(other.launch, 2, 3)
        row["FLA"] = fla(p) if len(sequences) == 1 else None
        results.append(row)
        times = " ".join(f"{row[key]:{width}.1f}" if row[key] is not None else "-".rjust(width)
                         for key, width in titles[3:])
        print(f"{name:>28} {row['rows']:5} {row['chunks']:6} {times}  {row['error']:.2e}", flush=True)
    if options_.json:
        report = {"gpu": torch.cuda.get_device_name(), "heads": heads, "rows": results}
        Path(options_.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
