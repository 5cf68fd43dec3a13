"""Times the GEMMs of the backbone: our kernel, the best admitted cuBLASLt algorithm, cuBLASLt's first guess, the floor.

    python tools/bench_gemm.py --model 27b --rows 96,107,128,192,256 --json gemm.json

Each figure is the median of replays of a CUDA graph of several launches (one replay for what is far slower than the best),
with weights that are not in the L2 cache, the contenders in turns. Every candidate's bits are compared with the reference
order of its shape, as in serving.
floor = max(bytes / bandwidth, operations / rate): bandwidth is a device copy measured in the same run, counting bytes
read and written; the rate is --tflops, what a large square product reaches on the GPU in question (H200: 790).
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from numba.cuda import types

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jev_kernels.gemm.narrow import MAX_ROWS  # noqa: E402
from jev_kernels.gemm.problem import Key  # noqa: E402
from jev_kernels.gemm.selection import OWN, WIDE, Gemm  # noqa: E402
from jev_kernels.gemm.trials import RANDOM  # noqa: E402
from jev_kernels.ptx import pdl_launch, pdl_wait, ptx  # noqa: E402
from jev_kernels.ptx.device import i64  # noqa: E402
from jev_kernels.runtime import device  # noqa: E402
from jev_kernels.runtime.graph import capture  # noqa: E402
from jev_kernels.runtime.launch import Kernel  # noqa: E402
from tools.tool import Needed  # noqa: E402

# N x K and how many of them a forward pass runs. "gate, up" has its activation behind it, with cuBLASLt as another launch.
MODELS = {
    "27b": {"linear attention in": (16480, 5120, 48), "attention in": (14336, 5120, 16), "out": (5120, 6144, 64),
            "gate, up": (34816, 5120, 64), "down": (5120, 17408, 64)},
    "9b": {"linear attention in": (12352, 4096, 24), "attention in": (10240, 4096, 8), "out": (4096, 4096, 32),
           "gate, up": (24576, 4096, 32), "down": (4096, 12288, 32)},
}


def bandwidth(stream, nbytes: int = 2 << 30) -> float:
    """Bytes read and written a second by a device copy: the best of five."""
    with device.Arena(2 * nbytes, "measuring the bandwidth") as arena:
        a, b = arena.take(nbytes // 2), arena.take(nbytes // 2)
        device.fill(a, 0x3F80, stream)
        best = 0.0
        for _ in range(6):
            start = device.Event().record(stream)
            device.copy(b, a, stream)
            end = device.Event().record(stream)
            end.synchronize()
            best = max(best, 2 * nbytes / (start.milliseconds_to(end) * 1e-3))
    return best


def row(gemm: Gemm, n: int, k: int, gated: bool, m: int, copy_rate: float, tflops: float) -> dict:
    """All figures of one weight shape at one number of rows, us."""
    key = Key(m, n, k, k, k, n, gated)
    found = gemm.admit(key)
    admitted = [c.algorithm for c in found if c.differing == 0]
    first = next((str(a) for a in gemm.blas.heuristics(key, 256)), None)
    times = gemm.measure(key, list(dict.fromkeys(admitted + ([first] if first else []))))
    blas = {name: us for name, us in times.items() if not name.startswith(OWN) and name in admitted}
    best = min(blas, key=blas.get, default=None)
    floor = max(2 * (n * k + m * k + m * (n // 2 if gated else n)) / copy_rate, 2 * n * k * m / (tflops * 1e12)) * 1e6
    used = min((times[name] for name in admitted), default=float("nan"))
    return {"n": n, "k": k, "rows": m, OWN: times.get(OWN), WIDE: times.get(WIDE),
            "cublaslt": blas.get(best), "algorithm": best, "first": times.get(first), "floor": floor,
            "share": floor / used, "candidates": len(found), "best": used,
            "refused": [c.algorithm for c in found if c.differing]}


clock = ptx("clock", i64, (), "mov.u64 $0, %clock64;", "=l")


def spacer(cycles):
    """Stands for the small kernels between two GEMMs: busy for ``cycles``, memory idle."""
    pdl_launch()
    pdl_wait()
    start = clock()
    while clock() - start < cycles:
        pass


def chain(gemm: Gemm, m: int, layers: int = 6, repeats: int = 5) -> dict:
    """us a layer of 27B's linear attention kind: its GEMMs by our kernels with spacers between them, in one graph, with
    and without programmatic dependent launch."""
    gate_up = (34816, 5120)
    parts = [(5120, 6144, 14000), (*gate_up, 5000), (5120, 17408, 3500), (16480, 5120, 5000)]         # cycles before
    spin = Kernel(spacer, types.void(types.int64), threads=128)
    size = sum(device.array_bytes((n, k)) for n, k, _ in parts)
    with device.Arena(layers * size + 4 * device.array_bytes((m, 34816)), "a chain of GEMMs") as arena:
        weights = [[arena.take((n, k)) for n, k, _ in parts] for _ in range(layers)]
        x, y = (arena.take((m, 34816)) for _ in range(2))
        for i, w in enumerate(w for layer in weights for w in layer):
            RANDOM(gemm.stream, 1056, w, i, 0.0)
        RANDOM(gemm.stream, 1056, x, 99, 0.0)
        name = OWN if m <= MAX_ROWS else WIDE
        plans = [(gemm.bind_gated(name, x[:, :k], w, None, y[:, :n // 2], m, None) if (n, k) == gate_up else
                  gemm.bind(name, x[:, :k], w, y[:, :n], m), cycles)
                 for layer in weights for w, (n, k, cycles) in zip(layer, parts)]

        def launch(pdl):
            for plan, cycles in plans:
                spin(gemm.stream, 100, cycles, pdl=pdl)
                plan(gemm.stream, pdl=pdl)
        launch(True)
        gemm.stream.synchronize()
        graphs = {pdl: (capture(gemm.stream, lambda: launch(pdl)), []) for pdl in (False, True)}
        for _ in range(repeats + 1):
            for graph, times in graphs.values():
                start = device.Event().record(gemm.stream)
                graph.launch(gemm.stream)
                end = device.Event().record(gemm.stream)
                end.synchronize()
                times.append(start.milliseconds_to(end) * 1e3 / layers)
        found = {pdl: sorted(times[1:])[repeats // 2] for pdl, (_, times) in graphs.items()}
    print(f"a layer's GEMMs and spacers at {m} rows: {found[False]:.1f} us, with dependent launch {found[True]:.1f}; "
          f"its weights are {size / 1e6:.0f} MB", flush=True)
    return found


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="27b")
    parser.add_argument("--rows", default="64,107,128,160,192,224,256,320,384,448,512,1024,2334,3399")
    parser.add_argument("--tflops", type=float, default=790.0, help="matrix rate of the GPU, for the floor")
    parser.add_argument("--chain", default="", help="rows at which a layer's GEMMs are also timed as a chain")
    parser.add_argument("--json", help="also write everything here")
    options = Needed().parse(parser, arguments, gpu=True)
    gpu = device.find_device()
    gemm = Gemm(gpu)
    for m in (int(m) for m in options.chain.split(",") if m):
        chain(gemm, m)
    copy_rate = bandwidth(gemm.stream)
    print(f"{gpu}; cuBLASLt {gemm.blas.version}; copy {copy_rate / 1e12:.2f} TB/s; matrix rate taken "
          f"{options.tflops:.0f} TFLOP/s", flush=True)
    print(f"{'N x K':>14} {'rows':>5} {'own':>8} {'own:wide':>8} {'cublasLt':>8} {'first':>8} {'floor':>8} "
          f"{'share':>6}  bits", flush=True)
    rows, results = [int(m) for m in options.rows.split(",")], []
    started = time.perf_counter()
    for what, (n, k, _) in MODELS[options.model].items():
        gated = what == "gate, up"
        gemm.trial(Key(max(rows), n, k, k, k, n, gated))
        for m in rows:
            r = row(gemm, n, k, gated, m, copy_rate, options.tflops)
            results.append(r)
            cells = " ".join(f"{r[w]:8.1f}" if r[w] else "       -" for w in (OWN, WIDE, "cublaslt", "first"))
            print(f"{n:>6} x {k:<5} {m:>5} {cells} {r['floor']:8.1f} {r['share']:6.2f}  "
                  f"{r['candidates'] - len(r['refused'])} of {r['candidates']}"
                  f"{''.join(' REFUSED ' + a for a in r['refused'] if a.startswith(OWN))}", flush=True)
    gemm.release()
    print("a forward pass, ms of GEMM")
    for m in rows:
        per_forward = {(n, k): count for n, k, count in MODELS[options.model].values()}
        sums = {w: sum((r[w] or float("nan")) * per_forward[r["n"], r["k"]] for r in results if r["rows"] == m) / 1e3
                for w in ("best", "cublaslt", "first", "floor")}
        print(f"{m:>5}: best {sums['best']:7.2f}  cublasLt {sums['cublaslt']:7.2f}  first {sums['first']:7.2f}  "
              f"floor {sums['floor']:7.2f}", flush=True)
    print(f"{time.perf_counter() - started:.1f} s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gpu": str(gpu), "cublaslt": gemm.blas.version, "copy": copy_rate, "rows": results}, file,
                      indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
