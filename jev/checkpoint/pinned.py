"""The released checkpoints that are served: where each comes from, its names, and the backbone that it expects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEMO_MODEL_ID = "open-jev-demo"


@dataclass(frozen=True)
class Pinned:
    """One released Open-Jev checkpoint: where it comes from, the names it answers to, and the backbone it expects."""

    title: str
    model_id: str
    base_revision: str
    checkpoint_repo: str
    checkpoint_revision: str
    alias: str
    dims: Mapping[str, int]  # ModelConfig attribute -> value

    def names(self) -> frozenset[str]:
        """What a request may put in ``model``."""
        return frozenset({self.model_id, "open-jev", "jev-latest", self.alias})


def _dims(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, key_heads: int,
          value_heads: int) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads, "head_dim": 256, "rotary_dim": 64, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "conv_kernel": 4}


PINNED = (
    Pinned("Open-Jev-27B-v1.1", "Qwen/Qwen3.8-27B", "1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0",
           "ZefanCai/Open-Jev-27B-v1.1", "28cf73067d5b337860bbef3c85b8b82ba8730956", "open-jev-27b-v1.1",
           _dims(5120, 17408, 64, 24, 4, 16, 48)),
    Pinned("Open-Jev-9B", "Qwen/Qwen3.5-9B", "c202236235762e1c871ad0ccb60c8ee5ba337b9a",
           "ZefanCai/Open-Jev-9B", "47e966881e489511c0c7f5633a9e1960a676a551", "open-jev-9b",
           _dims(4096, 12288, 32, 16, 4, 16, 32)),
)
# The demo checkpoint (jev/checkpoint/demo.py) has no release and no fixed dimensions.
DEMO = Pinned("Open-Jev demo", DEMO_MODEL_ID, "demo", "", "demo", DEMO_MODEL_ID, {})


def pinned(model_id: str) -> Pinned | None:
    """The pinned checkpoint whose base is ``model_id``, or None."""
    return next((p for p in PINNED if p.model_id == model_id), None)
