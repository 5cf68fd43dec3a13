"""The prefix cache: what requests take with it and without it, on one GPU in one run, the same synthetic weights and ids.

    python tools/bench_cache.py --model 27b --json cache.json --plot cache.png

Traces, as people ask:
    agent         transcripts that grow from 300 to 3,400 tokens in steps, two questions a step, interleaved
    document      documents of 3,000 tokens, many different questions each, shuffled
    hit           3,399 tokens seen before, one new question of 60 tokens
    choice        64 options over a document of 3,000 tokens seen before
    never         the lengths of the 74-request workload, nothing repeated; cache on and off by turns
    too much      documents that need twice the cache, one after the other, twice

A time is that of one call of the backend (``hidden``), from sequences to hidden states on the host. "floor": least time of
the rows that had to be computed, see tools/bench_forward.py. With --plot also latency against the transcript's step.
"""
from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jev.model.cuda_backbone import CudaBackbone  # noqa: E402
from jev.model.sequences import ID, Sequences  # noqa: E402
from jev_kernels.runtime.device import find_device  # noqa: E402
from tools import synthetic  # noqa: E402
from tools.bench_forward import floors, plot, synthetic_backbone  # noqa: E402
from tools.tool import Needed  # noqa: E402

LENGTHS = ROOT / "tests/data/h200_74_lengths.csv"
QUESTION = 60                         # tokens behind the state
STEPS, FIRST, LAST = 20, 300, 3400    # of a transcript
GOALS = {"agent": 0.25, "document": 0.15, "choice": 0.35, "never": 1.01, "too much": 1.0}


class Traces:
    """Requests over random ids; every call makes new ones."""

    def __init__(self, vocabulary: int, seed: int):
        self.rng, self.vocabulary = np.random.default_rng(seed), vocabulary

    def tokens(self, n: int) -> np.ndarray:
        return self.rng.integers(0, self.vocabulary, n).astype(np.int32)

    def request(self, state: np.ndarray, candidates: int = 1, tail: int = 0) -> Sequences:
        """One question: candidates that share its text, and end in ``tail`` tokens of their own."""
        question = self.tokens(QUESTION - (tail if candidates > 1 else 0))
        own = [np.concatenate([state, question, self.tokens(tail if candidates > 1 else 0)]) for _ in range(candidates)]
        return Sequences.front_coded([0] * candidates, [s.astype(ID).tobytes() for s in own], ID.itemsize * len(state))

    def agent(self, transcripts: int) -> list[tuple[int, Sequences]]:
        """(step, request), a step of each transcript after the other."""
        texts = [self.tokens(LAST) for _ in range(transcripts)]
        ends = np.linspace(FIRST, LAST - 2 * QUESTION, STEPS).astype(int)
        return [(step, self.request(text[:end])) for step, end in enumerate(ends) for text in texts for _ in range(2)]

    def documents(self, n: int, questions: int, length: int = 3000) -> list[Sequences]:
        texts = [self.tokens(length) for _ in range(n)]
        asked = [self.request(text) for text in texts for _ in range(questions)]
        return [asked[i] for i in self.rng.permutation(len(asked))]


def timed(backbone: CudaBackbone, requests: Iterable[Sequences]) -> list[tuple[float, int, int]]:
    """(milliseconds, rows computed, tokens resumed) of each."""
    out = []
    for request in requests:
        started = time.perf_counter()
        found = backbone.hidden(request)
        out.append(((time.perf_counter() - started) * 1e3, found.rows, int(found.resumed.max())))
    return out


def compare(on: CudaBackbone, off: CudaBackbone, requests: list[Sequences], seen: list[Sequences] = ()) -> dict:
    """One trace with an empty cache, after ``seen``; graphs of what both need are there before."""
    timed(off, requests)                            # captures graphs, as does the first pass with the cache
    without = timed(off, requests)
    on.cache.tree.clear()
    timed(on, seen)
    first = timed(on, requests)
    on.cache.tree.clear()
    timed(on, seen)
    found = timed(on, requests)
    assert [r[1:] for r in first] == [r[1:] for r in found], "two runs of a trace differ"
    return summary(on, without, found)


def summary(on: CudaBackbone, without, found) -> dict:
    a, b = (np.array([ms for ms, *_ in times]) for times in (without, found))
    rows = np.array([n for _, n, _ in found])
    floor = np.mean([sum(floors(on.config, max(int(n), 1)).values()) for n in rows])
    return {"requests": len(b), "hits": float(np.mean([resumed > 0 for *_, resumed in found])), "rows": float(rows.mean()),
            "off": statistics(a), "on": statistics(b), "ratio": float(b.mean() / a.mean()), "floor_ms": float(floor),
            "ms_on": b.tolist(), "ms_off": a.tolist()}


def statistics(ms: np.ndarray) -> dict[str, float]:
    return {"mean": float(ms.mean()), "p50": float(np.median(ms)), "p95": float(np.percentile(ms, 95))}


def by_turns(on: CudaBackbone, off: CudaBackbone, traces: Traces, rounds: int) -> dict:
    """The 74 lengths, new ids every time: on and off one after the other, in changing order."""
    with open(LENGTHS) as file:
        lengths = [int(row["input_tokens"]) for row in csv.DictReader(file)]
    for backbone in (on, off):                      # graphs of all lengths
        timed(backbone, [traces.request(traces.tokens(max(n - QUESTION, 1))) for n in lengths])
    without, found = [], []
    for turn in range(rounds):
        for i, n in enumerate(lengths):
            for backbone, out in ((on, found), (off, without))[::1 if (turn + i) % 2 else -1]:
                out += timed(backbone, [traces.request(traces.tokens(max(n - QUESTION, 1)))])
    return summary(on, without, found)


def line(name: str, r: dict) -> str:
    goal = f"{GOALS[name]:.2f}" if name in GOALS else ""
    off, on = r["off"], r["on"]
    return (f"{name:<10}{r['requests']:>9}{r['hits']:>7.0%}{r['rows']:>8.0f}{off['mean']:>9.1f}{off['p50']:>8.1f}"
            f"{off['p95']:>8.1f}{on['mean']:>9.1f}{on['p50']:>8.1f}{on['p95']:>8.1f}{r['floor_ms']:>8.1f}{r['ratio']:>8.3f}{goal:>6}")


def plot_steps(path: str, agent: list[tuple[int, Sequences]], r: dict) -> None:
    """Draw the mean latency of each step of the transcripts, with the cache and without."""
    steps, at = np.array([step for step, _ in agent]), list(range(STEPS))
    lines = {label: (style, at, [np.array(r[name])[steps == s].mean() for s in at])
             for name, label, style in (("ms_off", "without", "--"), ("ms_on", "with the cache", "-"))}
    plot(path, "ms a request", lines, xlabel="step of the transcript", xscale="linear", yscale="linear", ylim=(0, None))


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=synthetic.CONFIGS, default="27b")
    parser.add_argument("--layers", type=int, help="cut the model to so many layers")
    parser.add_argument("--cache-gb", type=float, default=16.0)
    parser.add_argument("--transcripts", type=int, default=20)
    parser.add_argument("--questions", type=int, default=20, help="of each document")
    parser.add_argument("--rounds", type=int, default=3, help="of the 74 lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="traces, separated by commas")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--plot", help="draw latency against step here (needs matplotlib)")
    args = Needed(plot="matplotlib").parse(parser, argv, gpu=True)
    config = synthetic.config(args.model, args.layers)
    on = synthetic_backbone(config, ready_rows=0, cache_gb=args.cache_gb)
    off = CudaBackbone.with_weights(config, find_device(), lambda specs: on.weights, ready_rows=0)
    traces = Traces(config.vocab_size, args.seed)
    wanted = args.only.split(",") if args.only else ["hit", "choice", "document", "agent", "too much", "never"]
    results: dict[str, dict] = {}
    print(f"{'':<10}{'requests':>9}{'hits':>7}{'rows':>8}{'off mean':>9}{'p50':>8}{'p95':>8}{'on mean':>9}{'p50':>8}"
          f"{'p95':>8}{'floor':>8}{'ratio':>8}{'goal':>6}")
    agent = traces.agent(args.transcripts)
    for name in wanted:
        if name == "hit":
            text = traces.tokens(3399)
            results[name] = compare(on, off, [traces.request(text) for _ in range(10)], [traces.request(text)])
        elif name == "choice":
            text = traces.tokens(3000)
            results[name] = compare(on, off, [traces.request(text, 64, 10) for _ in range(10)], [traces.request(text)])
        elif name == "document":
            results[name] = compare(on, off, traces.documents(8, args.questions))
        elif name == "agent":
            results[name] = compare(on, off, [request for _, request in agent])
            if args.plot:
                plot_steps(args.plot, agent, results[name])
        elif name == "too much":
            texts = [traces.tokens(1000) for _ in range(2 * on.cache.tree.n_snapshots)]
            results[name] = compare(on, off, [traces.request(text) for _ in range(2) for text in texts])
        elif name == "never":
            results[name] = by_turns(on, off, traces, args.rounds)
        print(line(name, results[name]), flush=True)
    print(f"cache: {on.cache}; {on.cache.tree.counters}")
    if args.json:
        Path(args.json).write_text(json.dumps({"device": str(on.device), "model": args.model, "layers": config.num_layers,
                                               "cache_gb": args.cache_gb, "traces": results}, indent=1))


if __name__ == "__main__":
    main()
