"""The text backbone's configuration, as ``config.json`` states it: read, checked, and what tensors follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jev.checkpoint.checked_json import CheckpointError, Fields
from jev.checkpoint.config_fields import refuse_unimplemented
from jev.checkpoint.pinned import Pinned
from jev_kernels.reference import INTERLEAVE

CONFIG_FILE = "config.json"
LAYER_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a Qwen3.5 / Qwen3.8 text backbone (names as in Transformers' Qwen3_5TextConfig, shortened)."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]  # each "linear_attention" or "full_attention"
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int  # leading dimensions of a head that RoPE turns
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = CONFIG_FILE) -> ModelConfig:
        """Read a ``config.json``: a text configuration, or a full one with the text part under ``text_config``.

        RoPE's settings may sit in ``rope_parameters``, in ``rope_scaling`` or at the top; layers in ``layer_types`` or, as
        every n-th being full attention, ``full_attention_interval``. Raises CheckpointError naming ``where`` and the
        field, also for one that asks for arithmetic that is not implemented (``jev.checkpoint.config_fields``).
        """
        top = Fields(where, data)
        f = Fields(f"{where}: text_config", top.get("text_config")) if "text_config" in data else top
        for fields, kinds in ((top, ("qwen3_5", "qwen3_5_text")), (f, ("qwen3_5_text",) if f is not top else ())):
            if kinds and fields.data.get("model_type", kinds[0]) not in kinds:
                raise fields.refuse("model_type", f"expected {' or '.join(kinds)}, "
                                                  f"found {fields.data['model_type']!r:.60}")
        for fields in dict.fromkeys((top, f)):
            refuse_unimplemented(fields)
        name = "rope_parameters" if f.data.get("rope_parameters") else "rope_scaling"
        # Settings may also stand outside, and those inside count.
        rope = Fields(f"{f.where}: {name}", {**f.data, **f.data[name]}) if f.data.get(name) else f
        head_dim = f.integer("head_dim")
        # Transformers' default for this family. min: a number too large for an integer is refused like any above 1.
        share = rope.number("partial_rotary_factor") if "partial_rotary_factor" in rope.data else 0.25
        rotary_dim = int(head_dim * min(share, 2.0))
        config = cls(
            hidden_size=f.integer("hidden_size"), intermediate_size=f.integer("intermediate_size"),
            layer_types=_layer_types(f), num_attention_heads=f.integer("num_attention_heads"),
            num_key_value_heads=f.integer("num_key_value_heads"), head_dim=head_dim,
            rotary_dim=rotary_dim,
            linear_num_key_heads=f.integer("linear_num_key_heads"),
            linear_num_value_heads=f.integer("linear_num_value_heads"),
            linear_key_head_dim=f.integer("linear_key_head_dim"),
            linear_value_head_dim=f.integer("linear_value_head_dim"),
            conv_kernel=f.integer("linear_conv_kernel_dim"), vocab_size=f.integer("vocab_size"),
            rms_norm_eps=f.number("rms_norm_eps"), rope_theta=rope.number("rope_theta"))
        if config.intermediate_size % INTERLEAVE:
            raise f.refuse("intermediate_size", f"{config.intermediate_size} is not a multiple of {INTERLEAVE}")
        if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise rope.refuse("partial_rotary_factor", f"turns {rotary_dim} of {head_dim} dimensions")
        for heads, groups in (("num_attention_heads", "num_key_value_heads"),
                              ("linear_num_value_heads", "linear_num_key_heads")):
            if getattr(config, heads) % getattr(config, groups):
                raise f.refuse(heads, f"{getattr(config, heads)} is not a multiple of {groups}, "
                                      f"{getattr(config, groups)}")
        return config

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name (without prefix) -> shape of every tensor of the text backbone, in the order they are written."""
        h, inner, d = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        value_heads = self.linear_num_value_heads
        mixers = {
            "full_attention": {
                "self_attn.q_proj.weight": (2 * q, h), "self_attn.k_proj.weight": (kv, h),
                "self_attn.v_proj.weight": (kv, h), "self_attn.o_proj.weight": (h, q),
                "self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)},
            "linear_attention": {
                "linear_attn.in_proj_qkv.weight": (self.conv_dim, h),
                "linear_attn.in_proj_z.weight": (self.value_dim, h),
                "linear_attn.in_proj_b.weight": (value_heads, h), "linear_attn.in_proj_a.weight": (value_heads, h),
                "linear_attn.conv1d.weight": (self.conv_dim, 1, self.conv_kernel), "linear_attn.A_log": (value_heads,),
                "linear_attn.dt_bias": (value_heads,), "linear_attn.norm.weight": (self.linear_value_head_dim,),
                "linear_attn.out_proj.weight": (h, self.value_dim)}}
        shared = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,),
                  "mlp.gate_proj.weight": (inner, h), "mlp.up_proj.weight": (inner, h),
                  "mlp.down_proj.weight": (h, inner)}
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, h)}
        for i, kind in enumerate(self.layer_types):
            shapes.update({f"layers.{i}.{name}": shape for name, shape in (mixers[kind] | shared).items()})
        return shapes | {"norm.weight": (h,)}


def _layer_types(f: Fields) -> tuple[str, ...]:
    layers = f.integer("num_hidden_layers")
    if f.data.get("layer_types") is None:
        interval = f.integer("full_attention_interval")
        return tuple(LAYER_KINDS[(i + 1) % interval == 0] for i in range(layers))
    kinds = f.data["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_KINDS for kind in kinds):
        raise f.refuse("layer_types", f"expected {layers} of {' or '.join(LAYER_KINDS)}")
    return tuple(kinds)


def check_dims(config: ModelConfig, source: Pinned, where: str) -> None:
    """Raise CheckpointError for the first dimension of ``config`` that is not the pinned one."""
    for name, value in source.dims.items():
        if getattr(config, name) != value:
            raise CheckpointError(f"{where}: {name}: {source.title} has {value}, found {getattr(config, name)}")
