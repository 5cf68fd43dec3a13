"""The bits of every simulated kernel are those that were accepted. python -m tools.golden_bits shows and accepts others."""
from __future__ import annotations

import pytest

from jev_kernels import ptx
from jev_kernels.rowwise import rms_norm, rope
from tests.kernels.golden import CASES
from tools import golden_bits

KEPT = golden_bits.read()


@pytest.mark.parametrize("name", CASES)
def test_bits(name):
    changed = golden_bits.differences(name, KEPT.get(name), golden_bits.run(CASES[name]))
    assert not changed, "\n".join([*changed, "if that is meant: python -m tools.golden_bits --accept"])


def test_nothing_is_kept_of_cases_that_are_gone():
    assert list(KEPT) == list(CASES)


def changed(name):
    return golden_bits.differences(name, KEPT[name], golden_bits.run(CASES[name]))


def test_a_smaller_block_of_a_norm_shows(monkeypatch):
    """The order of additions alone: float32's last bits, under a rounding to BF16."""
    layout = rms_norm.layout

    def smaller(width):
        per_thread, threads = layout(width)
        return 2 * per_thread, max(32, -(-threads // 64) * 32)
    monkeypatch.setattr(rms_norm, "layout", smaller)
    assert len(changed("norms")) >= 4


def test_another_order_of_lanes_shows(monkeypatch):
    """... of the lanes of a warp, and of a head's 16: the smaller distances first."""
    xor, lanes = ptx.shfl_xor, {16: 1, 8: 2, 4: 4, 2: 8, 1: 16}
    monkeypatch.setattr(ptx, "shfl_xor", lambda x, mask: xor(x, lanes[int(mask)]))
    assert changed("norms") and changed("norm_and_rope")
    lanes.update({8: 1, 4: 2, 2: 4, 1: 8})
    assert changed("gated_norm")


def test_a_rounding_that_is_gone_shows(monkeypatch):
    def once(x, other, cos, sin):
        return ptx.pack(ptx.low(x) * ptx.low(cos) + ptx.low(other) * ptx.low(sin),
                        ptx.high(x) * ptx.high(cos) + ptx.high(other) * ptx.high(sin))
    monkeypatch.setattr(rope, "rotated_pair", once)
    assert changed("norm_and_rope")
