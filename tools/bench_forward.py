"""Device time of the forward pass, per length and per operation, against the roofline. Needs a GPU.

    python tools/bench_forward.py --model 27b --lengths 80,107,256,512,936,2334,3399 --operations 107,3399 \\
        --json forward.json --plot forward.png

Weights are synthetic (tools/synthetic.py). A length's time is the median of graph replays of its bucket, one sequence of
random tokens. An operation's time is that of a graph with all its calls of one forward pass, one after another, so
launch gaps inside the forward pass are not in it; ``rest`` is what the pass takes beyond the sum. Floors: the larger of
least bytes over the copy bandwidth and operations over the matrix rate, both measured ceilings of design notes
(4.4 TB/s, 790 TFLOP/s); see ``floors``.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jev.checkpoint.config import ModelConfig  # noqa: E402
from jev.model import row_pool  # noqa: E402
from jev.model.buckets import choose  # noqa: E402
from jev.model.cuda_backbone import CudaBackbone  # noqa: E402
from jev.model.forward import forward  # noqa: E402
from jev.model.ops import Uncached  # noqa: E402
from jev.model.ops.audit import AuditOps  # noqa: E402
from jev.model.ops.cuda_buffers import CudaWeights  # noqa: E402
from jev_kernels.runtime import graph as graphs  # noqa: E402
from jev_kernels.runtime.device import Event, Stream, find_device, peak_memory  # noqa: E402
from tools import synthetic  # noqa: E402
from tools.tool import Needed  # noqa: E402

BANDWIDTH, MATRIX_RATE = 4.4e12, 790e12          # measured on an H200: bytes/s read + written, BF16 FLOP/s


def synthetic_backbone(config: ModelConfig, seed: int = 0, **options) -> CudaBackbone:
    """A CudaBackbone with the synthetic weights of tools/synthetic.py."""
    def load(specs):
        weights = CudaWeights(specs)
        stream = Stream()
        synthetic.write(stream, specs, {key: w.array for key, w in weights.held.items()}, seed)
        stream.synchronize()
        return weights
    return CudaBackbone.with_weights(config, find_device(), load, **options)


def floors(c: ModelConfig, rows: int) -> dict[str, float]:
    """Least milliseconds of each operation over all layers, for one sequence of ``rows`` tokens."""
    h, inter = c.hidden_size, c.intermediate_size
    full, linear = (sum(k == kind for k in c.layer_types) for kind in ("full_attention", "linear_attention"))
    wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    heads = c.linear_num_value_heads

    def ms(nbytes, flop=0.0):
        return max(nbytes / BANDWIDTH, flop / MATRIX_RATE) * 1e3

    def gemm(n, k, m=rows):
        return ms(2.0 * (n * k + m * k + m * n), 2.0 * m * n * k)

    in_full, in_linear = 2 * wide + 2 * narrow, c.conv_dim + c.value_dim + 2 * heads
    last = 1                                      # after the last mixer one row goes on
    mixers = full * gemm(in_full, h) + linear * gemm(in_linear, h)
    outs = sum(gemm(h, wide if kind == "full_attention" else c.value_dim, rows if i + 1 < c.num_layers else last)
               for i, kind in enumerate(c.layer_types))
    down = (c.num_layers - 1) * gemm(h, inter) + gemm(h, inter, last)

    def swiglu(m):
        return ms(2.0 * (2 * inter * h + m * h + m * inter), 4.0 * m * inter * h)

    # causal attention: 4 D flop per (query, key) pair and head
    pairs = rows * (rows + 1) / 2
    return {"embed": ms(2.0 * 2 * rows * h), "rms_norm": ms(2.0 * 2 * rows * h),
            "add_rms_norm": (2 * c.num_layers - 2) * ms(2.0 * 4 * rows * h), "linear": mixers + outs + down,
            "swiglu": (c.num_layers - 1) * swiglu(rows) + swiglu(last),
            "gdn_conv_gates": linear * ms(2.0 * 2 * rows * c.conv_dim + 10.0 * rows * heads),
            "gated_delta_rule": linear * ms(2.0 * rows * (c.conv_dim + c.value_dim) + 6.0 * rows * heads,
                                            8.0 * rows * heads * c.linear_key_head_dim * c.linear_value_head_dim),
            "gated_rms_norm": linear * ms(2.0 * 3 * rows * c.value_dim),
            "qk_rope": full * ms(2.0 * 2 * rows * (wide + narrow)),
            "gated_attention": full * ms(2.0 * rows * (3 * wide + 2 * narrow),
                                         4.0 * c.head_dim * pairs * c.num_attention_heads),
            "gather_rows": 0.0}


class Recorder(Uncached):
    """Passes operations on and keeps each call, so that it can be made again."""

    def __init__(self, ops):
        self.ops, self.calls = ops, defaultdict(list)

    def __getattr__(self, name):
        if name not in AuditOps.OPERATIONS:
            raise AttributeError(name)

        def call(*args):
            self.calls[name].append((getattr(self.ops, name), args))
            return getattr(self.ops, name)(*args)
        return call


def median_ms(stream, launch, repeats: int = 9) -> float:
    """Median milliseconds of ``launch()``, by events."""
    launch()
    times = []
    for _ in range(repeats):
        start, end = Event().record(stream), Event()
        launch()
        end.record(stream).synchronize()
        times.append(start.milliseconds_to(end))
    return float(np.median(times))


def load_pool(backbone: CudaBackbone, sequences):
    """Upload the pool of ``sequences``; returns (pool, bucket)."""
    pool = row_pool.build(sequences)
    bucket = choose(pool, backbone.buckets)
    backbone.runner(bucket).upload(pool, np.unique(pool.last_rows))
    return pool, bucket


def time_length(backbone: CudaBackbone, length: int, rng) -> tuple[float, object]:
    """(milliseconds, bucket) of one sequence of random tokens."""
    _, bucket = load_pool(backbone, [rng.integers(0, backbone.config.vocab_size, length).astype(np.int32)])
    graph = backbone.runner(bucket).graph()
    return median_ms(backbone.stream, lambda: graph.launch(backbone.stream)), bucket


def time_operations(backbone: CudaBackbone, bucket) -> dict[str, tuple[int, float]]:
    """operation -> (calls, milliseconds of all of them)."""
    ops = backbone.runner(bucket).ops
    recorder = Recorder(ops)
    forward(recorder, backbone.model, ops.pool)
    backbone.stream.synchronize()
    out = {}
    for name, calls in recorder.calls.items():
        def again(calls=calls):
            for function, args in calls:
                function(*args)
        graph = graphs.capture(backbone.stream, again)
        out[name] = len(calls), median_ms(backbone.stream, lambda graph=graph: graph.launch(backbone.stream))
        graph.destroy()
    return out


def plot(path: str, ylabel: str, lines: dict[str, tuple[str, list, list]], **axis) -> None:
    """Draw milliseconds against tokens, both logarithmic unless ``axis`` (of matplotlib's ``Axes.set``) says otherwise.

    lines: label -> (matplotlib's format, tokens, milliseconds).
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for label, (style, lengths, ms) in lines.items():
        axes.plot(lengths, ms, style, label=label)
    axes.set(**{"xlabel": "tokens", "ylabel": ylabel, "xscale": "log", "yscale": "log"} | axis)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=synthetic.CONFIGS, default="27b")
    parser.add_argument("--layers", type=int, help="cut the model to so many layers")
    parser.add_argument("--lengths", default="80,107,256,512,936,2334,3399")
    parser.add_argument("--operations", default="107,3399", help="lengths whose operations are timed one by one")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--plot", help="draw latency against length here (needs matplotlib)")
    args = Needed(plot="matplotlib").parse(parser, argv, gpu=True)
    config = synthetic.config(args.model, args.layers)
    backbone = synthetic_backbone(config, ready_rows=0)
    rng = np.random.default_rng(0)
    rows, detail = [], {}
    print(f"{'tokens':>7}{'bucket':>8}{'ms':>9}{'floor':>9}{'ratio':>7}")
    for length in map(int, args.lengths.split(",")):
        ms, bucket = time_length(backbone, length, rng)
        floor = sum(floors(config, length).values())
        rows.append({"length": length, "bucket": bucket.rows, "ms": ms, "floor_ms": floor})
        print(f"{length:>7}{bucket.rows:>8}{ms:>9.3f}{floor:>9.3f}{ms / floor:>7.2f}", flush=True)
    for length in map(int, filter(None, args.operations.split(","))):
        ms, bucket = time_length(backbone, length, rng)
        times, floor = time_operations(backbone, bucket), floors(config, length)
        print(f"\n{length} tokens\n{'operation':<18}{'calls':>6}{'ms':>9}{'us/call':>9}{'floor ms':>10}{'ratio':>7}")
        for name, (calls, t) in sorted(times.items(), key=lambda item: -item[1][1]):
            ratio = t / floor[name] if floor[name] else float("nan")
            print(f"{name:<18}{calls:>6}{t:>9.3f}{t / calls * 1e3:>9.1f}{floor[name]:>10.3f}{ratio:>7.2f}")
        print(f"{'rest':<24}{ms - sum(t for _, t in times.values()):>9.3f}\n{'all':<24}{ms:>9.3f}", flush=True)
        detail[length] = {name: {"calls": n, "ms": t, "floor_ms": floor[name]} for name, (n, t) in times.items()}
    print(f"\npeak device memory {peak_memory() / 1e9:.1f} GB")
    if args.json:
        Path(args.json).write_text(json.dumps({"device": str(backbone.device), "model": args.model, "layers": config.num_layers,
                                               "lengths": rows, "operations": detail, "peak_bytes": peak_memory()}, indent=1))
    if args.plot:
        lengths = [r["length"] for r in rows]
        plot(args.plot, "device time, ms", {"measured": ("o-", lengths, [r["ms"] for r in rows]),
                                            "floor": ("--", lengths, [r["floor_ms"] for r in rows])})


if __name__ == "__main__":
    main()
