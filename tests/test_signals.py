"""Signals at any moment of a start: the process ends, without a traceback, in both of the ways in which it is started."""

from __future__ import annotations

import configparser
import os
import signal
import subprocess
import sys

import pytest

from tests.fakes import ROOT

# Sends the signal SIGNAL when the module MOMENT is first asked for, from where Python can only report an exception.
SITE = """
import os, sys

class Dying:
    def __del__(self):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        for _ in range(1000):
            pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["MOMENT"]:
            sys.meta_path.remove(self)
            print("now", flush=True)
            if os.environ["DYING"] == "1":
                Dying()
            else:
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))

sys.meta_path.insert(0, Finder())
"""
WAYS = {"module": ["-m", "jev"], "command": ["-c", "import sys; from jev.__main__ import main; sys.exit(main())"]}


def start(folder, moment, number, *command, way="module", dying=False, before=None):
    (folder / "sitecustomize.py").write_text(SITE)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "MOMENT": moment, "SIGNAL": str(int(number)),
           "DYING": str(int(dying))}
    done = subprocess.run([sys.executable, *WAYS[way], *command], cwd=folder, env=env, capture_output=True, text=True,
                          timeout=60, preexec_fn=before)
    assert done.stdout == "now\n", done
    assert "Traceback" not in done.stderr and "KeyboardInterrupt" not in done.stderr, done
    return done


def test_the_command_is_what_the_tests_call():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options.entry_points"]["console_scripts"].split() == ["jev", "=", "jev.__main__:main"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", ["serve", "frontend", "check", "export"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_a_command_has_begun(tmp_path, way, command, number):
    assert start(tmp_path, "jev.arguments", number, command, way=way).returncode == -number


@pytest.mark.parametrize("command, moment", [
    (["serve", "--port", "0"], "flask"), (["serve", "--port", "0"], "jev.logs"),
    (["serve", "--port", "0"], "jev.model.backbone"),
    (["frontend", "--bind", "127.0.0.1:0"], "jev.gateway.app"), (["frontend", "--bind", "127.0.0.1:0"], "flask")])
def test_a_service_that_loads_ends_though_no_exception_could_end_it(tmp_path, command, moment):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        done = start(tmp_path, moment, number, *command, dying=True)
        assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("command, moment", [
    (["check", "/nowhere"], "numpy"), (["score", "/nowhere"], "tqdm"), (["export", "--help"], "jev.export.export")])
def test_a_command_is_interrupted_in_a_word(tmp_path, command, moment):
    done = start(tmp_path, moment, signal.SIGINT, *command)
    assert done.returncode == 130 and done.stderr == "interrupted\n"


def test_what_a_library_makes_of_an_interrupt_is_one(tmp_path):
    """NumPy's import in C reports whatever goes wrong as an ImportError."""
    (tmp_path / "numpy.py").write_text("try:\n    import jev_moment\nexcept BaseException:\n    raise ImportError('broken')\n")
    done = start(tmp_path, "jev_moment", signal.SIGINT, "check", "/nowhere")
    assert done.returncode == 130 and done.stderr == "interrupted\n"


def test_nohup_keeps_a_service_from_the_end_of_its_terminal(tmp_path):
    done = start(tmp_path, "flask", signal.SIGHUP, "serve", "--port", "0", "--model", "/nowhere",
                 before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert done.returncode == 1 and "no such export folder" in done.stderr
