"""Following recipe/open_jev/native.md word for word, with the tiny checkpoint of tests/export_inputs.py.

    python -m tests.faults.rehearsal real|stand-ins|absent export|check|serve|frontend ...

is `jev` with that checkpoint pinned too. The first word says what torch and transformers are: as installed; replaced,
in the three steps of the export that need them, by NumPy; or absent, as in an environment without the extra `export`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from jev import cli
from jev.checkpoint import pinned
from jev.checkpoint.demo import CHAT_PREFIX, CHAT_SUFFIX
from jev.export import command, merge
from tests.export_inputs import CONFIG, SOURCE, write_base, write_checkpoint
from tests.faults.harness import ROOT, connect, eventually, free_port

RECIPE = (ROOT / "recipe/open_jev/native.md").read_text()
PREFIX = "/opt/jev"  # where the recipe installs
WEIGHT, BIAS = [0.25, -0.125] * (CONFIG.hidden_size // 2), 0.5


def blocks(kind: str) -> dict[str, str]:
    """Code blocks by the name in the comment before them: <!-- kind: name -->."""
    return {name: code for name, code in re.findall(rf"<!-- {kind}: (.+?) -->\n```\w+\n(.*?)```", RECIPE, re.S)}


def environments(text: str) -> dict[str, str]:
    """Virtual environments that ``text`` makes -> the extra that it installs there."""
    installs = dict(re.findall(r"(\S+)/bin/pip install '\.\[(\w+)\]'", text))
    assert installs and all(f"python3 -m venv {folder}" in text for folder in installs)
    return installs


def downloads() -> list[tuple[str, str]]:
    """(repository, folder) of what the recipe downloads: the base, the checkpoint."""
    return re.findall(r"hf download (\S+) --local-dir (\S+) ", RECIPE)


def write_downloads(folder: Path, real_torch: bool) -> None:
    """What the recipe's downloads leave in ``folder``, in small; the checkpoint in the part that is called so there."""
    (_, base), (_, repository) = downloads()
    inside = "package/checkpoint"
    write_base(folder / base)
    write_checkpoint(folder / repository / inside)
    if real_torch:
        import torch
        torch.save({"weight": torch.tensor([WEIGHT]), "bias": torch.tensor([BIAS])},
                   folder / repository / inside / "head.pt")
    else:
        (folder / repository / inside / "head.pt").write_bytes(b"stands for the head, which takes torch to write")
    for root, part, commit in ((base, "", SOURCE.base_revision), (repository, inside, SOURCE.checkpoint_revision)):
        (folder / root / part / "revision").unlink()  # `hf download` notes the commit of each file instead
        for path in [p for p in (folder / root).rglob("*") if p.is_file()]:
            note = folder / root / ".cache/huggingface/download" / f"{path.relative_to(folder / root)}.metadata"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{commit}\n{'e' * 40}\n1712656091.123\n")


def listening(port: int) -> bool:
    try:
        connect(port).close()
    except ConnectionError:
        return False
    return True


def follow(folder: Path, torch: str) -> None:
    """Do what the recipe says, from the export to an answer through the gateway. torch: "real" or "stand-ins"."""
    write_downloads(folder, torch == "real")
    (folder / "recipe").symlink_to(ROOT / "recipe")
    for environment, extra in environments(RECIPE).items():
        assert environment.startswith(PREFIX)
        command = folder / environment[1:] / "bin/jev"
        command.parent.mkdir(parents=True)
        here = torch if extra == "export" else "absent"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.faults.rehearsal {here} "$@"\n')
        command.chmod(0o755)
    plain = re.search(r"Everything below writes\s`jev` for `/(\S+)/jev`", RECIPE)[1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OPEN_JEV_", "OMNI_JEV_", "CUA_S1_"))
                 and k not in ("BASE", "CHECKPOINT", "EXPORT")}
    port, gateway_port = free_port(), free_port()
    env = {**inherited, "PATH": f"{folder / plain}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
           "OPENBLAS_NUM_THREADS": "1", "PORT": str(port), "GATEWAY_PORT": str(gateway_port)}
    steps = {name: step.replace(PREFIX, shlex.quote(f"{folder}{PREFIX}")) for name, step in blocks("rehearsed").items()}
    assert list(steps) == ["export", "serve", "ask the worker", "gateway", "ask the gateway"]
    said = run("export", steps, folder, env)
    assert "a complete export" in said, said
    # Variables that a step sets are there in the next, in the same terminal.
    settings = "\n".join(line for line in steps["export"].splitlines() if re.match(r"[A-Z]+=", line))
    steps["serve"] = f"{settings}\n{steps['serve']}"
    children = []
    try:
        children.append(start("serve", steps, folder, env, port))
        direct = run("ask the worker", steps, folder, env)
        children.append(start("gateway", steps, folder, env, gateway_port))
        through = json.loads(run("ask the gateway", steps, folder, env))
    finally:
        for child in reversed(children):
            child.terminate()
            assert child.wait(20) == 0
    assert set(through["answers"]) == {"next_step", "urgent", "upset"}
    health, end = json.JSONDecoder().raw_decode(direct)
    assert health["status"] == "ready"
    assert json.loads(direct[end:])["answers"] == through["answers"]


def run(name: str, steps: dict[str, str], folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(["sh", "-ec", steps[name]], cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
    return done.stdout


def start(name: str, steps: dict[str, str], folder: Path, env: dict[str, str], port: int) -> subprocess.Popen:
    before, _, last = steps[name].strip().rpartition("\n")
    # The last command of a step replaces the shell, so that signals reach it.
    words = last.split(" ")
    first_word = next(i for i, word in enumerate(words) if "=" not in word)
    script = "\n".join([before, " ".join([*words[:first_word], "exec", *words[first_word:]])])
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(["sh", "-ec", script], cwd=folder, env=env, stdout=log, stderr=log)
    assert eventually(lambda: child.poll() is not None or listening(port), 90)
    assert child.poll() is None, (folder / f"{name}.log").read_text()
    return child


def main(argv: list[str]) -> int:
    pinned.PINNED = (*pinned.PINNED, SOURCE)
    torch, *rest = argv
    if torch == "absent":
        sys.modules |= {"torch": None, "transformers": None}
    elif torch == "stand-ins":
        merge.torch_matmul = np.matmul
        command.read_head = lambda path, width: (WEIGHT, BIAS)
        command.chat_frame = lambda base: (CHAT_PREFIX, CHAT_SUFFIX)
    return cli.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
