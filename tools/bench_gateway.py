"""What the gateway adds: the same requests to a worker directly and through `jev frontend`, on loopback.

    python tools/bench_gateway.py [--requests 2000] [--pause 0] [--out gateway.json]

The worker is a process that answers with a fixed response, at once or after a pause, so that nothing but transport is
measured. With the pause of a forward pass processors fall asleep between request and answer: "direct" is then what a
machine takes for any two processes, pause taken off, and no server is faster than that. Direct
and forwarded requests alternate in small blocks, which spreads whatever else the machine does over both. Each client
keeps one connection. "added" is the difference of the medians; the target is at most 0.5 ms in every case of one client,
and the exit status says whether it was met.
Needs nothing but this package and Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.plain_client import Client  # noqa: E402
from tools.tool import Needed, child  # noqa: E402

TARGET_MS = 0.5
BLOCK = 50
HEADERS = ("Authorization: Bearer 0123456789abcdef", "Accept: */*", "User-Agent: bench")

WORKER = r"""
import socket, sys, threading, time
pause = float(sys.argv[2])
reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n" \
        b"X-Request-Id: 0123456789abcdef\r\nContent-Length: %d\r\n\r\n" % int(sys.argv[1]) + b" " * int(sys.argv[1])
def serve(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            more = sock.recv(65536)
            if not more:
                return
            data += more
        head, _, data = data.partition(b"\r\n\r\n")
        length = next(int(l[15:]) for l in head.split(b"\r\n") if l.lower().startswith(b"content-length:"))
        while len(data) < length:
            data += sock.recv(65536)
        data = data[length:]
        if pause:
            time.sleep(pause)
        sock.sendall(reply)
listener = socket.create_server(("127.0.0.1", 0))
print("port", listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


def measure(ports: tuple[int, int], clients: int, body: bytes, requests: int, pause: float) -> list[list[float]]:
    """Latencies [direct, forwarded] in seconds less the pause; `requests` each, shared by the clients."""
    results: list[list[float]] = [[], []]
    size = min(BLOCK, requests // clients)

    def run(barrier: threading.Barrier) -> None:
        connections = [Client(port, *HEADERS) for port in ports]
        for block in range(-1, requests // (size * clients)):                # the first block warms up
            for connection, result in zip(connections, results):
                barrier.wait()
                latencies = [connection.post(body)[0] - pause for _ in range(size)]
                if block >= 0:
                    result.extend(latencies)
        for connection in connections:
            connection.socket.close()

    barrier = threading.Barrier(clients)
    threads = [threading.Thread(target=run, args=(barrier,)) for _ in range(clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return results


def summary(latencies: list[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    cuts = statistics.quantiles(latencies, n=100)
    return {f"p{p}_ms": round(1000 * cuts[p - 1], 3) for p in (10, 50, 90, 99)}


def start(command: list[str], said: str, **environ: str) -> tuple[subprocess.Popen, int]:
    """A process and its port: the number after `said` in its output, which nobody reads any further."""
    with tempfile.TemporaryFile("a+") as output:
        started = child(command, cwd=ROOT, env={**os.environ, **environ}, stdout=output, stderr=output)
        while started.poll() is None:
            output.seek(0)
            for line in output:
                if said in line and line.endswith("\n"):
                    return started, int(line.partition(said)[2].partition(",")[0])
            time.sleep(0.02)
    raise SystemExit(f"{' '.join(command[:4])} did not start")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="timed requests of each kind in each case")
    parser.add_argument("--pause", type=float, default=0, metavar="MS", help="milliseconds that the worker waits")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = Needed().parse(parser)
    if args.requests < BLOCK:
        parser.error(f"--requests: at least {BLOCK}")
    cases = []
    print(f"{'case':34}{'':10}{'p10':>9}{'median':>9}{'p90':>9}{'p99':>9}  ms")
    for name, sent, received, clients in (("2 KB in, 1 KB out, 1 client", 2000, 1000, 1),
                                          ("64 KB in, 16 KB out, 1 client", 64_000, 16_000, 1),
                                          ("2 KB in, 1 KB out, 8 clients", 2000, 1000, 8)):
        children = []
        try:
            command = [sys.executable, "-c", WORKER, str(received), str(args.pause / 1e3)]
            worker, worker_port = start(command, "port ")
            children.append(worker)
            gateway, port = start([sys.executable, "-m", "jev", "frontend"], "listening on http://127.0.0.1:",
                                  OMNI_JEV_BIND="127.0.0.1:0", OMNI_JEV_BACKEND_URL=f"http://127.0.0.1:{worker_port}")
            children.append(gateway)
            both = measure((worker_port, port), clients, b"x" * sent, args.requests, args.pause / 1e3)
        finally:
            for process in reversed(children):
                process.kill()
                process.wait(10)
        direct, forwarded = map(summary, both)
        added = round(forwarded["p50_ms"] - direct["p50_ms"], 3)
        for kind, figures in (("direct", direct), ("gateway", forwarded)):
            print(f"{name if kind == 'direct' else '':34}{kind:10}" + "".join(f"{v:9.3f}" for v in figures.values()))
        print(f"{'':34}{'added':10}{'':9}{added:9.3f}")
        cases.append({"case": name, "clients": clients, "bytes_in": sent, "bytes_out": received, "requests": len(both[0]),
                      "direct": direct, "gateway": forwarded, "added_median_ms": added})
    judged = [case for case in cases if case["clients"] == 1]
    for case in judged:
        case["met"] = case["added_median_ms"] <= TARGET_MS
        print(f"target: at most {TARGET_MS} ms added: {'met' if case['met'] else 'MISSED'} for {case['case']}")
    met = all(case["met"] for case in judged)
    if args.out:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
        args.out.write_text(json.dumps({"machine": machine, "pause_ms": args.pause, "target_ms": TARGET_MS, "met": met,
                                        "cases": cases}, indent=2) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
