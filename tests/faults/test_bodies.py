"""Ten thousand hostile bodies, and requests whose Content-Length lies."""

from __future__ import annotations

import collections
import http.client
import json
import threading

import pytest

from tests.faults.harness import GOOD_BODY, ask, connect, post_bytes, read_all
from tests.faults.hostile import KINDS, bodies

COUNT = 10_000
CLIENTS = 4


def test_ten_thousand_hostile_bodies(pair):
    """Each gets the status it deserves, in JSON, on a connection that goes on: never a 500, never silence."""
    wrong, seen, lock = [], collections.Counter(), threading.Lock()

    def send(number):
        port = (pair.worker.port, pair.gateway.port)[number % 2]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for kind, body, statuses in bodies(number, COUNT // CLIENTS):
            try:
                connection.request("POST", "/v1/systemone", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                content = json.loads(response.read())
            except Exception as error:
                wrong.append((kind, body[:200], repr(error)))
                connection.close()
                continue
            with lock:
                seen[kind, response.status] += 1
            if response.status not in statuses or response.status != 200 and set(content) != {"error", "detail"}:
                wrong.append((kind, body[:200], response.status, str(content)[:300]))
            elif response.status == 422 and len(json.dumps(content)) > 5000 + len(content["detail"]) * 500:
                wrong.append((kind, body[:200], "echoes too much"))
        connection.close()

    threads = [threading.Thread(target=send, args=(number,)) for number in range(CLIENTS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong, wrong[:5]
    assert sum(seen.values()) == COUNT and {kind for kind, _ in seen} == set(KINDS)
    pair.check_unharmed()


@pytest.mark.parametrize("which", ["worker", "gateway"])
def test_lengths_that_lie(pair, which):
    port = getattr(pair, which).port
    for _ in range(10):
        for data in (post_bytes(GOOD_BODY, length=len(GOOD_BODY) + 9), post_bytes(GOOD_BODY, length=10**9),
                     post_bytes(b'{"state": 1}' + GOOD_BODY, length=12), post_bytes(GOOD_BODY, b"Content-Length: 1"),
                     post_bytes(b"5\r\nabc", b"Transfer-Encoding: chunked"),
                     post_bytes(b"-5\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
                     post_bytes(b"", b"Content-Length: 99999999999999999999")):
            with connect(port) as sock:
                sock.sendall(data)
                sock.settimeout(0.05)
                try:
                    reply = read_all(sock)
                except TimeoutError:                                # it waits for the rest, as it should
                    reply = b""
                assert not reply.startswith(b"HTTP/1.1 200") and b" 500 " not in reply[:20]
    pair.check_unharmed()


def test_other_media_types_and_encodings(pair):
    connection = http.client.HTTPConnection("127.0.0.1", pair.gateway.port, timeout=30)
    for headers in ({"Content-Type": "text/plain"}, {}, {"Content-Type": "multipart/form-data; boundary=x"},
                    {"Content-Type": "\xe9"}, {"Content-Type": "application/json", "Content-Encoding": "gzip"}):
        connection.request("POST", "/v1/systemone", GOOD_BODY, headers)
        response = connection.getresponse()
        detail = json.loads(response.read())["detail"]
        assert response.status == 415 and detail["error_type"] == "unsupported_media_type"
    connection.close()
    assert ask(pair.gateway.port).status == 200
    pair.check_unharmed()
