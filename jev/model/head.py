"""The decision head: from the last position's hidden state to a raw score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jev_kernels import bf16


@dataclass(frozen=True, eq=False)
class Head:
    """The decision head: ``float32(sum(float64(w) * float64(h))) + bias``, ``weight`` float32 [h], ``bias`` float32."""

    weight: np.ndarray
    bias: np.float32

    def score(self, hidden: np.ndarray) -> np.ndarray:
        """BF16 hidden states, uint16 [n, h] -> raw scores, float32 [n].

        The products are exact in float64, and each row is summed alone in one fixed order (NumPy's pairwise order over
        a contiguous row), so a score has the same bits whatever rows stand beside it; BLAS does not promise that.
        """
        if hidden.dtype != np.uint16 or hidden.ndim != 2 or hidden.shape[1] != self.weight.size:
            raise ValueError(f"hidden: expected uint16 [n, {self.weight.size}], found {hidden.dtype} {hidden.shape}")
        weight = self.weight.astype(np.float64)
        scores = np.empty(len(hidden), np.float32)
        for i, row in enumerate(hidden):
            scores[i] = np.add.reduce(bf16.to_float32(row) * weight)
        return scores + self.bias
