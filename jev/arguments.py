"""Command lines that tell all mistakes at once and say what was meant. Unless a setting is known to hold no secret its value
is never repeated: what stands in the wrong place may be a password."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from jev.settings import Settings, SettingsError, remarks, settable
from jev.spelling import meant

FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9-]*|-[A-Za-z]")
# What argparse says around a value, in all its versions from Python 3.10 to 3.13.
VALUES = (
    (re.compile(r"(invalid choice): .*( \(choose from )", re.DOTALL), r"\1\2"),
    (re.compile(r"(ignored explicit argument) .*", re.DOTALL), r"\1"),
    (re.compile(r"(ambiguous option: [^=\s]*)=.*( could match )", re.DOTALL), r"\1\2"))
NO_EXPORT = ("which export? Give EXPORT, or --model EXPORT, or set OPEN_JEV_MODEL; "
             "`jev demo-checkpoint DIR` makes a small one to try")


class _Wrong(str):
    """Stands in a namespace for a value that could not be read: why not."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong with the names of flags and without values, all at once, and exits with 2.

    What ``parse_args`` returns has ``settings`` and ``remarks`` (see ``jev.settings``) where ``add_settings`` was called.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.flags: list[str] = []                      # all that it knows
        self.uses: tuple[str, ...] = ()                 # fields of Settings
        super().__init__(*args, **options)
        self.set_defaults(parser=self)                  # a command's parser, where there are commands, overrides this

    def add_argument(self, *names: str, type: Callable[[str], Any] | None = None,       # type: ignore[override]
                     **options: Any) -> argparse.Action:
        """As ever, but a ``type`` that refuses its value (ValueError or ArgumentTypeError) is told with all the rest."""
        self.flags += [name for name in names if name.startswith("--")]
        if type is not None:
            options["type"] = _read(type, names[-1] if names[-1].startswith("-") else options.get("metavar", names[-1]))
        return super().add_argument(*names, **options)

    def add_settings(self, names: Sequence[str], more: Collection[str] = ()) -> None:
        """Flags for the settings ``names``, and the export as an argument too where ``model`` is among them; ``more``: used
        as well, but without a flag."""
        self.uses = (*names, *more)
        if "model" in names:
            self.add_argument("export", metavar="EXPORT", nargs="?", help="the same as --model EXPORT")
        for f in settable(names):
            value = int(f.default) if isinstance(f.default, bool) else f.default
            default = "" if value in (None, ()) else f"; default {value}"
            help = f"{f.metadata['help']} [{', '.join(f.metadata['env'])}{default}]"
            if f.name == "verify":          # a switch takes no value: what follows it may be the export
                self.add_argument(f.metadata["flag"], dest=f.name, action="store_const", const="1", help=help)
            else:
                metavar = "EXPORT" if f.name == "model" else f.name.split("_")[-1].upper()
                self.add_argument(f.metadata["flag"], dest=f.name, metavar=metavar, help=help)

    def parse_args(self, args: Sequence[str] | None = None,                             # type: ignore[override]
                   namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        known: argparse.Namespace
        known, rest = self.parse_known_args(args, namespace)
        given: dict[str, Any] = known.__dict__
        parser: Parser = given.pop("parser")            # the one of the command that was given
        wrong = parser._unknown(known, rest) + [value for value in given.values() if isinstance(value, _Wrong)]
        if parser.uses:
            flags = {name: getattr(known, name, None) for name in parser.uses}
            if (export := given.pop("export", None)) is not None:
                if flags["model"] is not None:
                    wrong.append("the export is given twice, as EXPORT and as --model EXPORT")
                flags["model"] = export
            try:
                known.settings = Settings.from_environment(os.environ, parser.uses, **flags)
                if "model" in parser.uses and known.settings.model is None:
                    wrong.append(NO_EXPORT)
            except SettingsError as error:
                wrong += str(error).split("\n")
            known.remarks = remarks(os.environ, parser.uses, **flags)
        if wrong:
            parser.error("\n".join(wrong))
        return known

    def _unknown(self, known: argparse.Namespace, rest: list[str]) -> list[str]:
        """What is wrong with the arguments that argparse found no use for."""
        flags = [flag for flag in (text.partition("=")[0] for text in rest) if FLAG.fullmatch(flag)]
        if flags:
            return [f"no such flag: {flag}{did_you_mean(flag, self.flags)}" for flag in flags]
        if rest and getattr(known, "export", "") is None:       # argparse looks for it before the flags alone
            known.export, *rest = rest
        return [f"{len(rest)} argument{'s' * (len(rest) > 1)} too many"] if rest else []

    def error(self, message: str) -> NoReturn:
        for pattern, without in VALUES:
            message = pattern.sub(without, message)
        lines = "".join(f"{self.prog}: {line}\n" for line in message.split("\n"))
        self.exit(2, f"{lines[:-1]} ({self.prog} --help tells more)\n")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """What to put behind a name that nobody knows."""
    right = meant(name, known)
    return "" if right is None else f"; did you mean {right}?"


def integer(low: int, high: int) -> Callable[[str], int]:
    """A ``type``: an integer in low..high."""
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"expected an integer in {low}..{high}")
        return int(text)
    return parse


def _read(type: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return type(text)
        except argparse.ArgumentTypeError as error:
            return _Wrong(f"{name}: {error}")
        except ValueError:
            return _Wrong(f"{name}: expected {EXPECTED.get(type, 'something else')}")
    return read


EXPECTED: dict[Callable[[str], Any], str] = {int: "an integer", float: "a number"}
