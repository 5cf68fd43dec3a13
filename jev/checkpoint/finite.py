"""Where BF16 bits stop being numbers: a weight that is NaN or infinite is found before it meets anything."""

from __future__ import annotations

import numpy as np

EXPONENT = 0x7F80        # all ones in an infinity and in a NaN, and in no number
_BLOCK = 1 << 17         # values looked at at a time: they and their masked copy fit a core's cache


def first_not_finite(bits: np.ndarray) -> int | None:
    """Index of the first NaN or infinity in BF16 bits (uint16 [n]), or None. Releases the interpreter lock."""
    for at in range(0, bits.size, _BLOCK):
        exponents = bits[at:at + _BLOCK] & EXPONENT
        if exponents.max() == EXPONENT:
            return at + int(exponents.argmax())
    return None


def describe(name: str, index: int, bits: int, shape: tuple[int, ...]) -> str:
    """The sentence about element ``index`` (of the flat tensor) of tensor ``name``."""
    kind = "NaN" if bits & 0x7F else "-infinity" if bits & 0x8000 else "infinity"
    return f"{name}{place(index, shape)} is {kind}"


def place(index: int, shape: tuple[int, ...]) -> str:
    """The index of an element of the flat tensor as one that NumPy takes: "[7, 0, 3]"."""
    return str([int(at) for at in np.unravel_index(index, shape)])
