"""Times the row-wise kernels at the shapes of a model: time, bytes, share of the copy bandwidth, error to float64.

    python tools/bench_kernels.py --model 27b --rows 107,936,3399 --json kernels.json --against torch

A figure is the median over replays of a CUDA graph that holds many launches. The launches go round through as many sets
of buffers as it takes to exceed the L2 cache. "chain" is the same graph with programmatic dependent launch, as in a
forward pass. Bytes count every input and output once; the bandwidth is that of a device copy in the same run.

Other kernels have files of their own (bench_gemm.py, ...); they may use ``measure`` and ``copy_bandwidth``.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jev_kernels import bf16, reference  # noqa: E402
from jev_kernels.gdn import conv as gdn_conv  # noqa: E402
from jev_kernels.pool import COUNTS, LASTS, ROWS  # noqa: E402
from jev_kernels.rowwise import (
    embed,  # noqa: E402
    rms_norm,  # noqa: E402
    rope,  # noqa: E402
    silu,  # noqa: E402
)
from jev_kernels.runtime import device  # noqa: E402
from jev_kernels.runtime.graph import capture  # noqa: E402
from tools.tool import Needed  # noqa: E402

# hidden, intermediate, query heads, key heads, linear key heads, linear value heads
MODELS = {"27b": (5120, 17408, 24, 4, 16, 48), "9b": (4096, 12288, 16, 4, 16, 32)}
EPS = 1e-6
OVER_L2 = 200 << 20          # bytes that the sets of buffers exceed: three times an H200's L2 cache
MOST_SETS = 64


# ---------------------------------------------------------------- measuring
def copy_bandwidth(stream, nbytes: int = 1 << 30) -> float:
    """Bytes read and written a second by a device copy: the best of five."""
    with device.Arena(2 * nbytes, "measuring the bandwidth") as arena:
        a, b = arena.take(nbytes // 2), arena.take(nbytes // 2)
        device.fill(a, 0x3F80, stream)
        times = []
        for _ in range(6):
            start = device.Event().record(stream)
            device.copy(b, a, stream)
            end = device.Event().record(stream)
            end.synchronize()
            times.append(start.milliseconds_to(end) * 1e-3)
    return 2 * nbytes / min(times[1:])


def measure(stream, launch: Callable[[int], object], launches: int, replays: int = 9) -> float:
    """Microseconds a launch: ``launch(i)`` for i < launches captured in one graph, the median of its replays."""
    launch(0)                                       # compiled before the capture
    stream.synchronize()
    graph = capture(stream, lambda: [launch(i) for i in range(launches)])
    times = []
    for _ in range(replays + 2):
        start = device.Event().record(stream)
        graph.launch(stream)
        end = device.Event().record(stream)
        end.synchronize()
        times.append(start.milliseconds_to(end) * 1e3 / launches)
    graph.destroy()
    return float(np.median(times[2:]))


@dataclass
class Case:
    """One kernel at one size. launch(i, pdl) uses buffer set i; error() is (||out - ref|| / ||ref||, largest ulps)."""
    name: str
    rows: int
    nbytes: int
    launch: Callable[[int, bool], object]
    sets: int
    error: Callable[[], tuple[float, int]]
    torch: Callable[[int], object] | None = None


def report(cases, stream, bandwidth: float) -> list[dict]:
    """Measure, print a line each, return the figures."""
    print(f"{'kernel':<22}{'rows':>6}{'MB':>8}{'us':>8}{'chain':>8}{'torch':>8}{'TB/s':>7}{'share':>7}{'error':>10}"
          f"{'ulps':>6}", flush=True)
    out = []
    for c in cases:
        launches = max(20, min(200, int(400e-6 / (c.nbytes / bandwidth)) + 1))
        us = measure(stream, lambda i: c.launch(i % c.sets, False), launches)
        chain = measure(stream, lambda i: c.launch(i % c.sets, True), launches)
        against = torch_time(c, launches) if c.torch else None
        error, ulps = c.error()
        rate = c.nbytes / us * 1e-6
        out.append({"kernel": c.name, "rows": c.rows, "bytes": c.nbytes, "us": us, "chain_us": chain,
                    "torch_us": against, "tb_s": rate, "share": rate / (bandwidth * 1e-12), "error": error,
                    "ulps": ulps})
        shown = "       -" if against is None else f"{against:8.2f}"
        print(f"{c.name:<22}{c.rows:>6}{c.nbytes / 1e6:>8.1f}{us:>8.2f}{chain:>8.2f}{shown}{rate:>7.2f}"
              f"{rate / (bandwidth * 1e-12):>7.2f}{error:>10.1e}{ulps:>6}", flush=True)
    return out


def torch_time(case: Case, launches: int) -> float:
    """The same work by PyTorch's own operators, from a graph as well."""
    import torch
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        case.torch(0)
        case.torch(1 % case.sets)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for i in range(launches):
                case.torch(i % case.sets)
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(side)
            graph.replay()
            end.record(side)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / launches)
    return float(np.median(times[2:]))


# ---------------------------------------------------------------- the cases
class Data:
    """Buffers for one number of rows: random BF16 inputs in ``sets`` copies, outputs, metadata."""

    def __init__(self, rng, rows: int):
        self.rng, self.rows = rng, rows
        self.normal = bf16.from_float64(rng.standard_normal(1 << 15))
        counts = np.zeros(COUNTS, np.int32)
        counts[[ROWS, LASTS]] = rows
        self.counts = self.device(counts)

    @staticmethod
    def device(host):
        from numba import cuda
        return cuda.to_device(host)

    def host(self, *shape) -> np.ndarray:
        return self.normal[self.rng.integers(0, 1 << 15, shape, dtype=np.uint16)]

    def inputs(self, sets: int, *shape):
        """``sets`` device copies of one random array (no two launches in a row read the same memory), and the array."""
        host = self.host(*shape)
        first = self.device(host)
        return [first] + [self.device(host) for _ in range(sets - 1)], host

    def outputs(self, sets: int, *shape, dtype=np.uint16):
        return [self.device(np.full(shape, 0x7FA5 if dtype == np.uint16 else np.nan, dtype)) for _ in range(sets)]


def sets_for(nbytes: int) -> int:
    return max(2, min(MOST_SETS, -(-OVER_L2 // nbytes)))


def wide(x):
    return bf16.to_float32(x).astype(np.float64)


def compared(got, exact, rounded) -> tuple[float, int]:
    """(relative error to the unrounded float64, largest distance in ulps from the rounded one)."""
    order = lambda x: np.where(x & 0x8000, -(x.astype(np.int32) & 0x7FFF), x.astype(np.int32))  # noqa: E731
    error = np.linalg.norm(wide(got) - exact) / np.linalg.norm(exact)
    return float(error), int(np.abs(order(got) - order(bf16.from_float64(rounded))).max())


def as_torch(array):
    import torch
    return torch.as_tensor(array, device="cuda").view(torch.bfloat16)


class Shapes:
    """What the cases of one model and number of rows share."""

    def __init__(self, model: str, rows: int, against: str | None, stream):
        self.hidden, self.inner, self.hq, self.hk, lk, self.lv = MODELS[model]
        self.value_dim, self.conv = 128 * self.lv, 128 * (2 * lk + self.lv)
        self.rows, self.stream, self.torch = rows, stream, against == "torch"
        self.data = Data(np.random.default_rng(0), rows)
        self.pick = np.unique(np.linspace(0, rows - 1, 24).astype(int))
        self.n = self.data.counts

    def peer(self, make):
        """``make()`` gives PyTorch's version of a launch, if that is asked for."""
        return make() if self.torch else None


def embedding(s: Shapes):
    rows, h = s.rows, s.hidden
    nbytes = 4 * rows * h + 4 * rows
    sets = sets_for(nbytes)
    table, ids = s.data.host(32768, h), [s.data.rng.integers(0, 32768, rows).astype(np.int32) for _ in range(sets)]
    table_d, ids_d, out = s.data.device(table), [s.data.device(i) for i in ids], s.data.outputs(sets, rows, h)

    def error():
        return compared(out[0].copy_to_host(), wide(table[ids[0]]), wide(table[ids[0]]))

    def peer():
        import torch
        weight, at = as_torch(table_d), [torch.as_tensor(i, device="cuda") for i in ids_d]
        return lambda i: torch.nn.functional.embedding(at[i], weight)

    yield Case("embed", rows, nbytes,
               lambda i, pdl: embed.embed(s.stream, table_d, ids_d[i], out[i], s.n, pdl=pdl), sets, error, s.peer(peer))


def norms(s: Shapes):
    rows, h = s.rows, s.hidden
    w = s.data.host(h)
    w_d, sets = s.data.device(w), sets_for(4 * rows * h)
    x, x_host = s.data.inputs(sets, rows, h)
    delta, delta_host = s.data.inputs(sets, rows, h)
    out, total = s.data.outputs(sets, rows, h), s.data.outputs(sets, rows, h)

    def error(added):
        source = wide(x_host[s.pick])
        if added:
            source = bf16.round_float64(source + wide(delta_host[s.pick]))
        ref = reference.rms_norm(source, wide(w), EPS)
        return compared(out[0].copy_to_host()[s.pick], ref, ref)

    def peer(added):
        from torch.nn.functional import rms_norm as norm
        xs, deltas, weight = [as_torch(v) for v in x], [as_torch(v) for v in delta], as_torch(w_d)
        return lambda i: norm(xs[i] + deltas[i] if added else xs[i], (h,), weight, EPS)

    yield Case("rms_norm", rows, 4 * rows * h + 2 * h,
               lambda i, pdl: rms_norm.rms_norm(s.stream, x[i], w_d, out[i], s.n, EPS, pdl=pdl), sets,
               lambda: error(False), s.peer(lambda: peer(False)))
    yield Case("add_rms_norm", rows, 8 * rows * h + 2 * h,
               lambda i, pdl: rms_norm.add_rms_norm(s.stream, x[i], delta[i], w_d, out[i], s.n, EPS, out=total[i],
                                                    pdl=pdl),
               sets, lambda: error(True), s.peer(lambda: peer(True)))


def activation(s: Shapes):
    rows, inner = s.rows, s.inner
    nbytes = 6 * rows * inner
    sets = sets_for(nbytes)
    x, host = s.data.inputs(sets, rows, 2 * inner)
    y = s.data.outputs(sets, rows, inner)

    def error():
        g = wide(host[s.pick])
        return compared(y[0].copy_to_host()[s.pick], reference.silu_mul(g), reference.silu_mul(g, bf16.round_float64))

    def peer():
        from torch.nn.functional import silu as torch_silu
        xs = [as_torch(v) for v in x]
        return lambda i: torch_silu(xs[i][:, :inner]) * xs[i][:, inner:]        # halves, as Transformers has them

    yield Case("silu_mul", rows, nbytes, lambda i, pdl: silu.silu_mul(s.stream, x[i], y[i], s.n, pdl=pdl), sets, error,
               s.peer(peer))


def heads(s: Shapes):
    rows, hq, hk = s.rows, s.hq, s.hk
    nbytes = 4 * rows * (hq + hk) * 256 + 128 * rows
    sets = sets_for(nbytes)
    qkv, host = s.data.inputs(sets, rows, 2 * (hq + hk) * 256)
    qw, kw, angles = s.data.host(256), s.data.host(256), reference.rope_table(8192, 64, 1e7)
    qw_d, kw_d, angles_d = map(s.data.device, (qw, kw, angles))
    at = s.data.device(np.arange(rows, dtype=np.int32))

    def error():
        """Of one application: the timed launches have run in place, many times."""
        one = s.data.device(host)
        rope.qk_rope(s.stream, one, qw_d, kw_d, angles_d, at, s.n, hq, hk, EPS)
        s.stream.synchronize()
        cos, sin = wide(angles[s.pick, :32]), wide(angles[s.pick, 32:])
        q = wide(host[s.pick, :hq * 256]).reshape(-1, hq, 256)
        results = [reference.rotate(reference.rms_norm(q, wide(qw), EPS, r), cos, sin, r)
                   for r in (reference.exact, bf16.round_float64)]
        return compared(one.copy_to_host()[s.pick, :hq * 256].reshape(q.shape), *results)

    yield Case("qk_rope", rows, nbytes,
               lambda i, pdl: rope.qk_rope(s.stream, qkv[i], qw_d, kw_d, angles_d, at, s.n, hq, hk, EPS, pdl=pdl),
               sets, error)


def linear_attention(s: Shapes):
    rows, lv, conv, value_dim = s.rows, s.lv, s.conv, s.value_dim
    conv_bytes, gated_bytes = 4 * rows * conv + 8 * conv, 6 * rows * value_dim
    sets = sets_for(gated_bytes)
    projected, p_host = s.data.inputs(sets, rows, conv + value_dim + 2 * lv)
    taps, a_log, bias = s.data.host(conv, 4), s.data.host(lv), s.data.host(lv)
    taps_d, a_log_d, bias_d = map(s.data.device, (taps, a_log, bias))
    up = np.arange(-1, rows - 1, dtype=np.int32)
    up_d = s.data.device(up)
    y, beta = s.data.outputs(sets, rows, conv), s.data.outputs(sets, rows, lv)
    g = s.data.outputs(sets, rows, lv, dtype=np.float32)
    x, z, b, a = ([p[:, c] for p in projected] for c in (
        slice(0, conv), slice(conv, conv + value_dim), slice(conv + value_dim, conv + value_dim + lv),
        slice(conv + value_dim + lv, conv + value_dim + 2 * lv)))

    def conv_error():
        few = slice(0, min(rows, 64))
        results = [reference.gdn_conv(wide(p_host[few, :conv]), up[few], wide(taps), r)
                   for r in (reference.exact, bf16.round_float64)]
        return compared(y[0].copy_to_host()[few], *results)

    yield Case("gdn_conv", rows, conv_bytes,
               lambda i, pdl: gdn_conv.gdn_conv(s.stream, x[i], taps_d, up_d, y[i], s.n, pdl=pdl), sets, conv_error)
    yield Case("gdn_conv_gates", rows, conv_bytes + rows * lv * (2 + 2 + 2 + 4),
               lambda i, pdl: gdn_conv.gdn_conv_gates(s.stream, x[i], taps_d, up_d, b[i], a[i], a_log_d, bias_d, y[i],
                                                      beta[i], g[i], s.n, pdl=pdl), sets, conv_error)

    o, o_host = s.data.inputs(sets, rows, value_dim)
    out = s.data.outputs(sets, rows, value_dim)
    w = s.data.host(128)
    w_d = s.data.device(w)

    def gated_error():
        pair = [wide(v[s.pick]).reshape(-1, lv, 128) for v in (o_host, p_host[:, conv:conv + value_dim])]
        results = [reference.gated_rms_norm(*pair, wide(w), EPS, r) for r in (reference.exact, bf16.round_float64)]
        return compared(out[0].copy_to_host()[s.pick].reshape(pair[0].shape), *results)

    yield Case("gated_rms_norm", rows, gated_bytes,
               lambda i, pdl: rms_norm.gated_rms_norm(s.stream, o[i], z[i], w_d, out[i], s.n, EPS, pdl=pdl), sets,
               gated_error)


def make_cases(model: str, rows: int, against: str | None, stream):
    """The cases of one number of rows; a group's buffers are freed before the next one's are made."""
    shapes = Shapes(model, rows, against, stream)
    for group in (embedding, norms, activation, heads, linear_attention):
        yield from group(shapes)


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="27b")
    parser.add_argument("--rows", default="107,936,3399")
    parser.add_argument("--only", help="kernels whose names contain this")
    parser.add_argument("--against", choices=["torch"], help="also time PyTorch's operators")
    parser.add_argument("--json", help="also write everything here")
    options = Needed(against="torch").parse(parser, arguments, gpu=True)
    gpu = device.find_device()
    stream = device.Stream()
    bandwidth = copy_bandwidth(stream)
    print(f"{gpu}; copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    results = []
    for rows in map(int, options.rows.split(",")):
        cases = make_cases(options.model, rows, options.against, stream)
        results += report((c for c in cases if not options.only or options.only in c.name), stream, bandwidth)
    if options.json:
        Path(options.json).write_text(json.dumps({"gpu": str(gpu), "copy": bandwidth, "kernels": results}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
