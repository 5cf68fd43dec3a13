"""Install the wheel of a folder into a new environment, far from any checkout, and try the commands that need no model.

    python tools/try_package.py dist

The wheel must hold every file of the two packages in this checkout; `python -m build` made it from the sdist, so that this
holds them too. Exit status 0: everything worked.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUEST = {"state": "a parcel", "questions": {"late": {"type": "noul", "instructions": "Is it late?"}}}


def only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder}: expected one {pattern}, found {len(found)}")
    return found[0].resolve()


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources() -> set[str]:
    """The files of the packages in this checkout, py.typed among them."""
    return {path.relative_to(ROOT).as_posix() for package in ("jev", "jev_kernels") for path in (ROOT / package).rglob("*")
            if path.is_file() and path.suffix != ".pyc"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="folder with one wheel")
    dist = parser.parse_args().dist
    wheel = only(dist, "*.whl")
    missing = sources() - files(wheel)
    if missing:
        sys.exit(f"{wheel.name}: missing: {', '.join(sorted(missing))}")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPEN_JEV_"))}
    with tempfile.TemporaryDirectory(prefix="jev-package-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)

        def run(*command: str, input: str | None = None) -> str:
            print("$", *command, flush=True)
            done = subprocess.run([str(folder / "venv" / "bin" / command[0]), *command[1:]], cwd=folder, env=environ,
                                  input=input, stdout=subprocess.PIPE, text=True, timeout=600)
            if done.returncode:
                sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
            return done.stdout

        pip = ("pip", "--quiet", "--disable-pip-version-check")
        run(*pip, "install", str(wheel))
        where = run("python", "-c", "import jev, jev_kernels; print(jev.__file__, jev_kernels.__file__)").split()
        if not all(Path(place).is_relative_to(folder.resolve()) for place in where):
            sys.exit(f"imported from elsewhere: {' '.join(where)}")
        version = wheel.name.split("-")[1]
        if version not in run("jev", "--version"):
            sys.exit(f"jev --version does not say {version}")
        run("jev", "demo-checkpoint", "checkpoint")
        run("jev", "check", "checkpoint")
        answer = json.loads(run("jev", "score", "-", "checkpoint", input=json.dumps(REQUEST) + "\n"))
        if "late" not in json.dumps(answer):
            sys.exit(f"jev score: no answer in {answer}")
    print(f"{wheel.name} is good")


if __name__ == "__main__":
    main()
