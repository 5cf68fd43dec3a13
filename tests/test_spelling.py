"""Names that are nearly right."""

from __future__ import annotations

import pytest

from jev.spelling import distance, meant

FLAGS = ("--port", "--host", "--model", "--max-length")


@pytest.mark.parametrize("a, b, slips", [("", "", 0), ("a", "", 1), ("abc", "acb", 1), ("abc", "abd", 1), ("ca", "abc", 3),
                                         ("model", "modle", 1), ("criteria", "criterion", 2), ("kitten", "sitting", 3)])
def test_distance(a, b, slips):
    assert distance(a, b) == distance(b, a) == slips


@pytest.mark.parametrize("name, right", [
    ("--prot", "--port"), ("--Port", "--port"), ("--max_length", "--max-length"), ("--maxlenght", "--max-length"),
    ("--modell", "--model"), ("--hort", "--port"), ("--pots", None), ("--most", "--host"), ("--length", None), ("", None)])
def test_what_was_meant(name, right):
    assert meant(name, FLAGS) == right


def test_a_long_name_is_like_none():
    assert meant("port" * 100_000, FLAGS) is None
