r"""The System One contract: a request's bytes to questions and prompts, and scores to answers. Pure, no I/O.

A prompt is made of parts, so that text shared between candidates is held once however many there are (65,536 candidates
over a 3 MiB state would otherwise be 200 GB), and so that the tokenizer can encode each part once:

    Context:\n<state>\n\n | Question: <instructions>\n | Proposed answer: <option>\n | Is this proposed ... or No.

Every part but the last ends with a newline and every part but the first starts with an ASCII letter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jev.errors import JevError
from jev.spelling import LONGEST, letters, meant
from jev.strict_json import StrictJSONError, excerpt, parse, render

MAX_BODY_BYTES = 4 << 20
MAX_QUESTIONS = 4096
MAX_OPTIONS = 255
MIN_LEVELS, MAX_LEVELS = 2, 10
MAX_CANDIDATES = 65_536
MAX_ERRORS = 16

MAX_IGNORED = 16                        # fields that a response names
MAX_NAMES = 512                         # different unknown names of a request that are compared with the known ones

BODY_FIELDS = ("model", "state", "questions")
QUESTION_FIELDS = ("type", "instructions", "criteria")
ORDINARY = frozenset({"mode", "modal"})  # words of their own, though a letter away from one of these
KINDS = ("choice", "score", "noul")
_IS_CORRECT = "Is this proposed answer correct? Answer Yes or No."
_IS_YES = "Is the answer to this question yes? Answer Yes or No."
ENDINGS = (_IS_CORRECT, _IS_YES)        # the last part of every prompt is one of these
_ABSENT = object()


class ContractError(JevError, ValueError):
    """A request that the contract refuses (422).

    errors: a list of {"loc": ["body", ...], "msg": str, "type": str}, at least one, at most MAX_ERRORS.
    loc, msg, type: those of the first, loc as a tuple.
    """

    def __init__(self, errors: Sequence[Mapping[str, Any]]):
        self.errors = [dict(error) for error in errors]
        self.loc = tuple(self.errors[0]["loc"])
        self.msg: str = self.errors[0]["msg"]
        self.type: str = self.errors[0]["type"]
        # A short sentence for people; a path may have 127 keys, and whoever wants it whole has errors.
        super().__init__(f"{excerpt('.'.join(map(str, self.loc)), 160)}: {self.msg}")


@dataclass(frozen=True)
class Question:
    """One question of a request.

    options: names for `choice`, criteria values as sent for `score`, nothing for `noul`.
    parts: for each candidate the parts of its prompt (see the module's text), str objects shared where text is: the first
        is that of all prompts of the request, the second that of all prompts of the question.
    """

    id: str
    kind: str
    options: tuple[Any, ...]
    parts: tuple[tuple[str, ...], ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """Each candidate's whole prompt, built on every access."""
        return tuple(map("".join, self.parts))

    def candidate_loc(self, index: int) -> list[str | int]:
        """Where in the request candidate `index` stands, as an error's loc."""
        if self.kind == "noul":
            return _loc("questions", self.id)
        return _loc("questions", self.id, "criteria", self.options[index] if self.kind == "choice" else index)


@dataclass(frozen=True)
class Request:
    """A request that the contract accepts; questions in the order they were sent.

    ignored: where its fields are that the contract does not know, as "body.questions.late.hint": at most MAX_IGNORED of
        them, and then one more that says how many there are.
    """

    questions: tuple[Question, ...]
    ignored: tuple[str, ...] = ()

    @property
    def n_candidates(self) -> int:
        return sum(len(question.parts) for question in self.questions)


class _Problems:
    """Collects errors, and raises them once there are MAX_ERRORS."""

    def __init__(self) -> None:
        self.errors: list[dict[str, Any]] = []
        self.unknown = 0                        # fields that mean nothing here
        self._first: list[str] = []             # where the first of them are
        self._meant: dict[tuple[str, tuple[str, ...]], str | None] = {}

    def meant(self, name: str, absent: tuple[str, ...], present: tuple[str, ...]) -> str | None:
        """Which field `name` was meant for, if any; each name is compared once and no more than MAX_NAMES of them.

        What is there by its right name is not what another field was meant for: "states" beside "state" belongs to
        somebody else, unless it differs in case or hyphens alone.
        """
        if (name, absent) not in self._meant:
            if len(self._meant) == MAX_NAMES:
                return None
            written = letters(name[:LONGEST])
            near = None if written in ORDINARY else meant(name, absent)
            self._meant[name, absent] = near or next((field for field in present if letters(field) == written), None)
        return self._meant[name, absent]

    def ignore(self, path: Sequence[str]) -> None:
        """Note a field that is accepted and has no effect."""
        self.unknown += 1
        if self.unknown <= MAX_IGNORED:
            self._first.append(excerpt(".".join(map(str, _loc(*path))), 160))

    def ignored(self) -> list[str]:
        more = self.unknown - len(self._first)
        return self._first + ([f"and {more} more"] if more else [])

    def add(self, loc: Sequence[str | int], msg: str, type: str) -> None:
        self.errors.append({"loc": list(loc), "msg": msg, "type": type})
        if len(self.errors) == MAX_ERRORS:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        if self.errors:
            raise ContractError(self.errors)


def _problem(loc: Sequence[str | int], msg: str, type: str) -> ContractError:
    """A ContractError of one error."""
    return ContractError([{"loc": list(loc), "msg": msg, "type": type}])


def parse_request(body: bytes, model_names: Collection[str]) -> Request:
    """The request in a body, for a worker whose checkpoint answers to `model_names`.

    Raises ContractError, and nothing else, for every body that the contract refuses. The body's size is the caller's
    to limit (MAX_BODY_BYTES): time and memory are linear in it.
    """
    try:
        value = parse(body)
    except StrictJSONError as error:
        raise _problem(_loc(*error.path), error.msg, error.type) from None
    if not isinstance(value, dict):
        raise _problem(_loc(), f"the body must be an object, not {_kind(value)}", "wrong_type")

    problems = _Problems()
    _check_names(value, BODY_FIELDS, (), problems)
    _check_model(value.get("model"), model_names, problems)
    _check_text(value.get("state", _ABSENT), _loc("state"), problems)
    _check_questions(value.get("questions", _ABSENT), problems)
    problems.raise_if_any()

    context = f"Context:\n{render(value['state'])}\n\n"
    questions = tuple(_question(id, question, context) for id, question in value["questions"].items())
    return Request(questions, tuple(problems.ignored()))


def _loc(*path: str | int) -> list[str | int]:
    return ["body", *(excerpt(part) if isinstance(part, str) else part for part in path)]


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "a boolean"
    kinds: dict[type, str] = {str: "a string", dict: "an object", list: "an array"}
    return kinds.get(type(value), "a number")


def _check_names(fields: Mapping[str, Any], known: tuple[str, ...], path: Sequence[str], problems: _Problems) -> None:
    """Refuse fields that are nearly one of the `known` ones at this place; note the others that are not known."""
    unknown = [name for name in fields if name not in known]
    if not unknown:
        return
    absent = tuple(name for name in known if name not in fields)
    present = tuple(name for name in known if name in fields)
    for name in unknown:
        right = problems.meant(name, absent, present)
        if right is None:
            problems.ignore((*path, name))
        else:
            problems.add(_loc(*path, name), f"is not a field here; did you mean {right!r}?", "misspelt_field")


def _check_model(model: Any, model_names: Collection[str], problems: _Problems) -> None:
    if model is not None and not isinstance(model, str):
        problems.add(_loc("model"), f"must be a string or null, not {_kind(model)}", "wrong_type")
    elif model is not None and model not in model_names:
        served = ", ".join(sorted(model_names))
        problems.add(_loc("model"), f"{excerpt(model)!r} is not served here; use one of {served}", "unknown_model")


def _check_text(value: Any, loc: list[str | int], problems: _Problems) -> None:
    """State, instructions and descriptions are a string, object or array."""
    if value is _ABSENT:
        problems.add(loc, "is required", "missing")
    elif not isinstance(value, (str, dict, list)):
        problems.add(loc, f"must be a string, object or array, not {_kind(value)}", "wrong_type")


def _check_questions(questions: Any, problems: _Problems) -> None:
    if questions is _ABSENT:
        problems.add(_loc("questions"), "is required", "missing")
    elif not isinstance(questions, dict):
        problems.add(_loc("questions"), f"must be an object, not {_kind(questions)}", "wrong_type")
    elif not 1 <= len(questions) <= MAX_QUESTIONS:
        msg = f"must have 1 to {MAX_QUESTIONS} questions, not {len(questions)}"
        problems.add(_loc("questions"), msg, "wrong_length")
    else:
        candidates = 0
        for id, question in questions.items():
            candidates += _check_question(id, question, problems)
            if candidates > MAX_CANDIDATES:
                msg = f"more than {MAX_CANDIDATES} candidates in the request with this question"
                problems.add(_loc("questions", id), msg, "too_many_candidates")
                return


def _check_question(id: str, question: Any, problems: _Problems) -> int:
    """Collects a question's problems and returns how many candidates it has."""
    if not isinstance(question, dict):
        problems.add(_loc("questions", id), f"must be an object, not {_kind(question)}", "wrong_type")
        return 0
    _check_names(question, QUESTION_FIELDS, ("questions", id), problems)
    _check_text(question.get("instructions", _ABSENT), _loc("questions", id, "instructions"), problems)
    kind = question.get("type", _ABSENT)
    if kind is _ABSENT:
        problems.add(_loc("questions", id, "type"), "is required", "missing")
    elif not isinstance(kind, str):
        problems.add(_loc("questions", id, "type"), f"must be a string, not {_kind(kind)}", "wrong_type")
    elif kind not in KINDS:
        msg = f"must be choice, score or noul, not {excerpt(kind)!r}"
        problems.add(_loc("questions", id, "type"), msg, "unknown_type")
    else:
        return _CHECKS[kind](question.get("criteria", _ABSENT), _loc("questions", id, "criteria"), problems)
    return 0


def _check_choice(criteria: Any, loc: list[str | int], problems: _Problems) -> int:
    if not isinstance(criteria, dict):
        problems.add(loc, *_not_a("an object of options", criteria))
        return 0
    if not 1 <= len(criteria) <= MAX_OPTIONS:
        problems.add(loc, f"must have 1 to {MAX_OPTIONS} options, not {len(criteria)}", "wrong_length")
        return 0
    for name, description in criteria.items():
        if description is not None and not isinstance(description, (str, dict, list)):
            msg = f"must be null, a string, object or array, not {_kind(description)}"
            problems.add([*loc, excerpt(name)], msg, "wrong_type")
    return len(criteria)


def _check_score(criteria: Any, loc: list[str | int], problems: _Problems) -> int:
    if not isinstance(criteria, list):
        problems.add(loc, *_not_a("an array of levels", criteria))
        return 0
    if not MIN_LEVELS <= len(criteria) <= MAX_LEVELS:
        msg = f"must have {MIN_LEVELS} to {MAX_LEVELS} levels, not {len(criteria)}"
        problems.add(loc, msg, "wrong_length")
        return 0
    for index, description in enumerate(criteria):
        _check_text(description, [*loc, index], problems)
    return len(criteria)


def _check_noul(criteria: Any, loc: list[str | int], problems: _Problems) -> int:
    if criteria is _ABSENT or criteria is None:
        return 1
    if not isinstance(criteria, dict):
        problems.add(loc, f"must be absent, null or an object, not {_kind(criteria)}", "wrong_type")
    elif not criteria:
        problems.add(loc, "must have a 'true' or a 'false' description, or both", "wrong_length")
    else:
        for key, description in criteria.items():
            if key in ("true", "false"):
                _check_text(description, [*loc, key], problems)
            else:
                problems.add([*loc, excerpt(key)], "only 'true' and 'false' may be described", "unknown_key")
    return 1


_CHECKS = {"choice": _check_choice, "score": _check_score, "noul": _check_noul}


def _not_a(wanted: str, criteria: Any) -> tuple[str, str]:
    """Message and type for criteria that are absent or of the wrong type."""
    if criteria is _ABSENT:
        return f"is required: {wanted}", "missing"
    return f"must be {wanted}, not {_kind(criteria)}", "wrong_type"


def _question(id: str, question: dict[str, Any], context: str) -> Question:
    """Compiles a question that has passed the checks."""
    kind: str = question["type"]
    criteria: Any = question.get("criteria")
    instructions = render(question["instructions"])
    if kind == "noul":
        for key, lead in (("true", "Yes"), ("false", "No")):
            if criteria and key in criteria:
                instructions += f"\n{lead} means: {render(criteria[key])}"
        return Question(id, kind, (), ((context, f"Question: {instructions}\n", _IS_YES),))
    asked = f"Question: {instructions}\n"
    proposed = _choice_texts(criteria) if kind == "choice" else map(render, criteria)
    parts = tuple((context, asked, f"Proposed answer: {option}\n", _IS_CORRECT) for option in proposed)
    return Question(id, kind, tuple(criteria), parts)


def _choice_texts(criteria: dict[str, Any]) -> Iterator[str]:
    for name, description in criteria.items():
        yield name if description is None else f"{name}: {render(description)}"


def answers(request: Request, scores: Sequence[np.ndarray], temperature: float) -> dict[str, dict[str, Any]]:
    """The answers of a request by question id, in its order.

    scores: for each question a float32 [candidates] array of raw head scores. temperature: finite, > 0.
    Raises ValueError where scores do not fit the questions or are not finite: that is a failed inference.

    Sums are exact (math.fsum), so that an answer depends on its own question's scores alone.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be finite and positive, not {temperature}")
    if len(scores) != len(request.questions):
        raise ValueError(f"scores of {len(scores)} questions for a request of {len(request.questions)}")
    result = {}
    for question, question_scores in zip(request.questions, scores):
        logits = np.asarray(question_scores, np.float64).tolist()
        if len(logits) != len(question.parts):
            raise ValueError(f"{len(logits)} scores for a question of {len(question.parts)} candidates")
        if not all(map(math.isfinite, logits)):
            raise ValueError("a score is not finite")
        if question.kind == "noul":
            result[question.id] = {"type": "noul", "noul": _softmax([0.0, *logits], temperature)[1]}
        else:
            answer = _choice_answer if question.kind == "choice" else _score_answer
            result[question.id] = answer(question, _softmax(logits, temperature))
    return result


def _softmax(logits: list[float], temperature: float) -> list[float]:
    """softmax(logits / temperature) in float64.

    The difference to the maximum is taken first, so that nothing overflows: the worst case is exp(-inf) = 0.
    """
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _mode(p: list[float]) -> int:
    """Index of the first maximum."""
    return p.index(max(p))


def _choice_answer(question: Question, p: list[float]) -> dict[str, Any]:
    n, mode = len(p), _mode(p)
    # Rounding alone can take the difference a hair below zero.
    confidence = 1.0 if n == 1 else max(0.0, (p[mode] - 1 / n) / (1 - 1 / n))
    return {
        "type": "choice",
        "choice": question.options[mode],
        "probabilities": dict(zip(question.options, p)),
        "confidence": confidence,
    }


def _score_answer(question: Question, p: list[float]) -> dict[str, Any]:
    n, mode = len(p), _mode(p)
    spread = math.fsum(abs(i - mode) * p_i for i, p_i in enumerate(p))
    uniform_spread = math.fsum(abs(i - (n - 1) / 2) for i in range(n)) / n
    return {
        "type": "score",
        "score": math.fsum(i * p_i for i, p_i in enumerate(p)),
        "probabilities": {str(i): p_i for i, p_i in enumerate(p)},
        "confidence": max(0.0, 1 - spread / uniform_spread),
        "legend": {str(i): level for i, level in enumerate(question.options)},
    }
