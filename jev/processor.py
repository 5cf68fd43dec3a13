"""Prompts to token ids: the chat template's prefix and suffix, and the checkpoint's own tokenizer.

Whole prompts are what the model was trained on, so the ids are always those of tokenizing each whole prompt. With 255
candidates over a 3,000-token state that would be 765,000 tokens of work, nearly all of it the same text again. For the
tokenizers of the pinned checkpoints the parts of a prompt (see `contract`) can be tokenized apart, each once, with the
very same ids: `separable` says when and why. Any other tokenizer gets each prompt whole. Either way the ids of what
prompts share are kept once (`Sequences`).

Within a part, words can be tokenized apart too (`cuttable`), and are remembered: a prompt of 3,000 tokens takes the
library five milliseconds, while the GPU waits for it, and looking its words up less than one.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from jev.contract import ENDINGS, MAX_ERRORS, ContractError, Question, Request
from jev.errors import JevError
from jev.model.sequences import ID, Sequences, common_prefix
from jev.strict_json import excerpt
from jev.threads import starting

if TYPE_CHECKING:
    from jev.checkpoint.opening import Export

BATCH_CHARACTERS = 1 << 18
# So little text is tokenized sooner by this thread than other threads wake up for it.
FEW_CHARACTERS = 1000
_BEFORE_SPACE = re.compile("(?<=[!-~])(?= )")
REMEMBERED_WORDS = 1 << 16            # some 20 MB, 70 with the costliest text
# Longer words are rarely seen twice; rare characters take up to four tokens each.
REMEMBERED_CHARACTERS, REMEMBERED_IDS = 64, 16
# Tokens of all prompts of one request, shared ones counted in each. 4,096 candidates may have 16,384 tokens each, all
# 65,536 may have 1,024.
MAX_TOKENS = 64 << 20

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?%s+|\p{N}| ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen3.5's split takes combining marks into the word they follow; Qwen2's does not.
QWEN3_5_SPLIT = _WORDS % (r"[\p{L}\p{M}]", r"\p{L}\p{M}")
QWEN2_SPLIT = _WORDS % (r"\p{L}", r"\p{L}")


class ProcessorError(JevError, ValueError):
    """A tokenizer.json that cannot serve the checkpoint."""


def separable(config: dict[str, Any]) -> bool:
    r"""Whether, for this tokenizer.json, a prompt may be cut wherever a newline is followed by an ASCII letter.

    That is, whether ids(L + R) = ids(L) + ids(R) for every L that ends with a newline and R that starts with an ASCII
    letter. It holds for byte-level BPE with NFC and the split of Qwen2 or Qwen3.5, stage by stage:
      - Added tokens. None contains a newline, so none crosses; none strips or looks at its neighbours.
      - NFC. An ASCII letter never composes with what precedes it, nor a newline with anything.
      - Split. Matches follow each other without gaps, and where one starts only the text after it counts (the pattern
        looks behind nowhere). No alternative matches across a newline and a letter after it, so every split of L + R
        has a cut between them, and R is split as if alone. In L the one look-ahead, `\s+(?!\S)`, could only see R
        from the last run of white space; but that run ends with a newline, so that `[\r\n]*` or `\s*[\r\n]+`,
        tried earlier, takes it to its end either way.
      - BPE works within the pieces of the split, and nothing is added at the ends.
    """
    model, steps = config.get("model") or {}, config.get("pre_tokenizer") or {}
    return (
        config.get("normalizer") == {"type": "NFC"}
        and steps.get("type") == "Sequence"
        and [_without(step, "trim_offsets") for step in steps.get("pretokenizers", [])]
        in [
            [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ]
            for pattern in (QWEN3_5_SPLIT, QWEN2_SPLIT)
        ]
        and model.get("type") == "BPE"
        and not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and set(pre_tokenizers.ByteLevel.alphabet()) <= set(model.get("vocab", ()))
        and not any(
            "\n" in token["content"] or token["lstrip"] or token["rstrip"] or token["single_word"]
            for token in config.get("added_tokens", [])
        )
    )


def cuttable(config: dict[str, Any]) -> bool:
    r"""Whether, for this tokenizer.json, a text may also be cut between a visible ASCII character and a space.

    As ``separable``, with ids(L + R) = ids(L) + ids(R) for every L that ends with one of "!" to "~" and R that starts with
    a space. Added tokens: none contains a space. NFC: nothing composes across the cut, whose right side is a space. Split:
    no alternative matches a space after anything but white space, so every split of L + R has a cut there; what starts at
    the space depends on what follows alone; and the look-ahead of `\s+(?!\S)` in L sees no further than L's last character.
    """
    return separable(config) and not any(" " in token["content"] for token in config.get("added_tokens", []))


def words(text: str) -> list[str]:
    """A text cut before every space that follows a visible ASCII character."""
    return _BEFORE_SPACE.split(text)


def _without(step: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != key}


def _too_many(total: str) -> ContractError:
    msg = f"the prompts of all candidates have {total} tokens; the limit is {MAX_TOKENS}"
    return ContractError([{"loc": ["body", "questions"], "msg": msg, "type": "too_many_tokens"}])


class Processor:
    """A checkpoint's tokenizer and chat template.

    tokenizer_path: the export's tokenizer.json. chat_prefix, chat_suffix: what the template puts around a prompt.
    max_length: the most tokens a prompt may have. model_vocab_size: rows of the model's embedding, if known.
    Raises ProcessorError for a file that is no tokenizer, or has an id that the embedding lacks.

    vocab_size: one more than the largest id. separable: whether parts of prompts are tokenized apart.
    """

    def __init__(
        self,
        tokenizer_path: str | Path,
        chat_prefix: str,
        chat_suffix: str,
        max_length: int,
        model_vocab_size: int | None = None,
    ):
        try:
            text = Path(tokenizer_path).read_text("utf-8")
            config = json.loads(text)
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ProcessorError(f"{tokenizer_path}: not a readable tokenizer: {excerpt(str(error), 200)}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        last = max(vocabulary, key=vocabulary.__getitem__)
        self.vocab_size = vocabulary[last] + 1
        if model_vocab_size is not None and self.vocab_size > model_vocab_size:
            raise ProcessorError(
                f"{tokenizer_path}: token {excerpt(last)!r} has id {vocabulary[last]}, "
                f"but the model's embedding has {model_vocab_size} rows"
            )
        self.max_length = max_length
        self._prefix, self._suffix = chat_prefix, chat_suffix
        self.separable = separable(config) and chat_prefix[-1:] in ("", "\n")
        self._cuttable = cuttable(config)
        self._longest_token = max(map(len, vocabulary))
        always = self._encode_batch([chat_prefix, *(ending + chat_suffix for ending in ENDINGS)])
        # The same in every request, as big-endian bytes: the chat prefix, and each ending together with the chat suffix.
        self._prefix_ids, *endings = (np.array(ids, ID).tobytes() for ids in always)
        self._ending_ids = dict(zip(ENDINGS, endings))
        self._remembered: dict[str, list[int]] = {}

    @classmethod
    def of(cls, export: Export) -> Processor:
        """The processor of an export. Raises ProcessorError."""
        manifest = export.manifest
        return cls(export.tokenizer_file, manifest.chat_prefix, manifest.chat_suffix, manifest.max_length,
                   export.config.vocab_size)

    def start_threads(self) -> None:
        """Have the tokenizer start its threads, which it does at the first long text otherwise. Raises OutOfThreads."""
        with starting("the tokenizer's threads (RAYON_NUM_THREADS sets how many)"):
            self._tokenizer.encode_batch_fast(["two", "texts"], add_special_tokens=False)

    def tokenize(self, prompt: str) -> np.ndarray:
        """Token ids, int32 [length], of one whole prompt, however long."""
        return np.array(self._encode_batch([self._prefix + prompt.strip() + self._suffix])[0], np.int32)

    def encode(self, request: Request) -> Sequences:
        """Token ids of every candidate's prompt, in the order of questions and prompts.

        Raises ContractError where prompts are longer than max_length (type "prompt_too_long") and where all of them
        together have more than MAX_TOKENS (type "too_many_tokens"); nothing is truncated.
        """
        return self._encode_parts(request) if self.separable else self._encode_whole(request)

    def _encode_whole(self, request: Request) -> Sequences:
        shared, own, errors, total, before = [], [], [], 0, b""
        for question in request.questions:
            for index, parts in enumerate(question.parts):
                ids = self.tokenize("".join(parts)).astype(ID).tobytes()
                length = len(ids) // ID.itemsize
                total += length
                if total > MAX_TOKENS:
                    raise _too_many(f"at least {total}")
                if length > self.max_length:
                    errors.append(self._too_long(question, index, str(length)))
                    if len(errors) == MAX_ERRORS:
                        raise ContractError(errors)
                common = common_prefix(before, ids)
                shared.append(common)
                own.append(ids[common:])
                before = ids
        if errors:
            raise ContractError(errors)
        return Sequences.front_coded(shared, own)

    def _encode_parts(self, request: Request) -> Sequences:
        """As _encode_whole. Prompts start with "Context:" and end with "No.", so stripping them changes nothing."""
        texts = dict.fromkeys(text for question in request.questions for parts in question.parts for text in parts[:-1])
        # Text that cannot fit is refused before the tokenizer spends seconds and gigabytes on it.
        hopeless = {text: least for text in texts if (least := self._fewest_tokens(text)) > self.max_length}
        if hopeless:
            raise ContractError(self._hopeless(request, hopeless))
        ids = self._encode_texts(texts) | self._ending_ids
        limit = self.max_length * ID.itemsize
        shared: list[Any] = []
        own: list[Any] = []
        errors: list[Any] = []
        total = 0
        context = self._prefix_ids + ids[request.questions[0].parts[0][0]]
        for question in request.questions:
            asked = ids[question.parts[0][1]]
            common, lead = (len(context), asked) if own else (0, context + asked)
            for index, parts in enumerate(question.parts):
                mine = lead + b"".join(map(ids.__getitem__, parts[2:]))
                length = common + len(mine)
                total += length
                if length > limit:
                    errors.append(self._too_long(question, index, str(length // ID.itemsize)))
                    if len(errors) == MAX_ERRORS:
                        raise ContractError(errors)
                shared.append(common)
                own.append(mine)
                common, lead = len(context) + len(asked), b""
        if errors:
            raise ContractError(errors)
        if total > MAX_TOKENS * ID.itemsize:
            raise _too_many(str(total // ID.itemsize))
        return Sequences.front_coded(shared, own, len(context))

    def _hopeless(self, request: Request, fewest: dict[str, int]) -> list[dict[str, Any]]:
        """Errors for the prompts that hold texts which alone are too long; ``fewest``: the least tokens of each."""
        errors = []
        for question in request.questions:
            for index, parts in enumerate(question.parts):
                length = sum(fewest.get(text, 0) for text in parts)
                if length > self.max_length:
                    errors.append(self._too_long(question, index, f"at least {length}"))
                    if len(errors) == MAX_ERRORS:
                        return errors
        return errors

    def _fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens in a text, without tokenizing it.

        A token of byte-level BPE is at most _longest_token bytes, hence characters, long; NFC makes one character of at
        most four (the longest canonical decomposition), and leaves ASCII alone.
        """
        characters = self._longest_token * (1 if text.isascii() or unicodedata.is_normalized("NFC", text) else 4)
        return -(-len(text) // characters)

    def _encode_texts(self, texts: Iterable[str]) -> dict[str, bytes]:
        """Ids by text, as big-endian bytes."""
        cut = {text: words(text) if self._cuttable and len(text) <= BATCH_CHARACTERS else [text] for text in texts}
        remembered = self._remembered                 # this very dict: another thread may begin a new one
        ids, new = {}, []
        for word in dict.fromkeys(chain.from_iterable(cut.values())):
            if (known := remembered.get(word)) is None:
                new.append(word)
            else:
                ids[word] = known
        if new:
            encoded = dict(zip(new, self._encode_in_batches(new)))
            ids |= encoded
            self._remember(encoded)
        return {text: np.fromiter(chain.from_iterable(map(ids.__getitem__, parts)), ID).tobytes()
                for text, parts in cut.items()}

    def _remember(self, encoded: dict[str, list[int]]) -> None:
        short = {word: ids for word, ids in encoded.items()
                 if len(word) <= REMEMBERED_CHARACTERS and len(ids) <= REMEMBERED_IDS}
        if len(self._remembered) + len(short) > REMEMBERED_WORDS:
            self._remembered = {}
        if len(short) <= REMEMBERED_WORDS:
            self._remembered.update(short)

    def _encode_in_batches(self, texts: list[str]) -> list[list[int]]:
        """In batches that bound the tokenizer's memory."""
        out: list[list[int]] = []
        batch: list[str] = []
        characters = 0
        for text in texts:
            if batch and characters + len(text) > BATCH_CHARACTERS:
                out += self._encode_batch(batch)
                batch, characters = [], 0
            batch.append(text)
            characters += len(text)
        return out + self._encode_batch(batch)

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Releases the interpreter lock but for little text, and leaves out the offsets that nobody needs."""
        if sum(map(len, texts)) <= FEW_CHARACTERS:
            return [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _too_long(self, question: Question, index: int, length: str) -> dict[str, Any]:
        loc = question.candidate_loc(index)
        candidate = "" if question.kind == "noul" else f", candidate {loc[-1]!r}"
        msg = f"question {loc[2]!r}{candidate}: a prompt of {length} tokens; the limit is {self.max_length}"
        return {"loc": loc, "msg": msg, "type": "prompt_too_long"}
