"""The recipe word for word, with the real torch and transformers: `make parity`."""

from __future__ import annotations

import pytest

from tests.faults.rehearsal import follow

pytestmark = pytest.mark.parity


def test_the_recipe_ends_with_an_answer_through_the_gateway(tmp_path):
    follow(tmp_path, "real")
