"""The tests use nothing of the machine that its user may have in use: fixed ports, settings, the cache folder; and what is
installed is all that the commands need."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pytest

from jev_kernels.runtime import disk
from tests.fakes import ROOT

# A port other than 0 that something listens on or is told to listen on.
FIXED_PORT = re.compile(r"""(create_server|bind)\(\("[^"]*",\s*[1-9]|"--port",\s*"[1-9]\d*"|port=[1-9]\d{3}"""
                        r"""|"OPEN_JEV_PORT": "[1-9]\d*|OMNI_JEV_BIND[^\n]*:[1-9]\d{3}\b""")
REFUSED = ("99999", "65536", "tests/test_settings.py", "tests/test_machine.py")      # never listened on


def test_no_test_listens_on_a_fixed_port():
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path in (ROOT / "tests").rglob("*.py")
             for match in FIXED_PORT.finditer(path.read_text("utf-8"))]
    assert not [where for where in found if not any(text in where for text in REFUSED)]


def test_the_tests_run_without_the_users_settings_and_cache():
    assert not [name for name in os.environ if name.startswith(("OPEN_JEV_", "OMNI_JEV_", "CUA_S1_"))]
    assert Path.home() / ".cache" not in disk.folder().parents


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What an installation copies, as setuptools says, in a folder of its own."""
    pytest.importorskip("setuptools", reason="needs setuptools, which builds the package")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    for name in ("jev", "jev_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", "import setuptools; setuptools.setup()", "build_py", "--build-lib", str(target)],
                   cwd=source, check=True, capture_output=True, timeout=100)
    return target


def test_an_installation_has_all_modules_and_the_demo_works_in_it(installed, tmp_path):
    for package in ("jev", "jev_kernels"):
        wanted = {path.relative_to(ROOT) for path in (ROOT / package).rglob("*")
                  if path.is_file() and path.suffix != ".pyc"}
        assert wanted == {path.relative_to(installed) for path in (installed / package).rglob("*") if path.is_file()}
    shown = subprocess.run([sys.executable, "-m", "jev", "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                           env={**os.environ, "PYTHONPATH": str(installed), "OPEN_JEV_BACKEND": "numpy"})
    assert shown.returncode == 0, shown.stderr
    assert "chosen:" in shown.stdout and f"posting {installed / 'jev' / 'example-request.json'}" in shown.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_says_that_the_checkout_cannot_be_written_to():
    user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory() as folder:       # pytest's own folders are closed to other users
        for name in ("Makefile", "setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
            (Path(folder) / name).chmod(0o644)
        Path(folder).chmod(0o555)
        shown = subprocess.run(["make", "demo", "PYTHON=true"], cwd=folder, capture_output=True, text=True, timeout=60, **user)
        Path(folder).chmod(0o755)
    assert shown.returncode != 0 and f"{folder} cannot be written to" in shown.stderr and "venv" not in shown.stderr


def test_score_on_a_terminal_keeps_its_bar_apart_and_knows_the_total(tmp_path):
    from tests.fakes import body, demo_export, request
    export = demo_export(tmp_path)
    (tmp_path / "r.jsonl").write_bytes(b"\n\n".join(body(request(state=f"State {i}")) for i in range(3)) + b"\n")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "jev", "score", str(tmp_path / "r.jsonl"), str(export.path), "--backend", "numpy"]
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                block = os.read(ours, 65536)
            except OSError:                             # the other side is closed
                break
            shown += block
        assert process.wait(30) == 0
    os.close(ours)
    lines = shown.decode().split("\n")
    answers = [line for line in lines if '"answers"' in line]
    assert len(answers) == 3 and "0/3" in shown.decode() and "3/3" in shown.decode()
    # What the terminal shows of a line is what stands behind its last carriage return.
    assert all(line.rstrip("\r").rpartition("\r")[2].startswith('{"model"') for line in answers)
