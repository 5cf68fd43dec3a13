"""Which hosts a server on the loopback address answers for."""

from __future__ import annotations

import pytest

from jev.http.hosts import checked_hosts, host_refused, is_loopback, parse_allowed_hosts


@pytest.mark.parametrize("host", [
    "localhost", "LocalHost:8000", "localhost.", "worker.localhost:1", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "[::1]",
    "[::1]:8000", "[::ffff:127.0.0.1]:1", "localhost:"])
def test_the_loopback_is_answered_for(host):
    assert not host_refused(host, "/health", frozenset())


@pytest.mark.parametrize("host", [
    "", "attacker.example", "attacker.example:8000", "localhost.attacker.example", "127.0.0.1.attacker.example", "0.0.0.0",
    "0.0.0.0:8000", "10.0.0.1", "[::]", "[::1", "::1", "localhost, attacker.example", "localhost@attacker.example",
    "attacker.example/localhost", "localhost:8000:1", "notlocalhost", "2130706433", "[fe80::1]", " localhost"])
def test_any_other_host_is_refused(host):
    assert host_refused(host, "/health", frozenset())


def test_names_that_are_allowed_count_besides_the_loopback():
    allowed = frozenset(parse_allowed_hosts("Worker.Example, other.example.,[fd00::1]"))
    for host in ("worker.example", "WORKER.example:81", "other.example", "[fd00::1]:8000", "localhost"):
        assert not host_refused(host, "/", allowed)
    assert host_refused("x.worker.example", "/", allowed)


def test_the_target_of_a_proxy_counts_too():
    assert host_refused("localhost", "http://attacker.example/health", frozenset())
    assert not host_refused("localhost", "http://127.0.0.1:8000/health", frozenset())
    assert not host_refused(None, "/health", frozenset())           # HTTP/1.0 has no Host, and no browser speaks it


@pytest.mark.parametrize("bound, key, allowed, checks", [
    ("127.0.0.1", None, (), True), ("localhost", None, (), True), ("::1", None, (), True), ("127.0.0.2", None, ("a",), True),
    ("127.0.0.1", "key", (), False), ("0.0.0.0", None, (), False), ("::", None, (), False), ("10.1.2.3", None, (), False),
    ("127.0.0.1", None, ("*",), False), ("127.0.0.1", None, ("a", "*"), False)])
def test_hosts_are_checked_on_the_loopback_without_a_key(bound, key, allowed, checks):
    assert (checked_hosts(bound, key, allowed) is not None) == checks


@pytest.mark.parametrize("text", ["a:80", "http://a", "a,,b", "a b", "a/", ","])
def test_a_list_of_hosts_that_is_none(text):
    with pytest.raises(ValueError, match="host names separated by commas"):
        parse_allowed_hosts(text)


def test_no_name_is_the_loopback_by_what_dns_says():
    assert not is_loopback("localtest.me") and not is_loopback("127.0.0.1.nip.io")
