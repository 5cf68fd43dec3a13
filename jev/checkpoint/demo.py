"""A complete export of a tiny seeded model, so that everything can be run without downloading a real one.

It has the shape of the real checkpoints in small: both kinds of layers in the proportion 3 : 1, attention heads of 256
dimensions in groups that share a KV head, linear heads of 128 with three value heads to a key head (as in 27B), and a
byte-level BPE tokenizer with Qwen's pre-tokenization, special tokens and chat template. Its weights are random: its
answers depend on the input and mean nothing, and the manifest says ``"demo": true``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jev.checkpoint.checked_json import CheckpointError, read_json
from jev.checkpoint.config import ModelConfig
from jev.checkpoint.manifest import MANIFEST_FILE, Manifest
from jev.checkpoint.pinned import DEMO
from jev.export.writer import write_export
from jev.processor import QWEN3_5_SPLIT
from jev_kernels import bf16

CHAT_PREFIX = "<|im_start|>user\n"
CHAT_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_TOKENS = ("<think>", "</think>")  # recognised whole, but ordinary text to a decoder
VOCAB_SIZE = 1280  # rows of the embedding; the tokenizer has fewer, as the real one does
TEMPERATURE = 2.5
HEAD_BIAS = 7.25  # puts the scores of seed 0 on both sides of zero
MAX_LENGTH = 4096

# How Qwen3.5's tokenizer cuts text before merging bytes: contractions, words with their marks, digits one by one,
# punctuation, line ends, spaces.

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content | trim) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

# What the tokenizer learns its merges from: enough English for prompts to be a few tokens a word.
TRAINING_TEXT = """\
user
assistant

Context:
Question: Is the answer to this question yes? Answer Yes or No.
Proposed answer: Is this proposed answer correct? Answer Yes or No.
Yes means: No means: {"subject": "status", "from": "to", "amount": 120, "items": ["first", "second"], "open": true}
The parcel left the depot on Tuesday and should arrive before the weekend. The driver called twice, but nobody was at
home, so the parcel went back to the depot. Which queue should take this parcel now? It can travel by air, by road or
by sea. Is the parcel damaged? Handle it with care: there is glass inside. Keep it upright and keep it dry.
A customer writes that the invoice is wrong. The invoice shows two seats, yet the customer has paid for one. Please
check the account, correct the amount and send a new invoice. Should this message go to billing, to support or to
sales? The customer is angry, because this is the third message about the same problem in one month. How urgent is it?
Not urgent at all, somewhat urgent, urgent, very urgent. When the answer is not known, ask a person to look at it.
The server stopped answering at night. The disk was full, and the log shows that a backup had been running for hours.
Restart the service, remove the old files and add a warning when less than ten percent of the disk is free. Was any
data lost? The last good copy is from Monday morning. Everyone on the team has been told what happened and when.
She asked whether the meeting could be moved to Thursday afternoon. He said that Thursday would be fine, though the
room on the second floor is taken until three. They will meet in the small room instead, and somebody will bring the
plans. Does the reply accept the new time? Does it mention the place? Who still has to be told about the change?
The weather will be cold and clear today, with strong wind near the coast. Rain is expected tomorrow from the west.
Roads in the hills may be closed, so trains are the better choice for long journeys. Would you still travel by car?
A good recipe begins with fresh bread, soft cheese, a little salt and one green apple. Wash the apple, cut it into
thin slices and put them on the bread. Warm it for five minutes. Serve at once. Is this meal suitable for children?
The agent opened the page, filled in the form and pressed the button. The page did not change. Next action: click,
type, scroll, wait, go back, or finish. The goal is to book a table for four people at seven on Friday evening. The
button says that no table is free at this hour. Choose the next action that brings the goal closer, or stop here.
Read the whole text first. Then compare each option with what the text says, not with what it could have said. An
option is correct when the text supports it, and wrong when the text denies it or says nothing about it.
"""


def demo_config() -> dict[str, Any]:
    """``config.json`` of the demo model."""
    return {
        "architectures": ["Qwen3_5TextModel"], "model_type": "qwen3_5_text", "dtype": "bfloat16",
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": VOCAB_SIZE,
        "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "mrope_interleaved": True},
        "tie_word_embeddings": False,
    }


def demo_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer trained on ``TRAINING_TEXT``; the same on every run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN3_5_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 64, min_frequency=1, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINK_TOKENS])
    return tokenizer


def demo_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Random BF16 weights, one tensor after another, as ``write_export`` takes them.

    Matrices keep the variance of what they multiply; the two that write to the residual stream are damped so that the
    stream stays near 1 over all layers, yet far enough from zero that the last position hears of the whole prompt.
    """
    rng = np.random.default_rng(seed)
    for name, shape in config.tensor_shapes().items():
        noise = rng.standard_normal(shape, np.float32)
        if name.endswith("A_log"):  # half-lives from a few tokens to hundreds
            values = rng.uniform(np.log(0.005), np.log(0.5), shape).astype(np.float32)
        elif name.endswith("linear_attn.norm.weight"):
            values = 1 + 0.1 * noise
        elif name.endswith("conv1d.weight"):
            values = 0.5 * noise
        elif len(shape) == 1:  # the other norms multiply by 1 + w
            values = 0.1 * noise
        elif name == "embed_tokens.weight":
            values = 0.5 * noise
        else:
            damping = 0.5 if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
            values = noise * np.float32(damping / np.sqrt(shape[1]))
        yield name, [bf16.from_float32(values)]


def write_demo_checkpoint(path: str | Path, seed: int = 0, overwrite: bool = False) -> None:
    """Write the demo export to ``path`` (about 25 MB); ``seed`` decides the weights and the head.

    ``overwrite`` replaces an earlier demo there, and nothing else. Raises CheckpointError.
    """
    path = Path(path)
    if overwrite and path.exists():
        existing = path / MANIFEST_FILE
        manifest = read_json(existing) if existing.exists() else None
        if not isinstance(manifest, dict) or manifest.get("demo") is not True:
            raise CheckpointError(f"{path}: is not a demo checkpoint, so it will not be overwritten")
    config_json = demo_config()
    config = ModelConfig.from_json(config_json)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                        "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
                        "model_max_length": 32768, "chat_template": CHAT_TEMPLATE}
    head = np.random.default_rng([seed, 1]).standard_normal(config.hidden_size, np.float32)
    head *= np.float32(4 / np.sqrt(config.hidden_size))
    manifest = Manifest(DEMO.model_id, DEMO.base_revision, DEMO.checkpoint_revision, TEMPERATURE, MAX_LENGTH,
                        CHAT_PREFIX, CHAT_SUFFIX, tuple(head.tolist()), HEAD_BIAS, demo=True)
    files = {"tokenizer.json": demo_tokenizer().to_str().encode(),
             "tokenizer_config.json": json.dumps(tokenizer_config, indent=2).encode()}
    write_export(path, config_json, demo_tensors(config, seed), manifest, files, replace_existing=overwrite)
