"""Command lines whose errors never repeat a value: what stands in the wrong place may be a password."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9-]*|-[A-Za-z]")
# What argparse says around a value, in all its versions from Python 3.10 to 3.13.
VALUES = (
    (re.compile(r"(invalid choice): .*( \(choose from )", re.DOTALL), r"\1\2"),
    (re.compile(r"(invalid \S+ value): .*", re.DOTALL), r"\1"),
    (re.compile(r"(ignored explicit argument) .*", re.DOTALL), r"\1"),
    (re.compile(r"(ambiguous option: [^=\s]*)=.*( could match )", re.DOTALL), r"\1\2"))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line, with the names of flags and without values."""

    def parse_args(self, args: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            flags = [flag for flag in (text.partition("=")[0] for text in rest) if FLAG.fullmatch(flag)]
            self.error(f"no such flag: {' '.join(flags)}" if flags else f"{len(rest)} arguments too many")
        return known

    def error(self, message: str) -> NoReturn:
        for pattern, without in VALUES:
            message = pattern.sub(without, message)
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help tells more)\n")
