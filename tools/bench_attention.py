"""Times gated attention over the row pool against PyTorch's flash and cuDNN kernels, in one run and in turns.

    python tools/bench_attention.py --model 27b --json attention.json

Single sequences first: our kernels with the gate, PyTorch's without one. Then trees (a choice of many options, several
requests at once), each against a plain forward over one sequence of as many rows. us per launch: the median of replays
of a CUDA graph of 20 launches, contenders in turns, because from about 2000 rows on the power limit decides and what
ran just before matters. ``pdl``: the same chain under programmatic dependent launch.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jev_kernels.runtime import device  # noqa: E402
from tools.tool import Needed  # noqa: E402

with Needed() as needed:
    import torch
    import torch.nn.attention as torch_attention

    from tests.gpu.attention_problem import D, Problem, relative_error, stream, tokens

MODELS = {"27b": (24, 4), "9b": (16, 4)}
TREES = {
    "255 options of 10 over 3000": lambda: tokens(*[10] * 255, shared=3000),
    "255 options of 4 over 500": lambda: tokens(*[4] * 255, shared=500),
    "20 options of 30 over 900": lambda: tokens(*[30] * 20, shared=900),
    "8 questions of 400": lambda: tokens(*[400] * 8),
    "16 requests of 107": lambda: tokens(*[107] * 16),
    "4 requests of 936": lambda: tokens(*[936] * 4),
}


def graph_of(call, launches: int):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    graph.replay()
    return graph


def timed(calls: dict, launches: int = 20, rounds: int = 9) -> dict:
    """Median microseconds a launch of each call."""
    graphs, times = {name: graph_of(call, launches) for name, call in calls.items()}, {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            times[name].append(a.elapsed_time(b) / launches * 1e3)
    return {name: sorted(t)[rounds // 2] for name, t in times.items()}


def ours(problem: Problem, kinds) -> dict:
    """Calls of our kernels; each keeps its plan."""
    calls = {}
    for kind in kinds:
        plan = problem.plan(kind.removesuffix(" pdl").removesuffix(" ungated"), gated="ungated" not in kind)
        calls[kind] = lambda plan=plan, pdl=kind.endswith("pdl"): plan(stream(), pdl=pdl)
    return calls


def peers(problem: Problem) -> dict:
    """PyTorch's kernels over the same single sequence, without the gate."""
    def heads(name, n):
        return problem.part(name)[:problem.rows].unflatten(1, (n, D)).transpose(0, 1).unsqueeze(0)
    q, k, v = heads("q", problem.heads), heads("k", problem.kv_heads), heads("v", problem.kv_heads)
    k_all, v_all = (x.repeat_interleave(problem.heads // problem.kv_heads, 1) for x in (k, v))
    sdpa, backend = torch.nn.functional.scaled_dot_product_attention, torch_attention.SDPBackend

    def run(which, *args, **more):
        with torch_attention.sdpa_kernel(which):
            return sdpa(*args, is_causal=True, scale=D ** -0.5, **more)
    return {"torch flash": lambda: run(backend.FLASH_ATTENTION, q, k, v, enable_gqa=True),
            "cuDNN": lambda: run(backend.CUDNN_ATTENTION, q, k_all, v_all)}


def table(title: str, results: dict) -> None:
    """results: {row: {column: us}}"""
    columns = list(dict.fromkeys(c for r in results.values() for c in r))
    print(f"\n{title:<30}" + "".join(f"{c:>16}" for c in columns), flush=True)
    for name, r in results.items():
        print(f"{name:<30}" + "".join(f"{r[c]:>16.1f}" if c in r else " " * 16 for c in columns), flush=True)


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="27b")
    parser.add_argument("--rows", default="1,64,107,139,256,512,936,2334,3399")
    parser.add_argument("--json", help="also write everything here")
    parser.add_argument("--quick", action="store_true", help="without the peers and the portable kernel")
    options = needed.parse(parser, arguments, gpu=True)
    gpu = device.find_device()
    heads, kv_heads = MODELS[options.model]
    kinds = ["hopper1", "hopper2", "hopper1 pdl", "hopper1 ungated"] if gpu.hopper else []
    if not options.quick:
        kinds.append("portable")
    print(f"{gpu}; {options.model}: {heads} query and {kv_heads} KV heads", flush=True)
    singles, trees = {}, {}
    for rows in map(int, options.rows.split(",")):
        problem = Problem(tokens(rows), heads=heads, kv_heads=kv_heads)
        calls = ours(problem, kinds) | ({} if options.quick or rows == 1 else peers(problem))
        singles[str(rows)] = timed(calls)
    table("one sequence, us", singles)
    for name, make in TREES.items():
        problem = Problem(make(), heads=heads, kv_heads=kv_heads)
        got = problem.run(kinds[0])
        plain = Problem(tokens(problem.rows), heads=heads, kv_heads=kv_heads)
        calls = ours(problem, kinds[:2])
        calls["plain, as many rows"] = ours(plain, kinds[:1])[kinds[0]]
        trees[f"{name} ({problem.rows} rows)"] = timed(calls, launches=5)
        print(f"{name}: error {relative_error(got, problem.expected()):.2e}", flush=True)
        del problem, plain, calls
    table("trees, us", trees)
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"device": str(gpu), "model": options.model, "sequences": singles, "trees": trees}, f, indent=1)


if __name__ == "__main__":
    main()
