"""Manifests that are refused, each naming its field."""

from __future__ import annotations

import pytest

from jev.checkpoint.pinned import PINNED
from tests.checkpoint.refusals import MANIFEST, refuses
from tests.export_inputs import edit_json

LARGE = dict(model_id=PINNED[0].model_id, base_revision=PINNED[0].base_revision,
             checkpoint_revision=PINNED[0].checkpoint_revision, demo=None)


@pytest.mark.parametrize("changes, words", [
    ({"format": "open-jev-text-merged/2"}, ["format", "open-jev-text-merged/1"]),
    ({"format": None}, ["format", "is missing"]),
    ({"demo": None}, ["demo"]),
    ({"demo": "yes"}, ["demo"]),
    ({"model_id": "Qwen/Qwen3.5-4B", "demo": None}, ["model_id", "Qwen/Qwen3.8-27B", "Qwen/Qwen3.5-4B"]),
    (LARGE | {"demo": True}, ["demo"]),
    (LARGE | {"base_revision": "0" * 40}, ["base_revision", PINNED[0].base_revision, "0" * 40]),
    (LARGE | {"base_revision": PINNED[1].base_revision}, ["base_revision"]),
    (LARGE | {"base_revision": None}, ["base_revision", "is missing"]),
    (LARGE | {"checkpoint_revision": "main"}, ["checkpoint_revision", "main"]),
    ({"base_revision": "other"}, ["base_revision"]),
    ({"temperature": 0}, ["temperature", "positive"]),
    ({"temperature": -1.5}, ["temperature"]),
    ({"temperature": "2"}, ["temperature"]),
    ({"temperature": True}, ["temperature"]),
    ({"temperature": float("inf")}, ["temperature", "inf"]),
    ({"temperature": 10**400}, ["temperature"]),
    ({"max_length": 0}, ["max_length", "1..16384"]),
    ({"max_length": 16385}, ["max_length"]),
    ({"max_length": 4096.0}, ["max_length"]),
    ({"chat_prefix": None}, ["chat_prefix", "is missing"]),
    ({"chat_prefix": "<|im_start|>\ud800"}, ["chat_prefix", "lone surrogate"]),    # no tokenizer takes it
    ({"chat_suffix": 3}, ["chat_suffix"]),
    ({"head_weight": [0.5] * 255}, ["head_weight", "expected 256 numbers, found 255"]),
    ({"head_weight": []}, ["head_weight"]),
    ({"head_weight": "x"}, ["head_weight"]),
    ({"head_weight": [0.5] * 254 + [float("nan"), 0.5]}, ["head_weight[254]", "nan"]),
    ({"head_weight": [0.5] * 255 + [1e39]}, ["head_weight[255]", "float32"]),
    ({"head_weight": [0.5] * 255 + [True]}, ["head_weight"]),
    ({"head_bias": float("-inf")}, ["head_bias", "-inf"]),
    ({"head_bias": None}, ["head_bias", "is missing"]),
    ({"head_bias": "0"}, ["head_bias"]),
])
def test_manifests_that_are_refused(export, changes, words):
    edit_json(export / MANIFEST, **changes)
    refuses(export, MANIFEST, *words)
