"""Answers as a person reads them: names, bars of probability, confidence, timing. Plain text, no colours needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TextIO

BAR = 24
EIGHTHS = " ▏▎▍▌▋▊▉"


def shows_unicode(stream: TextIO) -> bool:
    """Whether a stream takes every character."""
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def bar(p: float, width: int = BAR, unicode: bool = True) -> str:
    """A horizontal bar of ``p`` in 0..1, to an eighth of a character, padded to ``width``."""
    if not unicode:
        return ("#" * round(p * width)).ljust(width, ".")
    eighths = round(p * width * 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(width, "·")


def shorten(value: Any, limit: int) -> str:
    """One line of at most ``limit`` characters; what is not a string is shown as JSON, control characters escaped."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = "".join(c if c.isprintable() else " " for c in text).strip()
    return text if len(text) <= limit else text[:limit - 1].rstrip() + "…"


def render(response: Mapping[str, Any], request: Mapping[str, Any] | None = None, seconds: float | None = None,
           unicode: bool = True) -> str:
    """A response of the contract as text. ``request`` adds the questions' wording, ``seconds`` the time over HTTP."""
    questions = (request or {}).get("questions", {})
    lines = []
    for id, answer in response["answers"].items():
        lines += [f"{shorten(id, 40)}  {shorten(questions.get(id, {}).get('instructions', ''), 90)}".rstrip()]
        lines += _answer(answer, unicode) + [""]
    metadata, usage = response["metadata"], response["usage"]
    timing = f"{1000 * metadata['inference_seconds']:.1f} ms of inference"
    if seconds is not None:
        timing += f", {1000 * seconds:.1f} ms over HTTP"
    lines.append(f"{response['model']}: {metadata['candidate_sequences']} candidates, {usage['input_tokens']} tokens "
                 f"as {metadata['prefix_cache']['rows']} rows, {timing}")
    if metadata.get("demo"):
        lines.append(f"note: {metadata['notice']}")
    text = "\n".join(lines)
    return text if unicode else text.encode("ascii", "replace").decode()


def _answer(answer: Mapping[str, Any], unicode: bool) -> list[str]:
    if answer["type"] == "noul":
        p = answer["noul"]
        return [_line("yes", p, unicode, p > 0.5), _line("no", 1 - p, unicode, p <= 0.5)]
    if answer["type"] == "choice":
        lines = [_line(name, p, unicode, name == answer["choice"]) for name, p in answer["probabilities"].items()]
        return lines + [f"    chosen: {shorten(answer['choice'], 40)}, confidence {answer['confidence']:.0%}"]
    probabilities = answer["probabilities"]
    mode = max(probabilities, key=probabilities.__getitem__)
    lines = [_line(f"{level}  {shorten(answer['legend'][level], 25)}", p, unicode, level == mode)
             for level, p in probabilities.items()]
    return lines + [f"    score {answer['score']:.2f} of 0..{len(probabilities) - 1}, "
                    f"confidence {answer['confidence']:.0%}"]


def _line(name: str, p: float, unicode: bool, first: bool) -> str:
    mark = ("▸" if unicode else ">") if first else " "
    return f"  {mark} {shorten(name, 28):28} {bar(p, unicode=unicode)} {p:6.1%}"
