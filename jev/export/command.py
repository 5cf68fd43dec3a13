"""``jev export``: a pinned checkpoint merged into its base model, everything checked before the first byte is written.

The reference way loads the whole model and calls ``merge_and_unload(safe_merge=True)``: 110 GB of RAM for 27B. Here
each tensor is read from the base's shards, merged if the adapter has it, rounded, written and forgotten; what is in
memory at once is one LoRA target in float32, well under 2 GB for 27B.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

from jev.arguments import Parser, integer
from jev.checkpoint.checked_json import CheckpointError, Fields, read_json
from jev.checkpoint.config import CONFIG_FILE, ModelConfig, check_dims
from jev.checkpoint.manifest import MAX_LENGTH_LIMIT, Manifest
from jev.checkpoint.opening import TOKENIZER_FILE
from jev.checkpoint.pinned import PINNED, pinned
from jev.checkpoint.weight_files import text_tensors
from jev.export.inputs import chat_frame, read_head
from jev.export.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_factors, read_adapter
from jev.export.merge import merged_pieces
from jev.export.pieces import bf16_pieces
from jev.export.revision import known_revision
from jev.export.signals import Ended, raising_signals
from jev.export.writer import SHARD_BYTES, UNFINISHED, check_target, write_export

TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json")
CHECKPOINT_FILES = ("model.json", "head.pt", "temperature.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS)


def export_merged(base: str | Path, checkpoint: str | Path, out: str | Path, max_length: int = 4096,
                  shard_bytes: int = SHARD_BYTES) -> None:
    """Merge a pinned checkpoint into its base and write the export ``out``; everything is checked before that begins.

    base: downloaded base model. checkpoint: folder with model.json, head.pt, temperature.json and adapter/.
    max_length: tokens of a prompt that the worker will accept, 1..16384. Raises CheckpointError.
    """
    base, checkpoint = Path(base), Path(checkpoint)
    check_target(out)
    if not 1 <= max_length <= MAX_LENGTH_LIMIT:
        raise CheckpointError(f"--max-length: expected 1..{MAX_LENGTH_LIMIT} tokens, found {max_length}")
    for folder in (base, checkpoint):
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
    model = Fields(str(checkpoint / "model.json"), read_json(checkpoint / "model.json"))
    source = pinned(model.text("model_id"))
    if source is None:
        raise model.refuse("model_id", f"expected {' or '.join(p.model_id for p in PINNED)}, "
                                       f"found {model.data['model_id']!r:.60}")
    if model.text("revision") != source.base_revision:
        raise model.refuse("revision", f"{source.title} was trained on {source.base_revision} of {source.model_id}, "
                                       f"found {model.data['revision']!r:.60}")
    base_json = read_json(base / CONFIG_FILE)
    config = ModelConfig.from_json(base_json, str(base / CONFIG_FILE))
    check_dims(config, source, str(base / CONFIG_FILE))
    tensors = text_tensors(base, config, ("BF16", "F32", "F16"))
    shards = {entry.path.name for entry in tensors.values()}
    files = {name: (base / name).read_bytes() for name in TOKENIZER_FILES if (base / name).is_file()}
    if TOKENIZER_FILE not in files:
        raise CheckpointError(f"{base / TOKENIZER_FILE}: is missing")
    for folder, names, repo, revision in (
            (base, [CONFIG_FILE, *files, *sorted(shards)], source.model_id, source.base_revision),
            (checkpoint, CHECKPOINT_FILES, source.checkpoint_repo, source.checkpoint_revision)):
        found = known_revision(folder, names, repo)
        if found != revision:
            raise CheckpointError(f"{folder}: is revision {found} of {repo}; {source.title} needs {revision}")
    temperature = Fields(str(checkpoint / "temperature.json"), read_json(checkpoint / "temperature.json"))
    adapter = read_adapter(checkpoint, config, model.integer("lora_rank"))
    weight, bias = read_head(checkpoint / "head.pt", config.hidden_size)
    prefix, suffix = chat_frame(base)
    check_factors(adapter)
    manifest = Manifest(source.model_id, source.base_revision, source.checkpoint_revision,
                        temperature.number("temperature"), max_length, prefix, suffix, tuple(weight), bias)
    text = base_json.get("text_config", base_json)
    # What Transformers would fill in is written out: other readers of the format look for it.
    rope = {"rope_type": "default", "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_dim / config.head_dim}
    config_json = {"hidden_act": "silu", "max_position_embeddings": 32768, **text,
                   "layer_types": list(config.layer_types),
                   "rope_parameters": {**(text.get("rope_parameters") or text.get("rope_scaling") or {}), **rope},
                   "architectures": ["Qwen3_5TextModel"], "model_type": "qwen3_5_text", "dtype": "bfloat16"}
    config_json.pop("rope_scaling", None)
    from tqdm import tqdm
    total = sum(2 * math.prod(entry.shape) for entry in tensors.values())
    with tqdm(total=total, desc=source.title, unit="B", unit_scale=True) as bar:
        stream = ((name, merged_pieces(name, entry, adapter) if name in adapter.pairs else bf16_pieces(entry))
                  for name, entry in tensors.items())
        write_export(out, config_json, stream, manifest, files, shard_bytes=shard_bytes, progress=bar.update)


def main(argv: list[str] | None = None) -> int:
    """``jev export``: returns the exit status."""
    parser = Parser(prog="jev export", description="Merge a pinned Open-Jev checkpoint into its base "
                                     "model and write the folder that the worker serves.")
    parser.add_argument("--base", required=True, type=Path, help="folder of the downloaded base model")
    parser.add_argument("--checkpoint", required=True, type=Path,
                        help="folder with model.json, head.pt, temperature.json and adapter/")
    parser.add_argument("--out", required=True, type=Path, help="folder to make; must not exist")
    parser.add_argument("--max-length", type=integer(1, MAX_LENGTH_LIMIT), default=4096,
                        help=f"most tokens of one prompt, up to {MAX_LENGTH_LIMIT} (default: %(default)s)")
    arguments = parser.parse_args(argv)
    with raising_signals():
        try:
            export_merged(arguments.base, arguments.checkpoint, arguments.out, arguments.max_length)
        except (CheckpointError, OSError) as error:
            print(f"jev export: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt as error:
            work = f"{os.path.abspath(arguments.out)}{UNFINISHED}"
            left = f"{work} is there, unfinished: remove it" if os.path.lexists(work) else "nothing unfinished is left"
            print(f"jev export: interrupted; {left}", file=sys.stderr)
            return 128 + (error.number if isinstance(error, Ended) else signal.SIGINT)
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
