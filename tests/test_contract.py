from __future__ import annotations

import itertools
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jev import contract
from jev.contract import ContractError, Question, Request, answers, parse_request

NAMES = frozenset({"Qwen/Qwen3.8-27B", "open-jev", "jev-latest", "open-jev-27b-v1.1"})


def noul(**fields) -> dict:
    return {"type": "noul", "instructions": "Ready?", **fields}


def request_of(questions: dict, **fields) -> Request:
    return parse_request(json.dumps({"state": "s", "questions": questions, **fields}).encode(), NAMES)


def refusal(body: bytes | dict) -> ContractError:
    with pytest.raises(ContractError) as caught:
        parse_request(json.dumps(body).encode() if isinstance(body, dict) else body, NAMES)
    check_error(caught.value)
    return caught.value


def check_error(error: ContractError) -> None:
    assert 1 <= len(error.errors) <= contract.MAX_ERRORS
    for entry in error.errors:
        assert set(entry) == {"loc", "msg", "type"} and entry["loc"][0] == "body"
        assert all(isinstance(part, int) or len(part) <= 48 for part in entry["loc"])
        assert 0 < len(entry["msg"]) < 250
    assert (error.loc, error.msg, error.type) == (
        tuple(error.errors[0]["loc"]), error.errors[0]["msg"], error.errors[0]["type"]
    )
    json.dumps(error.errors, ensure_ascii=False).encode("utf-8")


def check_parts(request: Request) -> None:
    """What the processor relies on to tokenize parts apart, and to leave out the strip."""
    for question in request.questions:
        for parts, prompt in zip(question.parts, question.prompts):
            assert all(part.endswith("\n") for part in parts[:-1])
            assert all(part[0].isascii() and part[0].isalpha() for part in parts)
            assert prompt == prompt.strip()


def assert_close(actual, expected) -> None:
    """Same keys in the same order, same values, floats to 1e-14 relative."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_close(actual[key], expected[key])
    elif isinstance(expected, float):
        assert isinstance(actual, float) and actual == pytest.approx(expected, rel=1e-14, abs=0)
    else:
        assert actual == expected


def test_valid_vectors(contract_vectors):
    for case in contract_vectors["valid"]:
        request = parse_request(case["body"].encode("utf-8"), NAMES)
        compiled = [{"id": q.id, "kind": q.kind, "prompts": list(q.prompts)} for q in request.questions]
        assert compiled == case["questions"], case["name"]
        assert request.n_candidates == sum(map(len, case["scores"]))
        check_parts(request)
        scores = [np.float32(question_scores) for question_scores in case["scores"]]
        assert_close(answers(request, scores, case["temperature"]), case["answers"])


# Where each body of the vectors goes wrong.
PLACES = {
    "not JSON": (1,),
    "empty body": (0,),
    "array body": (),
    "NaN": ("state",),
    "overflowing number": ("state", 0),
    "repeated key": ("state",),
    "repeated key deep inside": ("state", "a", 0, "k"),
    "lone surrogate": ("state",),
    "bytes that are not UTF-8": (10,),
    "nesting 200 deep": (135,),
    "no state": ("state",),
    "number state": ("state",),
    "null state": ("state",),
    "no questions": ("questions",),
    "questions is a list": ("questions",),
    "no question in questions": ("questions",),
    "unknown model": ("model",),
    "model is a number": ("model",),
    "unknown type": ("questions", "q", "type"),
    "type in capitals": ("questions", "q", "type"),
    "no instructions": ("questions", "q", "instructions"),
    "number instructions": ("questions", "q", "instructions"),
    "choice without criteria": ("questions", "q", "criteria"),
    "choice as a list": ("questions", "q", "criteria"),
    "choice with no options": ("questions", "q", "criteria"),
    "256 options": ("questions", "q", "criteria"),
    "choice description is a number": ("questions", "q", "criteria", "a"),
    "one level": ("questions", "q", "criteria"),
    "eleven levels": ("questions", "q", "criteria"),
    "score as a map": ("questions", "q", "criteria"),
    "null level": ("questions", "q", "criteria", 1),
    "noul criteria as a list": ("questions", "q", "criteria"),
    "noul criteria with another key": ("questions", "q", "criteria", "maybe"),
    "noul criteria with no key": ("questions", "q", "criteria"),
    "null noul description": ("questions", "q", "criteria", "true"),
}


def test_invalid_vectors(contract_vectors):
    assert {case["name"] for case in contract_vectors["invalid"]} == set(PLACES)
    for case in contract_vectors["invalid"]:
        body = bytes.fromhex(case["body_hex"]) if case["body"] is None else case["body"].encode("utf-8")
        error = refusal(body)
        assert error.loc == ("body", *PLACES[case["name"]]), case["name"]
        assert len(error.errors) == 1


def test_errors_are_collected_up_to_a_cap():
    questions = {"a": {"type": "noul"}, "b": 3, "c": {"type": "score", "instructions": 1, "criteria": [1, "x", None]}}
    error = refusal({"model": 1, "state": None, "questions": questions})
    assert [tuple(entry["loc"][1:]) for entry in error.errors] == [
        ("model",),
        ("state",),
        ("questions", "a", "instructions"),
        ("questions", "b"),
        ("questions", "c", "instructions"),
        ("questions", "c", "criteria", 0),
        ("questions", "c", "criteria", 2),
    ]
    assert len(refusal({"state": "s", "questions": {str(i): {} for i in range(4096)}}).errors) == contract.MAX_ERRORS


def test_limits_on_questions_options_and_candidates():
    assert request_of({str(i): noul() for i in range(4096)}).n_candidates == 4096
    assert refusal({"state": "s", "questions": {str(i): noul() for i in range(4097)}}).loc == ("body", "questions")

    options = {str(i): None for i in range(255)}
    choice = {"type": "choice", "instructions": "i", "criteria": options}
    # 257 x 255 = 65,535, and one more is the limit.
    full = {**{str(i): choice for i in range(257)}, "last": noul()}
    assert request_of(full).n_candidates == contract.MAX_CANDIDATES
    error = refusal({"state": "s", "questions": {**full, "over": noul()}})
    assert (error.loc, error.type) == (("body", "questions", "over"), "too_many_candidates")


def test_candidates_share_the_text_of_the_state():
    state = "x" * 1_000_000
    body = {"state": state, "questions": {str(i): noul() for i in range(4096)}}
    request = parse_request(json.dumps(body).encode(), NAMES)  # whole prompts would take 4 GB
    assert len({id(question.parts[0][0]) for question in request.questions}) == 1


@pytest.mark.parametrize("where, name, right", [
    ("question", "critera", "criteria"), ("question", "Criteria", "criteria"), ("question", "criterion", "criteria"),
    ("question", "criterias", "criteria"), ("question", "critiera", "criteria"), ("question", "_criteria", "criteria"),
    ("body", "modle", "model"), ("body", "models", "model"), ("body", "MODEL", "model"), ("body", "State", "state"),
    ("body", "questions_", "questions")])
def test_a_field_that_is_nearly_right_is_refused(where, name, right):
    # Beside fields that make a whole request of it: it would be answered as if the field were not there.
    question = noul(**({name: {"true": "yes"}} if where == "question" else {}))
    error = refusal({"state": "s", "questions": {"critera": noul(), "q": question}, **({name: "x"} if where == "body" else {})})
    assert error.loc == ("body", *(("questions", "q") if where == "question" else ()), name)
    assert error.type == "misspelt_field" and repr(right) in error.msg and len(error.errors) == 1


def test_a_required_field_that_is_nearly_right_is_named_before_the_one_that_is_missing():
    error = refusal({"sate": "s", "question": {"q": noul()}})
    assert [(entry["loc"][1], entry["type"]) for entry in error.errors] == [
        ("sate", "misspelt_field"), ("question", "misspelt_field"), ("state", "missing"), ("questions", "missing")]
    error = refusal({"state": "s", "questions": {"q": {"tpye": "noul", "instruction": "Ready?"}}})
    assert [entry["loc"][3] for entry in error.errors] == ["tpye", "instruction", "instructions", "type"]


def test_other_fields_are_accepted_and_listed():
    extras = ["id", "name", "metadata", "user", "stream", "temperature", "mode", "states", "status", "question", "options",
              "messages", "tools", "seed", "", "instructions"]
    request = request_of({"critera": noul(kind="x", types=1, id=2)}, **dict.fromkeys(extras, 1))
    assert request.ignored == (*(f"body.{name}" for name in extras), "and 3 more")
    request = request_of({"a.b": noul(**{"x" * 1000: 1})})
    assert request.ignored == (f"body.questions.a.b.{'x' * 47}…",)
    assert request_of({"q": noul()}).ignored == ()
    # Names that the user chooses may be what they like.
    choice = {"type": "choice", "instructions": "i", "criteria": {"critera": None, "Type": None}}
    assert request_of({"tpye": choice}).ignored == ()


def test_unknown_fields_cost_little_however_many_there_are():
    hostile = {"".join(letters): 0 for letters in itertools.islice(itertools.permutations("questiom"), 30_000)}
    body = json.dumps({"state": "s", "questions": {"q": noul(**hostile)}}).encode()
    started = time.process_time()
    request = parse_request(body, NAMES)
    assert time.process_time() - started < 2 and request.ignored[-1] == f"and {30_000 - contract.MAX_IGNORED} more"


@pytest.mark.parametrize("where", ["body", "question"])
def test_names_beyond_the_first_hundreds_are_not_looked_at(where, monkeypatch):
    calls = []
    monkeypatch.setattr(contract, "letters", lambda name: calls.append(name) or name)
    extras = {f"x{i}": 0 for i in range(5_000)}
    body = {"state": "s", "questions": {f"q{j}": noul(**(extras if where == "question" else {})) for j in range(3)},
            **(extras if where == "body" else {})}
    parse_request(json.dumps(body).encode(), NAMES)
    assert 0 < len(calls) < 10 * contract.MAX_NAMES


@pytest.mark.parametrize("name", ["Mode", "MODE", "modal"])
def test_words_of_their_own_are_no_slips_however_they_are_written(name):
    assert request_of({"q": noul()}, **{name: 1}).ignored == (f"body.{name}",)


@pytest.mark.parametrize("model", [None, *sorted(NAMES)])
def test_names_of_the_model(model):
    assert request_of({"q": noul()}, model=model).n_candidates == 1


@pytest.mark.parametrize("model", ["", "Open-Jev", "open-jev ", "x" * 100_000])
def test_other_names_are_refused_with_an_excerpt(model):
    error = refusal({"state": "s", "questions": {"q": noul()}, "model": model})
    assert error.loc == ("body", "model") and "jev-latest" in error.msg


def test_long_ids_are_cut_in_errors():
    error = refusal({"state": "s", "questions": {"q" * 100_000: noul(criteria={"m" * 100_000: 1})}})
    assert error.loc[-1] == "m" * 47 + "…"


@pytest.mark.parametrize(
    "value, text", [("", ""), ({}, "{}"), ([], "[]"), ({"b": 1, "a": "é"}, '{"a": "é", "b": 1}')]
)
def test_anything_that_may_describe_is_rendered(value, text):
    request = request_of(
        {
            "c": {"type": "choice", "instructions": value, "criteria": {"x": value, "y": None}},
            "s": {"type": "score", "instructions": value, "criteria": [value, value]},
            "n": noul(criteria={"false": value}),
        },
        state=value,
    )
    choice, score, one_sided = (question.prompts for question in request.questions)
    assert choice[0].startswith(f"Context:\n{text}\n\nQuestion: {text}\nProposed answer: x: {text}\nIs this")
    assert "\nProposed answer: y\n" in choice[1]
    assert f"\nProposed answer: {text}\nIs this" in score[0]
    assert f"Question: Ready?\nNo means: {text}\nIs the answer" in one_sided[0]
    assert [question.options for question in request.questions] == [("x", "y"), (value, value), ()]


def test_candidate_locations():
    request = request_of(
        {
            "c": {"type": "choice", "instructions": "i", "criteria": {"x" * 60: None}},
            "s": {"type": "score", "instructions": "i", "criteria": ["a", "b"]},
            "n": noul(),
        }
    )
    choice, score, yes_no = request.questions
    assert choice.candidate_loc(0) == ["body", "questions", "c", "criteria", "x" * 47 + "…"]
    assert score.candidate_loc(1) == ["body", "questions", "s", "criteria", 1]
    assert yes_no.candidate_loc(0) == ["body", "questions", "n"]


# Fuzzing.

words = st.text(st.characters(codec="utf-8"), max_size=6)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
description = words | st.dictionaries(words, words, max_size=2) | st.lists(words, max_size=2)
choices = st.fixed_dictionaries(
    {
        "type": st.just("choice"),
        "instructions": description,
        "criteria": st.dictionaries(words, st.none() | description, min_size=1, max_size=4),
    }
)
ratings = st.fixed_dictionaries(
    {
        "type": st.just("score"),
        "instructions": description,
        "criteria": st.lists(description, min_size=2, max_size=10),
    }
)
sides = st.fixed_dictionaries({}, optional={"true": description, "false": description}).filter(bool)
nouls = st.fixed_dictionaries(
    {"type": st.just("noul"), "instructions": description}, optional={"criteria": st.none() | sides}
)
valid_bodies = st.fixed_dictionaries(
    {"state": description, "questions": st.dictionaries(words, choices | ratings | nouls, min_size=1, max_size=4)},
    optional={"model": st.sampled_from([None, *sorted(NAMES)]), "extra": description},
)


def survives(body: bytes) -> None:
    try:
        request = parse_request(body, NAMES)
    except ContractError as error:
        check_error(error)
    else:
        check_parts(request)


@given(st.binary(max_size=60))
def test_random_bytes_never_break_it(body):
    survives(body)


@given(anything)
def test_random_values_never_break_it(value):
    survives(json.dumps(value).encode())


@given(valid_bodies, anything, st.data())
def test_a_valid_body_with_any_one_value_replaced_never_breaks_it(body, replacement, data):
    node = body
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = replacement
    survives(json.dumps(body).encode())


@given(valid_bodies, st.data())
def test_a_valid_body_with_damaged_bytes_never_breaks_it(body, data):
    damaged = bytearray(json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    survives(bytes(damaged))


@given(valid_bodies)
def test_valid_bodies_are_accepted_in_order(body):
    request = parse_request(json.dumps(body).encode(), NAMES)
    check_parts(request)
    assert [question.id for question in request.questions] == list(body["questions"])
    for question, sent in zip(request.questions, body["questions"].values()):
        assert question.options == (() if sent["type"] == "noul" else tuple(sent["criteria"]))


finite_scores = st.floats(width=32, allow_nan=False, allow_infinity=False)
temperatures = st.floats(min_value=0, exclude_min=True, allow_infinity=False) | st.floats(0.1, 10)


@settings(deadline=None)
@given(valid_bodies, temperatures, st.data())
def test_answers_are_finite_and_calibrated(body, temperature, data):
    request = parse_request(json.dumps(body).encode(), NAMES)
    scores = [
        np.array(data.draw(st.lists(finite_scores, min_size=n, max_size=n)), np.float32)
        for n in (len(question.parts) for question in request.questions)
    ]
    result = answers(request, scores, temperature)
    assert list(result) == list(body["questions"])
    json.dumps(result, allow_nan=False)
    for question, question_scores in zip(request.questions, scores):
        answer = result[question.id]
        assert answer["type"] == question.kind
        if question.kind == "noul":
            assert 0 <= answer["noul"] <= 1
            continue
        p = list(answer["probabilities"].values())
        assert len(p) == len(question.parts)
        assert math.fsum(p) == pytest.approx(1, abs=1e-14)
        assert all(0 <= p_i <= 1 for p_i in p)
        assert 0 <= answer["confidence"] <= 1
        if question.kind == "choice":
            assert answer["choice"] == question.options[p.index(max(p))]
            assert p[int(question_scores.argmax())] == max(p)
        else:
            assert 0 <= answer["score"] <= len(p) - 1 + 1e-12
            assert list(answer["legend"].values()) == list(question.options)


def test_an_answer_depends_on_its_own_scores_alone():
    rating = {"type": "score", "instructions": "i", "criteria": ["a", "b", "c"]}
    alone = answers(request_of({"q": rating}), [np.float32([0.1, 0.7, -2])], 2.5)["q"]
    among = answers(request_of({"n": noul(), "q": rating}), [np.float32([9]), np.float32([0.1, 0.7, -2])], 2.5)["q"]
    assert alone == among


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_give_no_answer(bad):
    request = request_of({"n": noul(), "s": {"type": "score", "instructions": "i", "criteria": ["a", "b"]}})
    with pytest.raises(ValueError, match="finite"):
        answers(request, [np.float32([0]), np.float32([1, bad])], 1.0)
    with pytest.raises(ValueError, match="finite"):
        answers(request, [np.float32([bad]), np.float32([1, 1])], 1.0)


def test_scores_must_fit_the_questions():
    request = request_of({"n": noul()})
    for scores, temperature in [([], 1.0), ([np.float32([0, 0])], 1.0), ([np.float32([0])], 0.0)]:
        with pytest.raises(ValueError):
            answers(request, scores, temperature)


def test_prompts_are_joined_parts():
    question = Question("q", "noul", (), (("a\n", "b"), ("a\n", "c")))
    assert question.prompts == ("a\nb", "a\nc")
