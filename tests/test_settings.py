"""Settings: defaults, environment, flags, and refusals that name where a value came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from jev.settings import Settings, SettingsError, misspelt, remarks


def test_defaults():
    s = Settings.from_environment({})
    assert (s.model, s.host, s.port, s.backend, s.max_length, s.graph, s.api_key) == (
        None, "127.0.0.1", 8000, "auto", None, True, None)
    assert s == Settings()


def test_the_environment_and_flags_that_override_it():
    environ = {"OPEN_JEV_MODEL": "/m", "OPEN_JEV_PORT": "81", "OPEN_JEV_BACKEND": "numpy", "OPEN_JEV_MAX_LENGTH": "512",
               "OPEN_JEV_API_KEY": "secret", "OPEN_JEV_QUEUE": "3", "OPEN_JEV_HOST": ""}
    s = Settings.from_environment(environ)
    assert (s.model, s.port, s.backend, s.max_length, s.api_key, s.queue, s.host) == (
        Path("/m"), 81, "numpy", 512, "secret", 3, "127.0.0.1")
    s = Settings.from_environment(environ, port="82", max_length=None, model="/n")
    assert (s.port, s.max_length, s.model) == (82, 512, Path("/n"))


@pytest.mark.parametrize("environ, graph", [
    ({"CUA_S1_GRAPH": "0"}, False), ({"CUA_S1_GRAPH": "0", "OPEN_JEV_GRAPH": "1"}, True),
    ({"OPEN_JEV_GRAPH": "0"}, False)])
def test_graph_has_two_names(environ, graph):
    assert Settings.from_environment(environ).graph is graph


@pytest.mark.parametrize("name, value", [
    ("OPEN_JEV_PORT", "65536"), ("OPEN_JEV_PORT", "x"), ("OPEN_JEV_PORT", "-1"), ("OPEN_JEV_BACKEND", "CUDA"),
    ("OPEN_JEV_MAX_LENGTH", "0"), ("OPEN_JEV_MAX_LENGTH", "16385"), ("OPEN_JEV_GRAPH", "yes"), ("CUA_S1_GRAPH", "2"),
    ("OPEN_JEV_QUEUE", "0"), ("OPEN_JEV_QUEUE_MB", "15"), ("OPEN_JEV_BATCH_ROWS", "0"), ("OPEN_JEV_VERIFY", "yes"),
    ("OPEN_JEV_PORT", "8_000"), ("OPEN_JEV_PORT", "٨٠٠٠"), ("OPEN_JEV_PORT", "+80"), ("OPEN_JEV_PORT", "9" * 5000),
    ("OPEN_JEV_DRAIN_SECONDS", "1_0"), ("OPEN_JEV_DRAIN_SECONDS", "-1"), ("OPEN_JEV_DRAIN_SECONDS", "86400.5"),
    ("OPEN_JEV_DRAIN_SECONDS", "nan"), ("OPEN_JEV_HOST", "a b"),
    ("OPEN_JEV_ALLOWED_HOSTS", "a:80"),
    ("OPEN_JEV_API_KEY", ""), ("OPEN_JEV_API_KEY", "two words")])
def test_refusals_name_the_variable(name, value):
    with pytest.raises(SettingsError, match=f"^{name}: expected"):
        Settings.from_environment({name: value})


@pytest.mark.parametrize("name, text, value", [
    ("port", " 8000\r", 8000), ("port", "007", 7), ("drain_seconds", "2.5\n", 2.5), ("drain_seconds", ".5", 0.5)])
def test_numbers_may_have_spaces_around_them(name, text, value):
    assert getattr(Settings.from_environment({f"OPEN_JEV_{name.upper()}": text}), name) == value


def test_a_refused_flag_is_named_and_a_key_is_shown_nowhere():
    with pytest.raises(SettingsError, match="^--port: expected"):
        Settings.from_environment({"OPEN_JEV_PORT": "80"}, port="many")
    assert "secret" not in repr(Settings(api_key="secret"))
    with pytest.raises(SettingsError) as refused:
        Settings.from_environment({"OPEN_JEV_API_KEY": "sec ret"})
    assert "sec" not in str(refused.value).replace("seconds", "")


def test_only_the_settings_that_are_used_are_read():
    environ = {"OPEN_JEV_PORT": "x", "OPEN_JEV_MODEL": "/m", "OPEN_JEV_API_KEY": ""}
    assert Settings.from_environment(environ, ["model", "graph"]).model == Path("/m")
    with pytest.raises(SettingsError, match="^OPEN_JEV_PORT: expected"):
        Settings.from_environment(environ, ["port"])


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(SettingsError) as refused:
        Settings.from_environment({"OPEN_JEV_PORT": "x", "CUA_S1_GRAPH": "on", "OPEN_JEV_QUEUE": "3"}, backend="gpu")
    named = [line.partition(":")[0] for line in str(refused.value).splitlines()]
    assert named == ["OPEN_JEV_PORT", "--backend", "CUA_S1_GRAPH"]


def test_a_setting_is_named_as_whoever_set_it_did():
    s = Settings.from_environment({"CUA_S1_GRAPH": "0", "OPEN_JEV_PORT": "1"}, port="2")
    assert (s.named("graph"), s.named("port"), s.named("queue")) == ("CUA_S1_GRAPH", "--port", "--queue")


@pytest.mark.parametrize("value", ["tcp://10.96.0.7:8000", "udp://[fd00::7]:8000"])
def test_what_kubernetes_sets_for_a_service_is_ignored_with_a_line(value):
    service = {"OPEN_JEV_PORT": value, "OPEN_JEV_PORT_8000_TCP": value, "OPEN_JEV_PORT_8000_TCP_PORT": "8000",
               "OPEN_JEV_SERVICE_HOST": "10.96.0.7", "OPEN_JEV_SERVICE_PORT": "8000",
               "OPEN_JEV_PORT_8000_TCP_ADDR": "10.96.0.7", "OPEN_JEV_X_PORT": value, "OPEN_JEV_HOSTS_PORT": value}
    assert Settings.from_environment(service) == Settings()
    remark, = remarks(service)
    assert remark.startswith(f"OPEN_JEV_PORT: ignored: {value} ") and "Kubernetes" in remark and "--port" in remark
    assert remarks(service, port="80") == remarks(service, ["model"]) == []
    assert Settings.from_environment(service, port="80").port == 80


@pytest.mark.parametrize("name, right", [
    ("OPEN_JEV_MODLE", "OPEN_JEV_MODEL"), ("OPEN_JEV_DRAIN_SECOND", "OPEN_JEV_DRAIN_SECONDS"),
    ("OPENJEV_PORT", "OPEN_JEV_PORT"), ("open_jev_port", "OPEN_JEV_PORT"), ("OPEN_JEV_APIKEY", "OPEN_JEV_API_KEY"),
    ("OPNE_JEV_PORT", "OPEN_JEV_PORT"),
    ("CUA_S1_GRAPHS", "CUA_S1_GRAPH"), ("OPEN_JEV_HOME", None), ("OPEN_JEV_TOKEN", None), ("OPENAI_API_KEY", None),
    ("OMNI_JEV_BIND", None), ("PORT", None), ("OPEN_JEV_PORT", None)])
def test_variables_that_are_nearly_settings(name, right):
    found = remarks({name: "81", "PATH": "/bin"})
    assert found == ([] if right is None else [f"{name}: no such setting, so it has no effect; {right} was meant?"])


def test_the_gateway_has_variables_of_its_own(monkeypatch, capsys):
    from jev.gateway.app import main
    names = ["OMNI_JEV_BIND", "OMNI_JEV_BACKEND_URL"]
    service = {"OMNI_JEV_PORT": "tcp://10.96.0.7:80", "OMNI_JEV_SERVICE_PORT": "80", "OPEN_JEV_PRT": "1"}
    assert misspelt({"OMNI_JEV_BACKEND_URLS": "x", **service}, names, names) == [
        "OMNI_JEV_BACKEND_URLS: no such setting, so it has no effect; OMNI_JEV_BACKEND_URL was meant?"]
    monkeypatch.setenv("OMNI_JEV_BNID", "127.0.0.1:0")
    assert main(["--queue", "x"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "jev frontend: OMNI_JEV_BNID: no such setting, so it has no effect; OMNI_JEV_BIND was meant?"
    assert said[1].startswith("jev frontend: --queue: expected")
