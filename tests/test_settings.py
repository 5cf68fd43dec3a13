"""Settings: defaults, environment, flags, and refusals that name where a value came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from jev.settings import Settings, SettingsError


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
    ("OPEN_JEV_QUEUE", "0"), ("OPEN_JEV_BATCH_ROWS", "0"), ("OPEN_JEV_DRAIN_SECONDS", "nan"), ("OPEN_JEV_HOST", "a b"),
    ("OPEN_JEV_ALLOWED_HOSTS", "a:80"),
    ("OPEN_JEV_API_KEY", ""), ("OPEN_JEV_API_KEY", "two words")])
def test_refusals_name_the_variable(name, value):
    with pytest.raises(SettingsError, match=f"^{name}: expected"):
        Settings.from_environment({name: value})


def test_a_refused_flag_is_named_and_a_key_is_shown_nowhere():
    with pytest.raises(SettingsError, match="^--port: expected"):
        Settings.from_environment({"OPEN_JEV_PORT": "80"}, port="many")
    assert "secret" not in repr(Settings(api_key="secret"))
    with pytest.raises(SettingsError) as refused:
        Settings.from_environment({"OPEN_JEV_API_KEY": "sec ret"})
    assert "sec" not in str(refused.value).replace("seconds", "")
