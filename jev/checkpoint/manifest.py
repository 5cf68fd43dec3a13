"""The manifest of an export, ``open_jev_export.json``: what makes a folder of weights a decision model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jev.checkpoint.checked_json import Fields
from jev.checkpoint.pinned import DEMO, DEMO_MODEL_ID, PINNED, Pinned, pinned

FORMAT = "open-jev-text-merged/1"
MANIFEST_FILE = "open_jev_export.json"
MAX_LENGTH_LIMIT = 16384


@dataclass(frozen=True)
class Manifest:
    """``open_jev_export.json``: which checkpoint this is, how to phrase a prompt, and the head's numbers."""

    model_id: str
    base_revision: str
    checkpoint_revision: str
    temperature: float
    max_length: int  # tokens of one prompt
    chat_prefix: str
    chat_suffix: str
    head_weight: tuple[float, ...]
    head_bias: float
    demo: bool = False
    format: str = FORMAT

    @classmethod
    def from_json(cls, data: Any, where: str = MANIFEST_FILE) -> Manifest:
        """Check every field but the width of the head. Raises CheckpointError naming ``where`` and the field."""
        f = Fields(where, data)
        if f.text("format") != FORMAT:
            raise f.refuse("format", f"expected {FORMAT!r}, found {data['format']!r:.60}")
        demo = data.get("demo", False)
        if type(demo) is not bool or demo != (f.text("model_id") == DEMO_MODEL_ID):
            raise f.refuse("demo", f"must be true for {DEMO_MODEL_ID} and absent for all else, found {demo!r:.60}")
        source = DEMO if demo else pinned(f.text("model_id"))
        if source is None:
            raise f.refuse("model_id", f"expected {' or '.join(p.model_id for p in PINNED)}, "
                                       f"found {data['model_id']!r:.60}")
        for field in ("base_revision", "checkpoint_revision"):
            if f.text(field) != getattr(source, field):
                raise f.refuse(field, f"{source.title} is pinned to {getattr(source, field)}, "
                                      f"found {data[field]!r:.60}")
        weight = f.get("head_weight")
        if not isinstance(weight, list) or not weight or any(type(w) not in (int, float) for w in weight):
            raise f.refuse("head_weight", "expected a list of numbers")
        for i, value in enumerate([*weight, f.get("head_bias")]):
            name = f"head_weight[{i}]" if i < len(weight) else "head_bias"
            # Beyond float32's range a number would become infinite in the head.
            if type(value) not in (int, float) or not abs(value) <= 3.4028234663852886e38:
                raise f.refuse(name, f"expected a finite float32 number, found {value!r:.60}")
        return cls(data["model_id"], data["base_revision"], data["checkpoint_revision"], f.number("temperature"),
                   f.integer("max_length", 1, MAX_LENGTH_LIMIT), f.text("chat_prefix"), f.text("chat_suffix"),
                   tuple(map(float, weight)), float(data["head_bias"]), demo)

    @property
    def source(self) -> Pinned:
        """The released checkpoint that this is, or the demo; ``from_json`` has found one."""
        source = DEMO if self.demo else pinned(self.model_id)
        assert source is not None
        return source

    def to_json(self) -> dict[str, Any]:
        """The object that ``from_json`` reads; ``demo`` appears in a demo's manifest only."""
        fields = {"format": self.format, **asdict(self)}
        return {name: value for name, value in fields.items() if name != "demo" or value}
