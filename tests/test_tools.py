"""Every tool starts from anywhere, shows its help without what it needs, and says in a sentence what that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import ROOT

TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py") if "__main__" in path.read_text("utf-8"))
ON_A_GPU = {"bench_cache": [], "bench_forward": [], "bench_gemm": [], "bench_kernels": [], "bench_serving": [],
            "bench_start": [], "synthetic_worker": ["--tokenizer", "x"]}
WITH_TORCH = {"attention_waits": [], "bench_attention": [], "bench_export": [], "bench_gdn": [], "gpu_parity": [],
              "make_export_fixtures": [], "make_parity_fixtures": []}
ON_ANYTHING = {"bench_choice", "bench_gateway", "bench_host", "golden_bits", "kernel_code", "oldest", "soak", "try_package"}

# One process loads the libraries once and then is, in a copy for each, a Python that is given a tool. The copies find
# neither torch nor a GPU. What they print is framed by the tool's name and exit status.
EVERY_TOOL = """
import os, runpy, sys
import flask, numba.cuda, numpy, safetensors, tokenizers, urllib3, waitress
sys.path.remove(os.getcwd()) if os.getcwd() in sys.path else None
folder, *calls = sys.argv[1:]
for call in calls:
    sys.stdout.flush()
    if os.fork() == 0:
        name, *arguments = call.split(" ")
        sys.modules["torch"] = None
        sys.path[0], sys.argv, status = folder, [f"{folder}/{name}.py", *arguments], 0
        sys.stderr = sys.stdout
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except BaseException as error:
            print(f"Traceback {error!r}")
        print(f"=== {name} {status}", flush=True)
        os._exit(0)
    os.wait()
"""


def run_all(calls: dict[str, list[str]], folder: Path) -> dict[str, tuple[str, str]]:
    """(exit status, output) of each tool, started in ``folder``."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    lines = [" ".join([name, *arguments]) for name, arguments in calls.items()]
    done = subprocess.run([sys.executable, "-c", EVERY_TOOL, str(ROOT / "tools"), *lines],
                          cwd=folder, env={**env, "CUDA_VISIBLE_DEVICES": "-1"}, capture_output=True, text=True, timeout=250)
    found, said = {}, []
    for line in done.stdout.splitlines():
        if line.startswith("=== "):
            found[line.split()[1]] = (line.split()[2], "\n".join(said))
            said = []
        else:
            said.append(line)
    assert list(found) == list(calls), done.stderr
    return found


def test_every_tool_shows_its_help_from_anywhere(tmp_path):
    assert set(TOOLS) == {*ON_A_GPU, *WITH_TORCH, *ON_ANYTHING}
    for name, (status, said) in run_all({name: ["--help"] for name in TOOLS}, tmp_path).items():
        assert status == "0" and said.startswith(f"usage: {name}.py"), said


def test_every_tool_says_in_a_sentence_what_it_misses(tmp_path):
    found = run_all(ON_A_GPU | WITH_TORCH | {"bench_kernels": ["--against", "torch"]}, tmp_path)
    for name, (status, said) in found.items():
        torch = name in WITH_TORCH or name == "bench_kernels"
        needs = "the Python package torch, which" if torch else "an NVIDIA GPU, and there"
        assert status == "1" and said.startswith(f"{name}.py: needs {needs}") and "\n" not in said, said


@pytest.mark.parametrize("name", ["bench_choice", "bench_host"])
def test_an_export_that_is_not_there_is_a_sentence(name, tmp_path):
    done = subprocess.run([sys.executable, ROOT / f"tools/{name}.py", "/nope"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 1 and done.stderr == f"{name}.py: /nope: no such export folder\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_tool_however_that_ends(number, tmp_path):
    program = ("import sys; sys.path.insert(0, sys.argv[1])\nfrom tools.tool import child\n"
               "process = child(['sh', '-c', 'echo started; exec sleep 60'])\nprocess.wait()")
    tool = subprocess.Popen([sys.executable, "-c", program, str(ROOT)], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with tool:
        assert tool.stdout.readline() == "started\n"
        tool.send_signal(number)
        assert tool.wait(10) == -number
        assert tool.stdout.read() == ""                 # the end of it: nobody holds the pipe any more


def test_the_serving_benchmark_leaves_nothing_behind_a_worker_that_dies(tmp_path, monkeypatch):
    from tools import bench_serving
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    started = []
    monkeypatch.setattr(bench_serving, "child", lambda *a, **k: started.append(subprocess.Popen(*a, **k)) or started[-1])
    with pytest.raises(SystemExit, match="did not start:\n.*needs an NVIDIA GPU"):
        bench_serving.Service(tmp_path, tmp_path / "tokenizer.json", [])
    assert started and all(process.returncode is not None for process in started)


def test_the_oldest_versions_are_the_lower_bounds():
    from tools.oldest import oldest
    assert oldest(["\n# why\nnumpy>=2.0,<2.5\nnumba-cuda[cu13]>=0.30,<0.31", "numpy>=2.0,<2.5"]) == {
        "numpy": "2.0", "numba-cuda": "0.30"}
    for wrong in ("numpy", "numpy<2", "numpy>=2.0\nnumpy>=2.1"):
        with pytest.raises(SystemExit, match="setup.cfg: numpy"):
            oldest([wrong])
