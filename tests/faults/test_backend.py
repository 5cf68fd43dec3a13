"""A backend that raises, returns what is not a number, or runs out of device memory, once."""

from __future__ import annotations

import pytest

from tests.faults.harness import Asking, answers, ask, eventually, health


@pytest.mark.parametrize("what", ["raise", "memory", "nan"])
def test_a_failed_inference_is_a_500_and_nothing_else_suffers(pair, what):
    for port in (pair.worker.port, pair.gateway.port):
        pair.order(what, "as ordered")
        got = ask(port)
        assert got.status == 500
        assert got.json == {"error": "model inference failed",
                            "detail": {"error_type": "inference_error", "message": "model inference failed"}}
        assert eventually(lambda: health(port) == 200)
    pair.check_unharmed()


def test_those_who_share_a_failing_forward_fail_and_those_after_do_not(pair):
    first = pair.hold(pair.gateway.port)
    pair.order("raise", "once")
    requests = [Asking(pair.gateway.port) for _ in range(5)]
    pair.release()
    results = [request.result() for request in (first, *requests)]
    assert {got.status for got in results} <= {200, 500} and sum(got.status == 500 for got in results) >= 1
    for got in results:
        assert got.status == 500 or answers(got) == pair.right
    pair.check_unharmed()
