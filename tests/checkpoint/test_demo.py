"""The demo checkpoint: complete, the same every time, and a model whose scores depend on what it reads."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time

import numpy as np
import pytest
from tokenizers import Tokenizer

from jev import cli
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.demo import CHAT_PREFIX, CHAT_SUFFIX, VOCAB_SIZE, write_demo_checkpoint
from jev.checkpoint.opening import open_export
from jev.model.numpy_backbone import NumpyBackbone
from jev_kernels import bf16


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "demo"
    started = time.monotonic()
    write_demo_checkpoint(path)
    assert time.monotonic() - started < 10
    return open_export(path)


def digest(path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def test_it_is_small_and_marked(demo):
    assert sum(file.stat().st_size for file in demo.path.iterdir()) < 40e6
    assert json.loads((demo.path / "open_jev_export.json").read_text())["demo"] is True
    assert demo.demo and demo.manifest.model_id == "open-jev-demo"
    assert not demo.path.with_name("demo.unfinished").exists()


def test_it_exercises_what_the_real_ones_have(demo):
    c = demo.config
    assert set(c.layer_types) == {"linear_attention", "full_attention"} and 4 <= c.num_layers <= 8
    assert c.layer_types.count("linear_attention") == 3 * c.layer_types.count("full_attention")
    assert (c.head_dim, c.rotary_dim, c.linear_key_head_dim, c.linear_value_head_dim) == (256, 64, 128, 128)
    assert c.num_attention_heads > c.num_key_value_heads > 1
    assert c.linear_num_value_heads == 3 * c.linear_num_key_heads > 3
    assert c.hidden_size % 64 == 0 and c.intermediate_size % 64 == 0


def test_the_same_seed_gives_the_same_files(demo, tmp_path):
    write_demo_checkpoint(tmp_path / "again")
    assert digest(tmp_path / "again") == digest(demo.path)
    write_demo_checkpoint(tmp_path / "other", seed=1)
    changed = {name for name, sha in digest(tmp_path / "other").items() if sha != digest(demo.path)[name]}
    assert changed == {"model.safetensors", "open_jev_export.json", "SHA256SUMS"}


def test_its_tokenizer(demo, tokenization_vectors):
    assert (CHAT_PREFIX, CHAT_SUFFIX) == (tokenization_vectors["chat_prefix"], tokenization_vectors["chat_suffix"])
    tokenizer = Tokenizer.from_file(str(demo.tokenizer_file))
    assert tokenizer.get_vocab_size() < VOCAB_SIZE == demo.config.vocab_size
    for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"):
        assert tokenizer.encode(name).ids == [tokenizer.token_to_id(name)]
    assert tokenizer.encode("a <|im_end|> b<|im_end|>").tokens.count("<|im_end|>") == 2
    prompt = CHAT_PREFIX + "Is the parcel damaged?" + CHAT_SUFFIX
    for text in (prompt, "naïve 東京 \U0001F600\r\n\t  x", "123 don't\n\n\n"):
        ids = tokenizer.encode(text).ids
        assert max(ids) < VOCAB_SIZE and tokenizer.decode(ids, skip_special_tokens=False) == text
    # NFC, digits one by one, words in few tokens
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids
    assert tokenizer.encode("123").tokens == ["1", "2", "3"]
    assert len(tokenizer.encode("Which queue should take this parcel now?").ids) <= 10


def test_hidden_states_keep_their_scale_and_scores_follow_the_prompt(demo):
    tokenizer = Tokenizer.from_file(str(demo.tokenizer_file))
    state = "Context:\nThe parcel left the depot on {}.\n\nQuestion: {}\nProposed answer: {}\n" \
            "Is this proposed answer correct? Answer Yes or No."
    prompts = [state.format(day, question, option) for day in ("Tuesday", "Friday evening")
               for question in ("Which queue?", "How urgent is it?") for option in ("air", "very urgent")]
    ids = [np.array(tokenizer.encode(CHAT_PREFIX + p + CHAT_SUFFIX).ids, np.int32) for p in prompts]
    hidden, rows, _ = NumpyBackbone(demo).hidden(ids)
    assert rows < sum(map(len, ids))
    rms = np.sqrt(np.square(bf16.to_float32(hidden)).mean(axis=1))
    assert (rms > 0.5).all() and (rms < 2).all()
    scores = demo.head.score(hidden)
    assert len(set(scores.tolist())) == len(prompts) and scores.std() > 0.3 and np.abs(scores).max() < 15
    assert abs(scores[0] - scores[4]) > 0.01  # one word near the beginning reaches the last position


def test_overwriting(demo, tmp_path):
    path = shutil.copytree(demo.path, tmp_path / "demo")
    with pytest.raises(CheckpointError, match="already exists"):
        write_demo_checkpoint(path)
    write_demo_checkpoint(path, seed=3, overwrite=True)
    assert digest(path) != digest(demo.path) and open_export(path).demo
    write_demo_checkpoint(tmp_path / "new" / "demo", overwrite=True)  # nothing to overwrite: folders are made
    assert digest(tmp_path / "new" / "demo") == digest(demo.path)


@pytest.mark.parametrize("manifest", ["[]", "7", "null", '"demo"', "[" * 50000, "{", '{"demo": 1}'])
def test_whatever_stands_in_the_manifest_is_no_traceback(tmp_path, capsys, manifest):
    (tmp_path / "open_jev_export.json").write_text(manifest)
    assert cli.main(["demo-checkpoint", str(tmp_path), "--overwrite"]) == 1
    assert re.match(r"jev: /.*(is not a demo checkpoint, so|is not valid JSON)", capsys.readouterr().err)
    assert (tmp_path / "open_jev_export.json").read_text() == manifest


def test_only_a_demo_is_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "open_jev_export.json").write_text('{"model_id": "Qwen/Qwen3.5-9B"}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("thesis", "empty", "file"):
        with pytest.raises(CheckpointError, match="not a demo checkpoint"):
            write_demo_checkpoint(tmp_path / name, overwrite=True)
    assert (tmp_path / "thesis" / "open_jev_export.json").exists() and (tmp_path / "file").read_text() == "mine"
