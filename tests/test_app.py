"""Routes, statuses and error bodies of the contract, through Flask's client."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from jev.app import MAX_BODY_BYTES, create_app
from jev.engine import Engine
from jev.model.backbone import BackendError
from jev.settings import Settings
from tests.fakes import FakeBackbone, body, choice, demo_export, request

JSON = {"Content-Type": "application/json"}
KEY = "correct-horse"


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return demo_export(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def engine(export):
    engine = Engine(export, FakeBackbone(), Settings())
    yield engine
    engine.close()


@pytest.fixture
def client(engine):
    return create_app(engine, Settings()).test_client()


@pytest.fixture
def keyed(engine):
    return create_app(engine, Settings(api_key=KEY)).test_client()


@pytest.fixture
def broken(engine):
    """Makes every forward fail until the test is over."""
    engine.backbone.fail = lambda sequences: BackendError("secret device detail")
    yield
    engine.backbone.fail = lambda sequences: None
    engine.answer(body(request()))


def post(client, data, headers=JSON, **more):
    return client.post("/v1/systemone", data=data, headers=headers, **more)


def check_error(response, status: int, error_type: str | None = None) -> dict:
    """Every refusal is JSON of one shape."""
    assert response.status_code == status, response.data
    assert response.mimetype == "application/json"
    error = response.get_json()
    assert set(error) == {"error", "detail"} and isinstance(error["error"], str) and error["error"]
    if status == 422:
        for entry in error["detail"]:
            assert set(entry) == {"loc", "msg", "type"} and entry["loc"][0] == "body"
    else:
        assert set(error["detail"]) == {"error_type", "message"}
        assert error_type is None or error["detail"]["error_type"] == error_type
    return error


# ---------------------------------------------------------------------------------------------------------------------


def test_a_decision(client):
    response = post(client, body(request(pick=choice(3), late={"type": "noul", "instructions": "Late?"})))
    assert response.status_code == 200 and response.mimetype == "application/json"
    answer = response.get_json()
    assert list(answer["answers"]) == ["pick", "late"]
    assert sum(answer["answers"]["pick"]["probabilities"].values()) == pytest.approx(1, abs=1e-12)
    assert response.headers["X-Request-Id"] == response.headers["X-TypeSafe-Request-Id"]


def test_health_and_models(client):
    health = client.get("/health")
    assert health.status_code == 200 and health.get_json()["status"] == "ready"
    assert health.get_json()["model"] == "open-jev-demo" and health.get_json()["demo"] is True
    models = client.get("/v1/models").get_json()
    assert models["models"][0]["id"] == "open-jev-demo" and "open-jev" in models["aliases"]
    for name in [models["models"][0]["id"], *models["aliases"]]:
        assert post(client, body({**request(), "model": name})).status_code == 200


@pytest.mark.parametrize("content_type", [
    "application/json; charset=utf-8", "Application/JSON", "application/json;x=1"])
def test_media_types_taken(client, content_type):
    assert post(client, body(request()), {"Content-Type": content_type}).status_code == 200


@pytest.mark.parametrize("content_type", [
    None, "", "text/json", "application/x-www-form-urlencoded", "application/jsonx", "multipart/form-data; boundary=x",
    "application/json, text/plain"])
def test_media_types_refused(client, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    check_error(post(client, body(request()), headers), 415, "unsupported_media_type")


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_a_compressed_body_is_refused_with_what_to_do(client, encoding):
    response = post(client, b"\x28\xb5\x2f\xfd", {**JSON, "Content-Encoding": encoding})
    assert "compressed" in check_error(response, 415)["error"] and response.headers["Accept-Encoding"] == "identity"


def test_the_body_limit_is_exact(client):
    text = body(request())
    assert post(client, text + b" " * (MAX_BODY_BYTES - len(text))).status_code == 200
    check_error(post(client, text + b" " * (MAX_BODY_BYTES - len(text) + 1)), 413, "request_too_large")


@pytest.mark.parametrize("length", [MAX_BODY_BYTES + 1, MAX_BODY_BYTES * 3])
def test_the_body_limit_holds_without_a_length(client, length):
    import io
    environ = {"wsgi.input": io.BytesIO(b" " * length), "wsgi.input_terminated": True,
               "CONTENT_TYPE": "application/json", "HTTP_TRANSFER_ENCODING": "chunked"}
    check_error(client.post("/v1/systemone", environ_overrides=environ), 413, "request_too_large")


@pytest.mark.parametrize("path", [
    "/", "/v1", "/v1/systemone/", "/v1//systemone", "//health", "/health/", "/v1/models/x", "/static/x", "/favicon.ico",
    "/%2e%2e/etc/passwd"])
def test_unknown_paths(client, path):
    check_error(client.get(path), 404, "not_found")
    check_error(client.post(path, data=body(request()), headers=JSON), 404)


@pytest.mark.parametrize("method, path, allowed", [
    ("GET", "/v1/systemone", {"POST"}), ("PUT", "/v1/systemone", {"POST"}), ("OPTIONS", "/v1/systemone", {"POST"}),
    ("HEAD", "/v1/systemone", {"POST"}), ("DELETE", "/health", {"GET", "HEAD"}),
    ("POST", "/v1/models", {"GET", "HEAD"}), ("OPTIONS", "/health", {"GET", "HEAD"}), ("BREW", "/health", {"GET", "HEAD"})])
def test_wrong_methods_say_what_is_allowed(client, method, path, allowed):
    response = client.open(path, method=method)
    assert response.status_code == 405 and set(response.headers["Allow"].split(", ")) == allowed
    if method != "HEAD":
        check_error(response, 405, "method_not_allowed")


def test_every_invalid_vector_is_refused_where_it_says(client, contract_vectors):
    for case in contract_vectors["invalid"]:
        data = bytes.fromhex(case["body_hex"]) if case["body_hex"] else case["body"].encode()
        check_error(post(client, data), case["status"])


def test_every_valid_vector_is_answered(client, contract_vectors):
    for case in contract_vectors["valid"]:
        answer = post(client, case["body"].encode())
        assert answer.status_code == 200, (case["name"], answer.data)
        assert list(answer.get_json()["answers"]) == [q["id"] for q in case["questions"]]


def test_a_refusal_deep_in_a_request_is_still_a_short_sentence(client):
    deep = '{"' + '":{"'.join("k" * 60 for _ in range(120)) + '":{"same":1,"same":2' + "}" * 121
    error = check_error(post(client, b'{"state": ' + deep.encode() + b', "questions": {}}'), 422)
    assert error["error"].startswith("body.state.kkk") and len(error["error"]) < 300
    assert len(error["detail"][0]["loc"]) > 100


# ---------------------------------------------------------------------------------------------------------------------
# Keys


def test_a_key_is_required_once_set(keyed):
    data = body(request())
    good = {**JSON, "Authorization": f"Bearer {KEY}"}
    assert post(keyed, data, good).status_code == 200
    assert post(keyed, data, {**good, "Authorization": f"bearer {KEY}"}).status_code == 200
    for wrong in (None, "", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY,
                  f"Bearer {KEY}\xff", "Bearer \xe9"):
        headers = JSON if wrong is None else {**JSON, "Authorization": wrong}
        response = post(keyed, data, headers)
        assert KEY not in check_error(response, 401, "authentication_error")["error"]
        assert response.headers["WWW-Authenticate"] == "Bearer"
    check_error(keyed.get("/v1/models"), 401, "authentication_error")
    assert keyed.get("/v1/models", headers=good).status_code == 200
    assert keyed.get("/health").status_code == 200      # for load balancers, which hold no key


def test_without_a_key_the_header_is_ignored(client):
    assert post(client, body(request()), {**JSON, "Authorization": "Bearer anything"}).status_code == 200


# ---------------------------------------------------------------------------------------------------------------------
# 503 and 500


def test_a_full_queue_is_503_and_says_when_to_come_back(export):
    backbone = FakeBackbone()
    engine = Engine(export, backbone, Settings(queue=1))
    try:
        client = create_app(engine, Settings()).test_client()
        with engine.scheduler.admit():
            response = post(client, body(request()))
            check_error(response, 503, "overloaded_error")
            assert int(response.headers["Retry-After"]) >= 1
            assert client.get("/health").status_code == 200         # busy is not broken
        assert post(client, body(request())).status_code == 200
        engine.drain()
        response = post(client, body(request()))
        assert "shutting down" in check_error(response, 503)["error"] and "Retry-After" in response.headers
        health = client.get("/health")
        assert health.status_code == 503 and int(health.headers["Retry-After"]) >= 1
        assert health.get_json()["status"] == "draining" and health.get_json()["model"] == "open-jev-demo"
    finally:
        engine.close()


def test_an_inference_failure_is_500_and_its_cause_only_in_the_log(client, broken, caplog):
    response = post(client, body(request(state="a very private state")))
    error = check_error(response, 500, "inference_error")
    assert error["error"] == "model inference failed"
    assert "secret device detail" in caplog.text and "very private" not in caplog.text
    assert "secret device" not in response.text


def test_an_unexpected_error_is_json_and_its_log_quotes_nothing(client, engine, monkeypatch, caplog):
    def explode(body, cancelled):
        raise KeyError(body.decode())
    monkeypatch.setattr(engine, "answer", explode)
    check_error(post(client, body(request(state="a very private state"))), 500, "internal_error")
    assert "KeyError" in caplog.text and "test_app.py" in caplog.text and "very private" not in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# The log


@pytest.fixture
def access(caplog):
    logger = logging.getLogger("jev.access")
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(r.getMessage()) for r in caplog.records if r.name == "jev.access"]
    logger.setLevel(logging.NOTSET)


def test_one_line_for_each_request(client, access):
    data = body(request(state="very private", pick=choice(3)))
    response = post(client, data, {**JSON, "X-Request-Id": "abc-1", "Authorization": "Bearer hidden"})
    post(client, b"{", JSON)
    client.get("/nowhere?token=hidden")
    decision, refused, missing = access()
    assert (decision["method"], decision["path"], decision["status"]) == ("POST", "/v1/systemone", 200)
    assert (decision["questions"], decision["candidates"]) == (1, 3) and decision["rows"] > 3
    assert decision["cached"] == 0
    assert decision["bytes_in"] == len(data) and decision["bytes_out"] == len(response.data)
    assert decision["ms"] >= decision["inference_ms"] > 0
    assert decision["id"] == "abc-1" == response.headers["X-Request-Id"]
    assert refused["status"] == 422 and missing["status"] == 404 and len(refused["id"]) == 32
    assert missing["path"] == "/nowhere"
    assert not any(word in json.dumps(access()) for word in ("private", "hidden"))


def test_a_strange_request_id_is_replaced(client):
    for strange in ("a b", "x" * 65, 'a"b', "é", ""):
        given = client.get("/health", headers={"X-Request-Id": strange}).headers["X-Request-Id"]
        assert given != strange and len(given) == 32


# ---------------------------------------------------------------------------------------------------------------------
# Fuzz


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=12)
almost_questions = st.dictionaries(
    st.text(max_size=4),
    st.fixed_dictionaries({"type": st.sampled_from(["choice", "score", "noul", "box", 1]), "instructions": json_values},
                          optional={"criteria": json_values | st.dictionaries(st.sampled_from(["true", "false", "a"]),
                                                                              json_values, max_size=3)}), max_size=3)
almost_requests = st.fixed_dictionaries({"state": json_values, "questions": almost_questions | json_values},
                                        optional={"model": json_values, "extra": json_values})


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | almost_requests.map(lambda v: json.dumps(v).encode()) | json_values.map(
    lambda v: json.dumps(v, ensure_ascii=False).encode("utf-8", "surrogatepass")))
def test_no_body_makes_anything_but_200_or_4xx(client, data):
    response = post(client, data)
    assert response.status_code == 200 or 400 <= response.status_code < 500
    if response.status_code != 200:
        check_error(response, response.status_code)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_to_a_good_body_makes_anything_but_200_or_4xx(client, data):
    score = {"type": "score", "instructions": "?", "criteria": ["a", "b"]}
    good = bytearray(body(request(pick=choice(3), score=score)))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    status = post(client, bytes(good)).status_code
    assert status == 200 or 400 <= status < 500
