"""The oldest versions that setup.cfg admits, as constraints for pip.

    python tools/oldest.py [EXTRA ...] > constraints.txt

A line for each requirement of the package and of the extras named: NAME==VERSION, from its lower bound. `make test-oldest`
installs by it, so that a bound is a version that was tried.
"""
from __future__ import annotations

import argparse
import configparser
import re
from pathlib import Path

SETUP = Path(__file__).resolve().parent.parent / "setup.cfg"
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[a-z0-9,]+\])?>=([0-9.]+)(?:,<[0-9.]+)?")


def oldest(lists: list[str]) -> dict[str, str]:
    """Version by name from lists of requirements, one a line. Raises SystemExit for one without a lower bound."""
    found: dict[str, str] = {}
    for line in "\n".join(lists).split("\n"):
        line = line.partition("#")[0].strip()
        if line:
            match = REQUIREMENT.fullmatch(line)
            if match is None:
                raise SystemExit(f"setup.cfg: {line}: expected NAME>=VERSION, perhaps with ,<VERSION")
            name, version = match.groups()
            if found.setdefault(name, version) != version:
                raise SystemExit(f"setup.cfg: {name}: two lower bounds, {found[name]} and {version}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", metavar="EXTRA", nargs="*", help="as in setup.cfg: test, dev")
    extras = parser.parse_args().extras
    config = configparser.ConfigParser()
    config.read(SETUP, encoding="utf-8")
    known = config["options.extras_require"]
    for extra in extras:
        if extra not in known:
            parser.error(f"no such extra: {extra}")
    for name, version in oldest([config["options"]["install_requires"], *(known[extra] for extra in extras)]).items():
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
