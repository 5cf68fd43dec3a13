"""Lane layouts on a GPU: the tests of tests/kernels/test_ptx.py, where the instructions are real."""
from __future__ import annotations

import pytest

from tests.kernels.test_ptx import (  # noqa: F401
                                    test_conversions_and_functions,
                                    test_ldmatrix_and_movmatrix_layouts,
                                    test_loads_stores_and_cp_async,
                                    test_mbarrier_ring,
                                    test_mma_fragments,
                                    test_mma_tf32_fragments,
                                    test_shuffles_and_votes,
)

pytestmark = pytest.mark.gpu
