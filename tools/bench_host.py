"""What the host does with a request before a forward pass can start: from its body to the row pool, time and memory.

    python tools/bench_host.py [EXPORT] --clients 12 --json host.json

Without EXPORT a demo checkpoint is made for it. Bodies go through the real engine, over a backbone that builds the row pool
of every forward pass and computes nothing. For each request:

  to pool     milliseconds from the body to the first forward's row pool, median
  answered    milliseconds until the answer, with the pools of all forwards, median
  held, peak  MiB that Python and NumPy hold for it while it waits, and at most before its first pool is built (tracemalloc)

and, in a process of their own, the resident memory of a worker in which ``--clients`` of the last request wait.
"""
from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jev.checkpoint.demo import write_demo_checkpoint  # noqa: E402
from jev.checkpoint.opening import open_export  # noqa: E402
from jev.engine import Engine  # noqa: E402
from jev.model import row_pool  # noqa: E402
from jev.settings import Settings  # noqa: E402
from tools.tool import Needed  # noqa: E402

WORDS = "the parcel has not been sent and it is still at the depot".split()
MIB = 1 << 20


class Pools:
    """A backbone that builds row pools and gives zeros. ``gate`` holds forwards, ``first`` is called as one begins."""
    name = "numpy"
    max_rows = 10240

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size, self.built, self.before = hidden_size, [], lambda: None
        self.gate = threading.Event()
        self.gate.set()

    def hidden(self, sequences):
        self.before()
        self.gate.wait()
        pool = row_pool.build(sequences)
        _ = pool.tiles, pool.paths                      # made when first asked for
        self.built.append(time.perf_counter())
        return np.zeros((len(sequences), self.hidden_size), np.uint16), pool.n_rows

    def close(self) -> None:
        pass


def state(words: int) -> str:
    return " ".join(np.random.default_rng(0).choice(WORDS, words))


def bodies() -> dict[str, tuple[bytes, int]]:
    """By name: (body, how often to measure it)."""
    def choices(words: int, options: int, questions: int) -> bytes:
        return json.dumps({"state": state(words), "questions": {f"q{i}": {
            "type": "choice", "instructions": f"Pick {i}", "criteria": dict.fromkeys(map(str, range(options)))}
            for i in range(questions)}}).encode()
    noul = {"state": state(60), "questions": {"q": {"type": "noul", "instructions": "Is it late?"}}}
    return {"noul": (json.dumps(noul).encode(), 500), "choice of 16": (choices(300, 16, 1), 300),
            "choice of 255": (choices(3000, 255, 1), 15), "51,000 candidates": (choices(950, 255, 200), 3)}


def measure(engine: Engine, body: bytes, repeats: int) -> dict[str, float]:
    backbone: Pools = engine.backbone
    to_pool, answered = [], []
    for _ in range(repeats + 1):                          # the first one finds no words remembered
        backbone.built.clear()
        gc.collect()
        started = time.perf_counter()
        answer = engine.answer(body)
        answered.append(time.perf_counter() - started)
        to_pool.append(backbone.built[0] - started)
    held = []
    del answer["answers"]
    backbone.built.clear()
    backbone.before = lambda: held or held.append(tracemalloc.get_traced_memory()[0])
    build = row_pool.build

    def first_build(sequences):
        pool = build(sequences)
        if len(held) == 1:
            held.append(tracemalloc.get_traced_memory()[1])
        return pool
    row_pool.build = first_build
    tracemalloc.start()
    engine.answer(body)
    tracemalloc.stop()
    row_pool.build, backbone.before = build, lambda: None
    return {"body_bytes": len(body), "candidates": answer["metadata"]["candidate_sequences"],
            "tokens": answer["usage"]["input_tokens"], "rows": answer["metadata"]["prefix_cache"]["rows"],
            "to_pool_ms": 1000 * float(np.median(to_pool[1:])), "answered_ms": 1000 * float(np.median(answered[1:])),
            "held_mib": held[0] / MIB, "peak_mib": held[1] / MIB}


def resident(engine: Engine, body: bytes, clients: int) -> dict[str, float]:
    """MiB of this process before, with ``clients`` requests waiting, and at most."""
    def status(name: str) -> float:
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024
    before = status("VmRSS")
    engine.backbone.gate.clear()
    threads = [threading.Thread(target=engine.answer, args=(body,), daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    while len(engine.scheduler._waiting) < clients - 1:      # one is in the forward
        if not all(thread.is_alive() for thread in threads):
            raise SystemExit("a request was refused")
        time.sleep(0.05)
    return {"clients": clients, "before_mib": before, "waiting_mib": status("VmRSS"), "most_mib": status("VmHWM")}


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path, nargs="?")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resident-only", action="store_true", help=argparse.SUPPRESS)
    args = Needed().parse(parser, argv)
    with tempfile.TemporaryDirectory() as folder:
        path = args.export or Path(folder) / "demo"
        if not args.export:
            write_demo_checkpoint(path)
        export = open_export(path, 8192)
        engine = Engine(export, Pools(export.config.hidden_size), Settings())
        if args.resident_only:
            print(json.dumps(resident(engine, bodies()["51,000 candidates"][0], args.clients)), flush=True)
            return
        print(f"{'request':<20}{'body':>10}{'tokens':>12}{'rows':>10}{'to pool':>11}{'answered':>11}{'held':>9}{'peak':>9}")
        results = {}
        for name, (body, repeats) in bodies().items():
            r = results[name] = measure(engine, body, repeats)
            print(f"{name:<20}{r['body_bytes'] / 1024:>6.0f} KiB{r['tokens']:>12,}{r['rows']:>10,}{r['to_pool_ms']:>8.2f} ms"
                  f"{r['answered_ms']:>8.1f} ms{r['held_mib']:>5.1f} MiB{r['peak_mib']:>5.1f} MiB", flush=True)
        if args.clients:
            command = [sys.executable, __file__, str(path), "--clients", str(args.clients), "--resident-only"]
            r = results["resident"] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"{r['clients']} of the last waiting: {r['waiting_mib']:.0f} MiB resident, {r['most_mib']:.0f} at most, "
                  f"{r['before_mib']:.0f} before")
        engine.close()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
