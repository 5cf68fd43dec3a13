"""Shared memory by names."""
from __future__ import annotations

import pytest

from jev_kernels.ptx.shared_layout import Part, SharedLayout, array, barriers, block_bytes, words


def test_parts_follow_each_other_at_multiples_of_their_alignment():
    layout = SharedLayout(a=20, b=8, tile=Part(128, 1024), full=barriers(3), empty=barriers(2), flags=words(1),
                          rows=array(3, 4))
    assert layout._asdict() == {"a": 0, "b": 32, "tile": 1024, "full": 1152, "empty": 1176, "flags": 1192, "rows": 1200,
                                "nbytes": 1212}
    assert block_bytes(layout) == 1212 + 1024 and block_bytes(layout, 128) == 1340


def test_a_part_that_cannot_be_is_named():
    with pytest.raises(ValueError, match="full: 8 bytes at a multiple of 12"):
        SharedLayout(full=Part(8, 12))
