"""Start-up of the worker with the real tensor shapes: from the process's start to the first 200 of /health. Needs a GPU.

    python tools/bench_start.py --model 27b --work /scratch --json start.json

The export is sparse (tools/bench_export.py): its weights are holes, which take no disk and read as zeros, so a start
after the first finds them in the page cache as it would real ones. Each start is a process of its own, `jev serve`; the
first also compiles kernels and times GEMMs unless an earlier run has left them in the cache folder.
"""
from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import urllib3

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jev.checkpoint.config import CONFIG_FILE, ModelConfig  # noqa: E402
from jev.checkpoint.manifest import MANIFEST_FILE, Manifest  # noqa: E402
from tools.bench_export import SOURCES, text_config, write_sparse_shards  # noqa: E402
from tools.synthetic_worker import CHAT_PREFIX, CHAT_SUFFIX, real_tokenizer  # noqa: E402
from tools.tool import Needed, child  # noqa: E402


def write_export(folder: Path, model: str) -> int:
    """A sparse export of the model's real shapes; returns the bytes of its weights."""
    source = SOURCES[model]
    text = text_config(source, source.dims["num_layers"])
    folder.mkdir()
    total = write_sparse_shards(folder, ModelConfig.from_json(text).tensor_shapes())
    (folder / CONFIG_FILE).write_text(json.dumps(text))
    real_tokenizer(folder / "tokenizer.json")
    head = (0.01,) * text["hidden_size"]
    manifest = Manifest(source.model_id, source.base_revision, source.checkpoint_revision, 2.5, 4096, CHAT_PREFIX,
                        CHAT_SUFFIX, head, 0.0)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest.to_json()))
    return total


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def start(folder: Path, port: int) -> tuple[float, str]:
    """(seconds until the worker is ready, what it said). Raises SystemExit if it does not start."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryFile("w+") as said:
        started = time.perf_counter()
        worker = child([sys.executable, "-m", "jev", "serve", "--model", str(folder), "--port", str(port),
                        "--backend", "cuda"], stdout=said, stderr=said, env=environment)
        http = urllib3.PoolManager(retries=False)
        ready = False
        while not ready and worker.poll() is None:
            try:
                ready = http.request("GET", f"http://127.0.0.1:{port}/health", timeout=5).status == 200
            except urllib3.exceptions.HTTPError:
                time.sleep(0.05)
        seconds = time.perf_counter() - started
        worker.terminate()
        worker.wait(60)
        said.seek(0)
        text = said.read()
        if not ready:
            raise SystemExit(f"the worker did not start:\n{text[-2000:]}")
        return seconds, text


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SOURCES, default="27b")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for the sparse export; default: the system's temporary one")
    parser.add_argument("--json", type=Path)
    args = Needed().parse(parser, argv, gpu=True)
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        size = write_export(Path(work) / "export", args.model)
        print(f"{args.model}: {size / 1e9:.2f} GB of weights")
        seconds = []
        for i in range(args.starts):
            took, said = start(Path(work) / "export", free_port())
            seconds.append(took)
            print(f"start {i + 1}: ready after {took:.1f} s", flush=True)
        print("\n".join(line for line in said.splitlines() if " s" in line or "backend" in line))
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "bytes": size, "seconds": seconds, "said": said}, indent=1))


if __name__ == "__main__":
    main()
