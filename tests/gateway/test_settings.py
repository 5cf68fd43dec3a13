"""The gateway's settings: where they come from, and what is said about a wrong one."""

from __future__ import annotations

import pytest

from jev.gateway.settings import GatewaySettings
from jev.settings import SettingsError


def test_the_settings():
    assert GatewaySettings.from_environment({}) == GatewaySettings()
    settings = GatewaySettings.from_environment(
        {"OMNI_JEV_BIND": "[::1]:80", "OMNI_JEV_BACKEND_URL": " http://a:1/p/ , https://b ",
         "OMNI_JEV_HEALTH_TIMEOUT_MS": "", "OMNI_JEV_MAX_RESPONSE_BYTES": "7", "OMNI_JEV_ALLOWED_HOSTS": "A.example, b"},
        queue="3")
    assert settings.hosts() == {"a.example", "b"}
    assert settings.address() == ("::1", 80)
    assert settings.backends() == ["http://a:1/p", "https://b"]
    assert (settings.health_timeout_ms, settings.max_response_bytes, settings.queue) == (2000, 7, 3)


def test_any_host_is_answered_for_where_others_can_reach_the_gateway():
    for bind, allowed, hosts in (("0.0.0.0:80", "", None), ("192.0.2.1:80", "a", None), ("127.0.0.1:80", "*", None),
                                 ("127.0.0.1:80", "", frozenset()), ("[::1]:80", "a", {"a"})):
        assert GatewaySettings(bind=bind, allowed_hosts=allowed).hosts() == hosts


@pytest.mark.parametrize("name, value, says", [
    ("BACKEND_URL", "http://user:hunter2@127.0.0.1:8000", "must not hold credentials"),
    ("BACKEND_URL", "http://hunter2@127.0.0.1:8000", "must not hold credentials"),
    ("BACKEND_URL", "http://ok:1,http://user:hun,ter2@host", "entry 2"),
    ("BACKEND_URL", "user:hunter2@host", "http:// or https://"),
    ("BACKEND_URL", "http://host/?key=hunter2", "query"),
    ("BACKEND_URL", "http://host/#hunter2", "fragment"),
    ("BACKEND_URL", "http://host:hunter2/", "host or port"),
    ("BACKEND_URL", "http://[hunter2/", "host or port"),
    ("BACKEND_URL", "http://hunter2\n@host", "characters"),
    ("BACKEND_URL", "http://host/\u00e9hunter2", "characters"),
    ("BACKEND_URL", "http:///hunter2", "host"),
    ("BACKEND_URL", "ftp://hunter2", "http:// or https://"),
    ("BACKEND_URL", "http://a..hunter2", "host or port"), ("BACKEND_URL", f"http://hunter2{'x' * 60}", "host or port"),
    ("BACKEND_URL", "http://a,http://a/", "twice"), ("ALLOWED_HOSTS", "http://hunter2", "host names"),
    ("ALLOWED_HOSTS", "hunter2:80", "without ports"),
    ("BACKEND_URL", "http://a,", "entry 2"),
    ("BIND", "localhost:hunter2", "IP address"), ("BIND", "localhost:8080", "IP address"),
    ("BIND", "8080", "IP address"), ("BIND", "::1:80", "IP address"), ("BIND", "127.0.0.1:65536", "IP address"),
    ("BIND", "[127.0.0.1]:1", "IP address"),
    ("HEALTH_TIMEOUT_MS", "hunter2", "integer"), ("HEALTH_TIMEOUT_MS", "0", "integer"),
    ("MAX_RESPONSE_BYTES", "-1", "integer"), ("MAX_RESPONSE_BYTES", "9" * 30, "integer"), ("QUEUE", "1.5", "integer")])
def test_a_wrong_setting_is_named_and_its_value_is_not(name, value, says):
    with pytest.raises(SettingsError) as caught:
        GatewaySettings.from_environment({"OMNI_JEV_" + name: value})
    message = str(caught.value)
    assert says in message and "OMNI_JEV_" + name in message
    assert "hunter2" not in message and "ter2" not in message
    assert caught.value.__context__ is None or caught.value.__suppress_context__  # nor in a traceback


def test_all_mistakes_are_told_at_once_by_the_names_that_were_used():
    with pytest.raises(SettingsError) as caught:
        GatewaySettings.from_environment({"OMNI_JEV_QUEUE": "0", "OMNI_JEV_BIND": "nowhere"}, bind="8080", backend_url="x")
    assert [line.partition(":")[0] for line in str(caught.value).split("\n")] == ["--bind", "--backend-url", "OMNI_JEV_QUEUE"]


def test_the_file_of_certificates_is_looked_at_before_anything_is_served(tmp_path):
    (tmp_path / "hunter2").write_text("no certificate")
    for name, says in ("missing", "No such file"), ("hunter2", "no certificates in it"):
        environ = {"SSL_CERT_FILE": str(tmp_path / name), "OMNI_JEV_BACKEND_URL": "http://a,https://b"}
        with pytest.raises(SettingsError, match=f"^SSL_CERT_FILE: {says}") as caught:
            GatewaySettings.from_environment(environ)
        assert "hunter2" not in str(caught.value)
        GatewaySettings.from_environment({**environ, "OMNI_JEV_BACKEND_URL": "http://a"})     # it is not needed
