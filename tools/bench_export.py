"""Time and peak memory of an export with the real tensor shapes, over a synthetic base.

The base is sparse: shards of the real layout whose data are holes, which cost no disk and read as zeros. So the time is
that of merging and writing, without the time to read a base from a disk; the peak memory is the real one (the export
runs in a process of its own, and its tokenizer has as many tokens as the real one). The output takes its full size on
the disk, 51 GB for all 64 layers of 27B; ``--layers`` does fewer. Needs the extra ``export``.

    python tools/bench_export.py --model 27b --layers 16 --work /scratch
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jev.checkpoint import pinned  # noqa: E402
from jev.checkpoint.config import ModelConfig  # noqa: E402
from jev.checkpoint.demo import CHAT_TEMPLATE, demo_tokenizer  # noqa: E402
from jev.checkpoint.pinned import Pinned  # noqa: E402
from jev.checkpoint.weight_files import INDEX_FILE  # noqa: E402
from jev.export.command import main as export  # noqa: E402
from jev.export.lora import TARGET_NAMES, TARGETS  # noqa: E402
from jev.export.writer import plan_shards  # noqa: E402
from tools.tool import Needed  # noqa: E402

SOURCES = {"27b": pinned.PINNED[0], "9b": pinned.PINNED[1]}
VOCAB = 248320
BASE_SHARD = 4 * 10**9


def text_config(source: Pinned, layers: int) -> dict:
    """config.json's text part with the pinned dimensions, for ``layers`` layers."""
    d = source.dims
    return {"model_type": "qwen3_5_text", "hidden_size": d["hidden_size"], "intermediate_size": d["intermediate_size"],
            "num_hidden_layers": layers, "full_attention_interval": 4, "vocab_size": VOCAB,
            "num_attention_heads": d["num_attention_heads"], "num_key_value_heads": d["num_key_value_heads"],
            "head_dim": d["head_dim"], "linear_num_key_heads": d["linear_num_key_heads"],
            "linear_num_value_heads": d["linear_num_value_heads"], "linear_key_head_dim": d["linear_key_head_dim"],
            "linear_value_head_dim": d["linear_value_head_dim"], "linear_conv_kernel_dim": d["conv_kernel"],
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000000,
                                                      "partial_rotary_factor": 0.25}}


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str, item: int) -> None:
    """A safetensors file whose data are one hole."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = item * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)


def write_sparse_shards(folder: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """BF16 tensors as sparse shards with their index; returns the bytes of the shards."""
    plan = plan_shards(shapes, BASE_SHARD)
    weight_map, total = {}, 0
    for i, shard in enumerate(plan):
        name = f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors"
        write_sparse(folder / name, shard, "BF16", 2)
        weight_map |= dict.fromkeys(shard, name)
        total += (folder / name).stat().st_size
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def large_tokenizer() -> str:
    """The demo's tokenizer with as many tokens and merges as the real one."""
    tokenizer = json.loads(demo_tokenizer().to_str())
    model = tokenizer["model"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocab = {token: i for token, i in model["vocab"].items() if len(token) == 1}
    merges = []
    for length in (2, 3, 4):
        for word in itertools.product(letters, repeat=length):
            if len(vocab) < VOCAB - 276:
                vocab["".join(word)] = len(vocab)
                merges.append(["".join(word[:-1]), word[-1]])
    model["vocab"], model["merges"] = vocab, merges
    for i, token in enumerate(tokenizer["added_tokens"]):
        token["id"] = len(vocab) + i
    return json.dumps(tokenizer)


def write_inputs(folder: Path, source: Pinned, layers: int, rank: int) -> None:
    """base/ and checkpoint/ as downloaded, sparse."""
    import torch
    text = text_config(source, layers)
    config = ModelConfig.from_json(text)
    base, trained = folder / "base", folder / "checkpoint"
    base.mkdir()
    (trained / "adapter").mkdir(parents=True)
    write_sparse_shards(base, {f"model.language_model.{name}": shape for name, shape in config.tensor_shapes().items()})
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    (base / "tokenizer.json").write_text(large_tokenizer())
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (base / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (base / "revision").write_text(source.base_revision)
    matrices = {}
    for i, kind in enumerate(config.layer_types):
        for module in TARGETS[kind]:
            outer, inner = config.tensor_shapes()[f"layers.{i}.{module}.weight"]
            name = f"base_model.model.layers.{i}.{module}.lora_"
            matrices |= {f"{name}A.weight": (rank, inner), f"{name}B.weight": (outer, rank)}
    write_sparse(trained / "adapter/adapter_model.safetensors", matrices, "F32", 4)
    (trained / "adapter/adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(TARGET_NAMES)}))
    (trained / "model.json").write_text(json.dumps({
        "model_id": source.model_id, "revision": source.base_revision, "max_length": 4096, "lora_rank": rank}))
    (trained / "temperature.json").write_text('{"temperature": 2.5}')
    (trained / "revision").write_text(source.checkpoint_revision)
    torch.save({"weight": torch.zeros(1, config.hidden_size), "bias": torch.zeros(1)}, trained / "head.pt")


def run_export(folder: Path, source: Pinned, layers: int) -> int:
    """The export itself. Only the pinned number of layers is changed, and only if asked for."""
    dims = {**source.dims, "num_layers": layers}
    pinned.PINNED = (replace(source, dims=dims),)
    return export([f"--{name}={folder / name}" for name in ("base", "checkpoint", "out")])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SOURCES, default="27b")
    parser.add_argument("--layers", type=int, help="a multiple of 4 (default: all of them)")
    parser.add_argument("--rank", type=int, default=64, help="of the adapter (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="folder with room for the output (default: the temporary folder)")
    parser.add_argument("--inner", type=Path, help=argparse.SUPPRESS)
    with Needed() as needed:
        import torch  # noqa: F401 (for the adapter, and in the export)
    arguments = needed.parse(parser)
    source = SOURCES[arguments.model]
    layers = arguments.layers or source.dims["num_layers"]
    if arguments.inner:
        return run_export(arguments.inner, source, layers)
    folder = Path(tempfile.mkdtemp(prefix="bench_export_", dir=arguments.work))
    try:
        write_inputs(folder, source, layers, arguments.rank)
        started = time.monotonic()
        status = subprocess.run([sys.executable, __file__, "--model", arguments.model, "--layers", str(layers),
                                 "--inner", str(folder)]).returncode
        seconds = time.monotonic() - started
        if status == 0:
            size = sum(file.stat().st_size for file in (folder / "out").iterdir())
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            print(json.dumps({"model": source.title, "layers": layers, "rank": arguments.rank,
                              "output_gb": round(size / 1e9, 2), "seconds": round(seconds, 1),
                              "mb_per_second": round(size / 1e6 / seconds), "peak_rss_gb": round(peak / 1e9, 2)}))
        return status
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
