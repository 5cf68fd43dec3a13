"""A worker and a gateway under all kinds of clients at once, for as long as you like, and whether anything grows.

    python tools/soak.py [--seconds 600] [--model EXPORT] [--out soak.json]

Good clients (every answer must be the first one's equal), hostile bodies, clients that leave, slow ones, health
checks, and now and then a backend that raises, returns NaN or runs out of device memory. Memory, descriptors and
threads of both processes are printed as it goes. Exit status 0: every answer was right or allowed, most good requests
were answered 200, nothing hung, and at the end both processes hold what they held at the beginning. Runs on loopback,
on the NumPy backend, with a demo checkpoint unless an export is given. The number of clients is fixed and small.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import itertools
import json
import random
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jev.checkpoint.demo import write_demo_checkpoint  # noqa: E402
from tests.faults.harness import (  # noqa: E402
    GOOD_BODY,
    GROWTH_BYTES,
    MIB,
    Asking,
    Process,
    answers,
    ask,
    connect,
    eventually,
    health,
    post_bytes,
    read_all,
    start_gateway,
    start_worker,
)
from tests.faults.hostile import bodies, largest  # noqa: E402
from tools.tool import Needed  # noqa: E402

PLACES = 8
STEADY_BYTES = 16 * MIB
# Between gateway and worker, idle and kept for the next request: as many as there were requests at once, perhaps none of
# them at the beginning.
KEPT_CONNECTIONS = 4
# Of the good requests. The others shared a forward with an order to fail, or met a queue full of those that left; orders
# come every four seconds, so on a slow machine that was 13 of 100.
ANSWERED_SHARE = 0.6


class Soak:
    """The clients, what they saw, and what went wrong."""

    def __init__(self, folder: Path, worker: Process, gateway: Process) -> None:
        self.folder, self.worker, self.gateway = folder, worker, gateway
        self.stop = threading.Event()
        self.seen: collections.Counter = collections.Counter()
        self.wrong: list[str] = []
        self.slowest: collections.defaultdict = collections.defaultdict(float)
        self.lock = threading.Lock()
        self.right = answers(ask(worker.port))

    def note(self, client: str, status: int | str, allowed: set, seconds: float = 0.0, more: str = "") -> None:
        with self.lock:
            self.seen[client, status] += 1
            self.slowest[client] = max(self.slowest[client], seconds)
            if status not in allowed:
                self.wrong.append(f"{client}: {status} {more}")

    # Each of these runs in a thread, again and again, until the end; a random generator of its own is passed in.

    def good(self, port: int, r: random.Random) -> None:
        started = time.monotonic()
        got = ask(port)
        seconds = time.monotonic() - started
        equal = got.status != 200 or answers(got) == self.right
        # 500: it shared a forward with an order to fail. 503: those that left still hold their places.
        self.note("good", got.status if equal else "different", {200, 500, 503}, seconds)
        self.stop.wait(r.uniform(0, 0.1))

    def reusing(self, port: int, r: random.Random) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(r.randrange(1, 20)):
            got = ask(port, connection=connection)
            equal = got.status != 200 or answers(got) == self.right
            self.note("reusing", got.status if equal else "different", {200, 500, 503})
            if self.stop.wait(0.05):
                break
        connection.close()

    def hostile(self, port: int, r: random.Random) -> None:
        for kind, body, statuses in bodies(r.randrange(2**32), 50):
            started = time.monotonic()
            got = ask(port, body) if body else None
            if got is not None:
                seconds, allowed = time.monotonic() - started, statuses | {500, 503}
                self.note("hostile", got.status, allowed, seconds, f"{kind} {body[:80]!r}")
            if self.stop.wait(0.02):
                return

    def leaving(self, port: int, r: random.Random) -> None:
        request = post_bytes(GOOD_BODY)
        sock = connect(port)
        sock.sendall(request[: r.choice([0, 20, 100, len(request) - 1, len(request)])])
        self.stop.wait(r.choice([0, 0.05, 0.3]))
        if r.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        self.note("leaving", "left", {"left"})
        self.stop.wait(0.2)

    def slow(self, port: int, r: random.Random) -> None:
        request = post_bytes(GOOD_BODY, b"Connection: close")
        with connect(port) as sock:
            for at in range(0, len(request), 16):
                sock.sendall(request[at : at + 16])
                time.sleep(0.02)
            reply = read_all(sock)
        self.note("slow", reply[9:12].decode(), {"200", "500", "503"})

    def healthy(self, port: int, r: random.Random) -> None:
        started = time.monotonic()
        status = health(port)
        # 503 between a failed forward and the next good one.
        self.note("health", status, {200, 503}, time.monotonic() - started)
        self.stop.wait(0.25)

    def failing(self, port: int, r: random.Random) -> None:
        if not self.stop.wait(r.uniform(2, 6)):
            what = r.choice(["raise", "nan", "memory"])
            (self.folder / what).write_text("as ordered")
            self.note("orders", what, {what})

    def run(self, seconds: float, sample) -> None:
        clients = [self.good, self.good, self.reusing, self.hostile, self.leaving, self.slow, self.healthy,
                   self.failing]
        ports = itertools.cycle([self.gateway.port, self.gateway.port, self.worker.port])

        def loop(client, port: int, seed: int) -> None:
            r = random.Random(seed)
            while not self.stop.is_set():
                try:
                    client(port, r)
                except Exception as error:  # whatever it is, it is a finding
                    self.note(client.__name__, repr(error), set())
                    self.stop.wait(0.5)

        threads = [threading.Thread(target=loop, args=(client, next(ports), seed), name=client.__name__)
                   for seed, client in enumerate(clients)]
        [thread.start() for thread in threads]
        end = time.monotonic() + seconds
        every = min(30.0, max(2.0, seconds / 30))
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(every, left))
            sample()
        self.stop.set()
        for thread in threads:
            thread.join(90)
            if thread.is_alive():
                self.wrong.append(f"{thread.name} hangs")


def warm_up(worker: Process, gateway: Process) -> None:
    """Bring both to the size that they then keep."""
    for body in [*largest(), GOOD_BODY]:
        together = [Asking(port, body) for port in (worker.port, gateway.port) for _ in range(PLACES // 2)]
        [request.result() for request in together]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", type=Path, help="an export; default: a demo checkpoint")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = Needed().parse(parser)
    with tempfile.TemporaryDirectory(prefix="jev-soak-") as scratch:
        folder = Path(scratch)
        model = args.model or folder / "model"
        if args.model is None:
            write_demo_checkpoint(model)
        worker = start_worker(folder, model, queue=PLACES)
        try:
            gateway = start_gateway(folder / "gateway", worker.url)
            try:
                return soak(folder, worker, gateway, args)
            finally:
                gateway.kill()
        finally:
            worker.kill()


def soak(folder: Path, worker: Process, gateway: Process, args: argparse.Namespace) -> int:
    warm_up(worker, gateway)
    run = Soak(folder, worker, gateway)
    before = {"worker": worker.footprint, "gateway": gateway.footprint}
    processes = {"worker": worker, "gateway": gateway}
    samples: list[dict] = []
    started = time.monotonic()
    print(f"{'seconds':>8}{'answers':>9}   "
          f"{'worker MiB':>10}{'fds':>5}{'threads':>8}   {'gateway MiB':>11}{'fds':>5}{'threads':>8}")

    def sample() -> None:
        now = {name: process.footprint for name, process in processes.items()}
        seconds, count = time.monotonic() - started, sum(run.seen.values())
        samples.append({"seconds": round(seconds, 1), "answers": count,
                        **{name: vars(footprint) for name, footprint in now.items()}})
        print(f"{seconds:8.0f}{count:9}   " + "   ".join(
            f"{f.resident / MIB:{width}.1f}{f.descriptors:5}{f.threads:8}" for f, width in zip(now.values(), (10, 11))),
            flush=True)

    sample()
    run.run(args.seconds, sample)
    for name, process in processes.items():
        def settled(process=process, then=before[name]) -> bool:
            now = process.footprint
            return now.descriptors <= then.descriptors + KEPT_CONNECTIONS and now.threads <= then.threads

        if not eventually(settled, 15):
            run.wrong.append(f"{name} holds {process.footprint}, and {before[name]} at the beginning")
        grown = process.footprint.resident - before[name].resident
        if grown > GROWTH_BYTES:
            run.wrong.append(f"{name} grew by {grown / MIB:.1f} MiB")
        quarter = len(samples) // 4
        if quarter >= 3:  # by then it has the size that it keeps
            third, last = (statistics.median(s[name]["resident"] for s in part)
                           for part in (samples[-2 * quarter : -quarter], samples[-quarter:]))
            print(f"{name}: {(last - third) / MIB:+.1f} MiB from the third quarter to the last (medians)")
            if last - third > STEADY_BYTES:
                run.wrong.append(f"{name} was still growing at the end")
    for what in ("raise", "nan", "memory"):
        (folder / what).unlink(missing_ok=True)
    good = {status: sum(run.seen[client, status] for client in ("good", "reusing")) for status in (200, 500, 503)}
    share = good[200] / max(1, sum(good.values()))
    print(f"good requests: {share:.1%} answered 200")
    if share < ANSWERED_SHARE:
        run.wrong.append(f"only {share:.1%} of the good requests were answered 200: {good}")
    if answers(ask(gateway.port)) != run.right:
        run.wrong.append("the last answer is not the first one's equal")
    sample()
    for (client, status), count in sorted(run.seen.items(), key=str):
        print(f"{client:>10} {status!s:<12}{count:8}")
    slowest = ", ".join(f"{client} {seconds:.2f} s" for client, seconds in run.slowest.items() if seconds)
    print(f"slowest: {slowest}")
    print("\n".join(["FAILED:", *run.wrong[:20]]) if run.wrong else "passed")
    if args.out:
        seen = [{"client": c, "result": s, "count": n} for (c, s), n in run.seen.items()]
        args.out.write_text(json.dumps({"seconds": args.seconds, "samples": samples, "seen": seen, "wrong": run.wrong},
                                       indent=2) + "\n")
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
