"""Request bodies that somebody might send to do harm, from a seed, each with the statuses that may answer it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

REFUSED = {422}

# What chat templates and tokenizers treat specially. In a state it is text like any other.
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<|vision_start|>", "<tool_call>",
           "{{ messages }}", "{% for x in y %}", "\\u0000", "\u202e\u200b\ufeff", "\U0001f469\u200d\U0001f680"]


def good(state: object = "x", **question: object) -> dict:
    return {"state": state, "questions": {"q": {"type": "noul", "instructions": "y", **question}}}


def nested(r: random.Random) -> bytes:
    depth = r.choice([128, 500, 5000, 100_000])
    opening, closing = r.choice([(b"[", b"]"), (b'{"a":', b"}")])
    middle = b"1" if opening == b'{"a":' else b""
    return b'{"state": ' + opening * depth + middle + closing * r.choice([depth, depth - 1, 0]) + b', "questions": {}}'


def number(r: random.Random) -> bytes:
    text = r.choice(["1e400", "-1e999", "9" * 5000, "1" + "0" * 400 + ".5e9999", "NaN", "Infinity", "-Infinity", "01",
                     "1.", ".5", "+1", "0x10", "1e", "--1", "1_000", "\u0661"])
    where = r.choice(['{"state": {"n": %s}, "questions": {}}', '{"state": [%s], "questions": {"q": %s}}', "%s"])
    return where.replace("%s", text).encode()


def long_keys(r: random.Random) -> bytes:
    key = r.choice(["k", "\u00e9", "\U0001f600"]) * r.choice([10_000, 100_000])
    question = {"type": r.choice(["nul", key]), "instructions": "y"}
    return json.dumps({"state": "x", "questions": {key: question}}).encode()


def repeated_keys(r: random.Random) -> bytes:
    return r.choice([b'{"state": 1, "state": 2, "questions": {}}',
                     b'{"state": "x", "questions": {"q": {"type": "noul", "type": "noul", "instructions": "y"}}}',
                     b'{"state": {"a": {"b": 1, "b": 1}}, "questions": {"q": {"type": "noul", "instructions": "y"}}}',
                     b'{"state": "x", "questions": {"q": {"type": "noul", "instructions": "y"}, "\\u0071": {}}}'])


def bad_text(r: random.Random) -> bytes:
    piece = r.choice([b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\x1f", b"\n",
                      b"\\ud800", b"\\udc00\\ud800", b"\\x41", b"\\u12", b"\\"])
    return b'{"state": "a' + piece + b'x", "questions": {"q": {"type": "noul", "instructions": "y"}}}'


def truncated(r: random.Random) -> bytes:
    whole = json.dumps(good(r.choice(SPECIAL))).encode()
    return whole[: r.randrange(len(whole))]


def flipped(r: random.Random) -> bytes:
    """A good body with bytes changed, so that it may be anything, even good."""
    whole = bytearray(json.dumps(good()).encode())
    for _ in range(r.randrange(1, 4)):
        whole[r.randrange(len(whole))] = r.randrange(256)
    return bytes(whole)


def noise(r: random.Random) -> bytes:
    return r.randbytes(r.choice([0, 1, 10, 1000, 50_000]))


def wrong_shape(r: random.Random) -> bytes:
    wrong = [None, True, 0, -1, 1.5]
    value = good()
    target = r.choice([value, value["questions"], value["questions"]["q"]])
    name = r.choice([*target, "criteria"])
    target[name] = r.choice(wrong)
    if name == "criteria":
        value["questions"]["q"]["type"] = r.choice(["choice", "score", "Choice", "noul "])
    elif name in ("questions", "q", "type"):
        target[name] = r.choice([*wrong, "", "x", [], {}, [[]], {"": ""}, [None] * 50])
    return json.dumps(value).encode()


def other_documents(r: random.Random) -> bytes:
    return r.choice([b"", b" ", b"null", b"[]", b'"x"', b"1", b"{}", b"\xef\xbb\xbf{}", b"{}{}", b"{} x", b"{'a': 1}",
                     b"<xml/>", b"a=1&b=2", b"{", b"}", b"[", b",", b"//", b"\x00", b"\x1f\x8b\x08\x00", b"{\"a\":}"])


def many(r: random.Random) -> bytes:
    """Too many questions, options or levels."""
    question = {"type": "choice", "instructions": "y", "criteria": {f"o{i}": None for i in range(256)}}
    levels = {"type": "score", "instructions": "y", "criteria": ["x"] * r.choice([1, 11, 3000])}
    few = {"type": "choice", "instructions": "y", "criteria": {}}
    return json.dumps({"state": "x", "questions": {"q": r.choice([question, levels, few])}}).encode()


def special_text(r: random.Random) -> bytes:
    """Good, however it looks."""
    return json.dumps(good("".join(r.choices(SPECIAL, k=r.randrange(1, 5))))).encode()


def too_long(r: random.Random) -> bytes:
    """Refused for the length of its prompt, after tokenization."""
    return json.dumps(good(r.choice(["word ", "\u4e2d", "<|im_end|>"]) * 6000)).encode()


# kind -> (weight, maker, statuses)
KINDS: dict[str, tuple[int, Callable[[random.Random], bytes], set[int]]] = {
    "nested": (60, nested, REFUSED), "number": (150, number, REFUSED), "long keys": (20, long_keys, REFUSED),
    "repeated keys": (100, repeated_keys, REFUSED), "bad text": (150, bad_text, REFUSED),
    "truncated": (150, truncated, REFUSED), "flipped": (60, flipped, {200, 422}), "noise": (80, noise, REFUSED),
    "wrong shape": (150, wrong_shape, REFUSED), "other documents": (100, other_documents, REFUSED),
    "many": (40, many, REFUSED), "special text": (1, special_text, {200}), "too long": (5, too_long, REFUSED)}


def bodies(seed: int, count: int) -> Iterator[tuple[str, bytes, set[int]]]:
    """`count` bodies: (kind, body, the statuses that may answer it)."""
    r = random.Random(seed)
    kinds = list(KINDS)
    for kind in r.choices(kinds, [KINDS[kind][0] for kind in kinds], k=count):
        _, make, statuses = KINDS[kind]
        yield kind, make(r), statuses


def largest() -> list[bytes]:
    """Those that take the most memory, for bringing a process to the size that it then keeps."""
    keys = json.dumps({"state": "x", "questions": {"\U0001f600" * 100_000: {"type": "nul"}}}).encode()
    prompt = json.dumps(good("\u4e2d" * 6000)).encode()
    return [b'{"a":' * 100_000, b'{"state": ' + b"[" * 100_000 + b"]" * 100_000, keys, prompt, b" " * (5 * 2**20)]
