"""The official client of the System One API, pointed at a running worker by its base URL."""

from __future__ import annotations

import json

import pytest

from tests.fakes import FakeBackbone, demo_export, serving
from tests.scripted_worker import gateway

sdk = pytest.importorskip("typesafe_sdk", reason="needs the package typesafe-sdk")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    export = demo_export(tmp_path_factory.mktemp("export"))
    with serving(export, FakeBackbone(), api_key="a-key") as server:
        yield server


def client(server, key: str = "a-key", url: str | None = None):
    return sdk.TypeSafeClient(api_key=key, base_url=url or server.url, retry=sdk.RetryPolicy(max_retries=0), timeout=30,
                              compression=False)


def test_every_kind_of_answer_is_parsed(server):
    questions = {
        "tone": sdk.Choice(instructions="What is the tone?",
                           criteria={"calm": "Polite.", "angry": {"signs": ["capitals", "threats"]}, "other": None}),
        "billing": sdk.Noul(instructions="Is this about billing?", criteria={"true": "Money.", "false": "All else."}),
        "urgency": sdk.Score(instructions={"task": "How urgent?"},
                             criteria=["Can wait.", "This week.", {"when": "now"}]),
        "only": sdk.Choice(instructions="One way.", criteria={"so": None})}
    with client(server) as typesafe:
        response = typesafe.system_one(state={"message": "I was charged twice."}, questions=questions)
    assert list(response.answers) == list(questions)
    assert response.model == "open-jev-demo"
    assert response.usage.input_tokens > 100 and response.usage.output_tokens == 0
    tone = response.choices["tone"]
    assert tone.choice in tone.probabilities and list(tone.probabilities) == ["calm", "angry", "other"]
    assert tone.probabilities[tone.choice] == max(tone.probabilities.values()) and 0 <= tone.confidence <= 1
    assert response.choices["only"].confidence == 1
    assert 0 <= response.nouls["billing"].noul <= 1
    urgency = response.scores["urgency"]
    assert urgency.legend == {0: "Can wait.", 1: "This week.", 2: {"when": "now"}}
    assert sum(urgency.probabilities.values()) == pytest.approx(1)
    assert urgency.score == pytest.approx(sum(level * p for level, p in urgency.probabilities.items()))


def test_the_settings_of_the_readme(server, monkeypatch):
    """With zstd at hand the client compresses bodies of 1 KiB and more, unless it is told not to."""
    from typesafe_sdk._core.compression import COMPRESSORS
    monkeypatch.setitem(COMPRESSORS, "zstd", lambda content: b"\x28\xb5\x2f\xfd" + content)
    monkeypatch.setenv("TYPESAFE_BASE_URL", server.url)
    monkeypatch.setenv("TYPESAFE_API_KEY", "a-key")
    asked = {"state": {"text": "word " * 400}, "questions": {"q": sdk.Noul(instructions="?")}}
    with sdk.TypeSafeClient(compression=False) as typesafe:
        assert 0 <= typesafe.system_one(**asked).nouls["q"].noul <= 1
    with sdk.TypeSafeClient() as typesafe, pytest.raises(sdk.TypeSafeError) as refused:
        typesafe.system_one(**asked)
    assert "compressed" in json.dumps(refused.value.body)


def test_models_and_errors_are_understood(server):
    with client(server) as typesafe:
        entry, = typesafe.models.list().models
        assert entry.name == "open-jev-demo" and entry.description and len(entry.release_date) == 10
        with pytest.raises(sdk.TypeSafeUnprocessableEntityError) as refused:
            typesafe.system_one(state="x", model="another", questions={"q": sdk.Noul(instructions="?")})
        assert refused.value.body["detail"][0]["loc"] == ["body", "model"]
        assert refused.value.request_id
    with client(server, "another-key") as stranger, pytest.raises(sdk.TypeSafeAuthenticationError):
        stranger.system_one(state="x", questions={"q": sdk.Noul(instructions="?")})


def test_through_the_gateway(server):
    with gateway(server.url) as gate:
        url = f"http://127.0.0.1:{gate.port}"
        with client(server, url=url) as typesafe:
            entry, = typesafe.models.list().models
            assert entry.name == "open-jev-demo"
            response = typesafe.system_one(state="x", questions={"q": sdk.Noul(instructions="?")})
            assert 0 <= response.nouls["q"].noul <= 1
        with client(server, "another-key", url) as stranger, pytest.raises(sdk.TypeSafeAuthenticationError):
            stranger.models.list()
