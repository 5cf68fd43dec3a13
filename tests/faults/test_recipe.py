"""recipe/open_jev/native.md, followed word for word with a tiny base model, and what it says of settings and units."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest

from jev.frontend import GatewaySettings
from jev.settings import Settings
from tests.faults.harness import ROOT, connect, eventually, free_port

RECIPE = (ROOT / "recipe/open_jev/native.md").read_text()


def blocks(kind: str) -> dict[str, str]:
    """Code blocks by the name in the comment before them: <!-- kind: name -->."""
    return {name: code for name, code in re.findall(rf"<!-- {kind}: (.+?) -->\n```\w+\n(.*?)```", RECIPE, re.S)}


def listening(port: int) -> bool:
    try:
        connect(port).close()
    except ConnectionError:
        return False
    return True


def test_the_recipe_ends_with_an_answer_through_the_gateway(tmp_path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "jev"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.faults.rehearsal "$@"\n')
    command.chmod(0o755)
    subprocess.run([command, "inputs", tmp_path], cwd=ROOT, check=True, timeout=60)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPEN_JEV_", "OMNI_JEV_", "CUA_S1_"))}
    port, gateway_port = free_port(), free_port()
    env = {**clean, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1",
           **{name.upper(): str(tmp_path / name) for name in ("base", "checkpoint", "export")},
           "PORT": str(port), "GATEWAY_PORT": str(gateway_port)}
    steps = blocks("rehearsed")
    assert list(steps) == ["export", "serve", "ask the worker", "gateway", "ask the gateway"]

    def run(name: str) -> str:
        command = ["sh", "-ec", steps[name]]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def start(name: str, port: int) -> subprocess.Popen:
        with (tmp_path / f"{name}.log").open("wb") as log:
            # The last command of a step replaces the shell, so that signals reach it.
            before, _, last = steps[name].strip().rpartition("\n")
            first_word = next(i for i, word in enumerate(last.split(" ")) if "=" not in word)
            words = last.split(" ")
            last = " ".join([*words[:first_word], "exec", *words[first_word:]])
            child = subprocess.Popen(["sh", "-ec", f"{before}\n{last}"], cwd=ROOT, env=env, stdout=log, stderr=log)
        assert eventually(lambda: child.poll() is not None or listening(port), 90)
        assert child.poll() is None, (tmp_path / f"{name}.log").read_text()
        return child

    assert "a complete export" in run("export")
    children = []
    try:
        children.append(start("serve", port))
        direct = run("ask the worker")
        children.append(start("gateway", gateway_port))
        through = json.loads(run("ask the gateway"))
    finally:
        for child in reversed(children):
            child.terminate()
            assert child.wait(20) == 0
    assert set(through["answers"]) == {"next_step", "urgent", "upset"}
    health, end = json.JSONDecoder().raw_decode(direct)
    assert health["status"] == "ready"
    assert json.loads(direct[end:])["answers"] == through["answers"]


def test_every_setting_is_in_the_recipe_with_its_default():
    rows = {row[1].strip("` "): row for line in RECIPE.splitlines() if (row := line.split("|"))[1:] and len(row) == 6}
    for f in fields(Settings):
        row = rows[f.metadata["env"][0]]
        assert row[2].strip("` ") == (f.metadata["flag"] or "")
        expected = {"graph": "1", "drain_seconds": "60", "api_key": "none"}.get(f.name, f.default)
        assert f.default is None and f.name != "api_key" or row[3].strip() == str(expected), row
    for f in fields(GatewaySettings):
        row = rows["OMNI_JEV_" + f.name.upper()]
        assert row[2].strip("` ") == "--" + f.name.replace("_", "-")
        assert row[3].strip() == str(f.default)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_units_are_valid(tmp_path):
    units = blocks("unit")
    assert list(units) == ["jev-worker.service", "jev-gateway.service"]
    for name, text in units.items():
        path = tmp_path / name
        path.write_text(text.replace("/opt/jev/.venv/bin/jev", "/bin/true").replace("User=jev", "User=root"))
        verify = ["systemd-analyze", "verify", "--man=no", path]
        done = subprocess.run(verify, capture_output=True, text=True, timeout=60)
        said = [line for line in done.stderr.splitlines() if name in line]
        assert not said, said
