"""Base weights plus LoRA, one tensor at a time, in the bits that PEFT's own merge gives.

What PEFT does to a BF16 weight W on a CPU, and in which precision (``peft.tuners.lora.layer.Linear``; the adapter is
float32 whatever its file holds, see ``cast_adapter_dtype``):

    delta = (B @ A) * float32(scaling)      float32; scaling = alpha / r
    W'    = r(W + r(delta))                 r rounds to BF16; the sum itself is float32

``B @ A`` is done by the same torch operation on the same shapes. All the rest is elementwise IEEE arithmetic with one
correct answer, so NumPy does it. (For ranks up to 128 the bits of ``B @ A`` were seen to depend on neither thread
count nor alignment nor library: products are added in order of r, by fused multiply-add.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jev.checkpoint import finite
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.weight_files import TensorEntry
from jev.export.inputs import import_extra
from jev.export.lora import Adapter
from jev.export.pieces import bf16_pieces, read_matrix
from jev_kernels import bf16


def torch_matmul(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """float32 b @ a by the operation that PEFT uses."""
    torch = import_extra("torch")
    product: np.ndarray = (torch.from_numpy(b) @ torch.from_numpy(a)).numpy()
    return product


def merged_pieces(name: str, base: TensorEntry, adapter: Adapter) -> Iterator[np.ndarray]:
    """BF16 bits of ``r(W + r(B A scaling))`` in flat pieces. Raises CheckpointError for a non-finite delta or sum."""
    a, b = (read_matrix(entry) for entry in adapter.pairs[name])
    with np.errstate(over="ignore", invalid="ignore"):  # non-finite values are looked for below
        delta = torch_matmul(b, a)
        delta *= np.float32(adapter.scaling)
        delta, at = delta.reshape(-1), 0
        for piece in bf16_pieces(base):
            part = delta[at:at + piece.size]
            if not np.isfinite(part).all():
                raise CheckpointError(f"{adapter.pairs[name][0].path}: the LoRA delta of {name} is not finite")
            bad = finite.first_not_finite(piece)
            if bad is not None:
                raise CheckpointError(f"{base.path}: {finite.describe(name, at + bad, int(piece[bad]), base.shape)}")
            piece = bf16.from_float32(bf16.to_float32(piece) + bf16.to_float32(bf16.from_float32(part)))
            bad = finite.first_not_finite(piece)
            if bad is not None:
                found = finite.describe(name, at + bad, int(piece[bad]), base.shape)
                raise CheckpointError(f"{base.path}: {found}: not finite after merging")
            yield piece
            at += piece.size
