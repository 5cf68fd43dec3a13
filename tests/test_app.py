"""Routes, statuses and error bodies of the contract, through Flask's client."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from jev.app import MAX_BODY_BYTES, create_app
from jev.engine import Engine
from jev.http.parser import RequestHead
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


@pytest.fixture
def access(caplog):
    logger = logging.getLogger("jev.access")
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(r.getMessage()) for r in caplog.records if r.name == "jev.access"]
    logger.setLevel(logging.NOTSET)
def test_a_request_too_large_for_the_queue_is_a_413_with_both_figures(export):
    engine = Engine(export, FakeBackbone(), Settings(queue_mb=16))
    client = create_app(engine, Settings()).test_client()
    error = check_error(post(client, body(request(**{"x" * 800_000: choice(1)}))), 413, "request_too_large")
    assert "31.3 MiB" in error["error"] and "16.0 MiB" in error["error"]
    engine.scheduler.max_bytes, held = 1 << 20, 1 << 20
    engine.scheduler._nbytes = held
    refused = post(client, body(request()))
    check_error(refused, 503, "overloaded_error")
    assert refused.headers["Retry-After"] == "1"
    engine.scheduler._nbytes = 0
    engine.close()


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
    found = check_error(client.get(path, base_url="http://localhost"), 404, "not_found")
    assert all(there in found["error"] for there in ("POST /v1/systemone", "GET /health", "GET /v1/models"))
    check_error(client.post(path, base_url="http://localhost", data=body(request()), headers=JSON), 404)


@pytest.mark.parametrize("method, path, allowed", [
    ("GET", "/v1/systemone", {"POST"}), ("PUT", "/v1/systemone", {"POST"}), ("OPTIONS", "/v1/systemone", {"POST"}),
    ("HEAD", "/v1/systemone", {"POST"}), ("DELETE", "/health", {"GET", "HEAD"}),
    ("POST", "/v1/models", {"GET", "HEAD"}), ("OPTIONS", "/health", {"GET", "HEAD"}), ("BREW", "/health", {"GET", "HEAD"})])
def test_wrong_methods_say_what_is_allowed(client, method, path, allowed):
    response = client.open(path, method=method)
    assert response.status_code == 405 and set(response.headers["Allow"].split(", ")) == allowed
    if method != "HEAD":
        check_error(response, 405, "method_not_allowed")


def test_fields_that_the_contract_does_not_know(client):
    question = {"type": "noul", "instructions": "Late?"}
    told = post(client, body(request(q={**question, "weight": 2}) | {"user": "u"})).get_json()
    assert told["metadata"]["ignored_fields"] == ["body.user", "body.questions.q.weight"]
    assert "ignored_fields" not in post(client, body(request(q=question))).get_json()["metadata"]
    refused = check_error(post(client, body(request(q={**question, "critera": {"true": "On time."}}))), 422)
    assert "did you mean 'criteria'" in refused["error"]
    assert refused["detail"][0]["loc"] == ["body", "questions", "q", "critera"]


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
# What a head decides


def head(method="POST", path="/v1/systemone", length=2, target=None, **headers):
    """A head that is good but for what is given; a field that is None is missing."""
    fields = {"HOST": "localhost:8000", "CONTENT_TYPE": "application/json", **headers}
    return RequestHead(method, path, target or path, {k: v for k, v in fields.items() if v is not None}, length)


@pytest.mark.parametrize("bad, status", [
    ({"HOST": "attacker.example"}, 403), ({"target": "http://attacker.example/v1/systemone"}, 403),
    ({"path": "/nowhere"}, 404), ({"path": ""}, 404), ({"path": "*", "method": "OPTIONS"}, 404), ({"path": "/\xff"}, 404),
    ({"method": "PUT"}, 405), ({"method": "OPTIONS"}, 405), ({"method": "HEAD"}, 405), ({"path": "/health"}, 405),
    ({"CONTENT_TYPE": None}, 415), ({"CONTENT_TYPE": "text/plain"}, 415), ({"CONTENT_ENCODING": "gzip"}, 415),
    ({"length": MAX_BODY_BYTES + 1}, 413), ({"method": "GET", "path": "/health", "length": MAX_BODY_BYTES + 1}, 413)])
def test_heads_that_are_refused(engine, access, bad, status):
    app = create_app(engine, Settings())
    refusal = app.refuse_head(head(**bad, X_REQUEST_ID="abc-1"))
    error = json.loads(refusal.body)
    assert refusal.status == status and set(error) == {"error", "detail"}
    headers = dict(refusal.headers)
    assert headers["X-Request-Id"] == headers["X-TypeSafe-Request-Id"] == "abc-1"
    assert headers["Content-Type"] == "application/json"
    assert "Content-Length" not in headers and ("Allow" in headers) == (status == 405)
    line, = access()
    assert (line["id"], line["status"], line["bytes_out"]) == ("abc-1", status, len(refusal.body))


@pytest.mark.parametrize("good", [
    {}, {"length": None}, {"length": MAX_BODY_BYTES}, {"CONTENT_TYPE": "Application/JSON; charset=x"}, {"HOST": "[::1]:1"},
    {"HOST": None}, {"CONTENT_ENCODING": "Identity"}, {"method": "GET", "path": "/health", "CONTENT_TYPE": None},
    {"method": "HEAD", "path": "/v1/models", "length": 0}])
def test_heads_that_are_taken(engine, access, good):
    assert create_app(engine, Settings()).refuse_head(head(**good)) is None and access() == []


def test_the_key_is_a_matter_of_the_head_and_comes_before_what_else_is_wrong(engine):
    app = create_app(engine, Settings(api_key=KEY))
    for wrong in ({}, {"AUTHORIZATION": f"Bearer {KEY}x"}, {"path": "/v1/nowhere"}, {"CONTENT_TYPE": None},
                  {"length": 1 << 40}):
        refusal = app.refuse_head(head(**wrong))
        assert refusal.status == 401 and ("WWW-Authenticate", "Bearer") in refusal.headers
    assert app.refuse_head(head(AUTHORIZATION=f"Bearer {KEY}")) is None
    assert app.refuse_head(head(AUTHORIZATION=f"Bearer {KEY}", HOST="any.example")) is None     # the key keeps pages out
    assert app.refuse_head(head("GET", "/health")) is None


def test_a_worker_that_drains_refuses_heads(export):
    engine = Engine(export, FakeBackbone(), Settings())
    try:
        app = create_app(engine, Settings())
        assert app.refuse_head(head()) is None
        engine.drain()
        refusal = app.refuse_head(head())
        assert refusal.status == 503 and "shutting down" in json.loads(refusal.body)["error"]
        assert int(dict(refusal.headers)["Retry-After"]) >= 1
        assert app.refuse_head(head("GET", "/health")) is None
    finally:
        engine.close()


def test_hosts(engine):
    local, named, public = (create_app(engine, Settings(**more)).test_client() for more in (
        {}, {"allowed_hosts": ("worker.example",)}, {"host": "0.0.0.0"}))
    for client, host, status in (
            (local, "localhost", 200), (local, "127.0.0.1:8000", 200), (local, "worker.example", 403),
            (named, "worker.example:80", 200), (named, "localhost", 200), (named, "other.example", 403),
            (public, "other.example", 200)):
        for path in ("/health", "/v1/models"):
            response = client.get(path, headers={"Host": host})
            assert response.status_code == status
            if status == 403:
                assert "OPEN_JEV_ALLOWED_HOSTS" in check_error(response, 403, "forbidden")["error"]
        assert post(client, body(request()), {**JSON, "Host": host}).status_code == status


def test_pages_of_other_origins_get_no_permission(client):
    page = {"Origin": "https://attacker.example"}
    preflight = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type",
                 "Access-Control-Request-Private-Network": "true"}
    for path in ("/v1/systemone", "/health", "/v1/models", "/nowhere"):
        assert client.options(path, headers=preflight).status_code in (404, 405)
    for response in (client.options("/v1/systemone", headers=preflight), client.get("/health", headers=page),
                     post(client, body(request()), {**JSON, **page})):
        assert not [name for name, _ in response.headers if name.lower().startswith("access-control-")]
    # What a page may send without asking is not taken.
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        check_error(post(client, body(request()), {**page, "Content-Type": content_type}), 415)


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


class PanicException(BaseException):
    """What an extension module in Rust raises: none of Exception's."""


@pytest.mark.parametrize("error", [PanicException, SystemExit, KeyboardInterrupt, MemoryError])
def test_whatever_is_raised_is_answered(client, engine, monkeypatch, caplog, access, error):
    def explode(*_):
        raise error(" ".join(["very", "private"]))
    for name in ("answer", "health", "models"):
        monkeypatch.setattr(engine, name, explode)
    for response in (post(client, body(request())), client.get("/health"), client.get("/v1/models")):
        check_error(response, 500, "internal_error")
    assert caplog.text.count(f"failed: {error.__name__} at") == 3 and "very private" not in caplog.text
    assert [line["status"] for line in access()] == [500] * 3


# ---------------------------------------------------------------------------------------------------------------------
# The log


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


def test_a_refusal_is_explained_by_type_and_place(client, keyed, access):
    post(client, body({"state": 1, "questions": {"my secret": {"type": "choice", "criteria": {"hush": 1}},
                                                 "other": {"type": "score", "instructions": "?", "criteria": ["a", 1]}}}))
    post(client, b"{")
    post(client, body(request()), {"Content-Type": "text/secret"})
    client.get("/hidden?secret")
    client.put("/health")
    post(keyed, body(request()))
    client.get("/health")
    many, broken, media, path, method, key, fine = access()
    assert many["errors"] == [{"type": "wrong_type", "loc": ["body", "state"]},
                              {"type": "missing", "loc": ["body", "questions", "*", "instructions"]},
                              {"type": "wrong_type", "loc": ["body", "questions", "*", "criteria", "*"]}]
    assert broken["errors"][0]["loc"] == ["body", 1]
    assert [line["errors"] for line in (media, path, method, key)] == [
        [{"type": name}] for name in ("unsupported_media_type", "not_found", "method_not_allowed", "authentication_error")]
    assert "errors" not in fine
    assert not any(word in json.dumps(access()) for word in ("secret", "hush", "other"))


def test_a_client_that_left_is_logged_as_such(client, access):
    for left in (True, False):
        client.post("/v1/systemone", data=body(request()), headers=JSON,
                    environ_overrides={"waitress.client_disconnected": lambda left=left: left})
        client.get("/health", environ_overrides={"waitress.client_disconnected": lambda left=left: left})
    lines = [(line["status"], line.get("answer")) for line in access()]
    assert lines == [(499, 499), (499, 200), (200, None), (200, None)]


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
