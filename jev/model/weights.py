"""Which tensors of a checkpoint make up which matrix of the forward pass, and in what order its columns come out.

Projections that read the same input are stacked into one matrix, so a layer has four GEMMs. Rows of W are columns of the
output, and come in this order:

==================  ===============================================================================================
``in_proj``, linear attention   q | k | v (the convolution's input) | z | b | a | zeros
``in_proj``, full attention     q of all heads | gate of all heads | k | v
``gate_up``                     four of gate, four of up, interleaved
==================  ===============================================================================================

``q_proj`` interleaves 256 query and 256 gate rows per head; taking its rows apart here, once, makes "splitting off the
gate" a matter of column ranges, and attention reads q, gate, k and v where the GEMM wrote them. Rows of zeros fill the
linear layers' matrix up to a multiple of 8, so that output rows start at multiples of 16 bytes (27B and 9B need none).
Gate and up alternate so that a GEMM holds both factors of an activation in one warp (see ``jev_kernels.rowwise.silu``).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jev.checkpoint.config import ModelConfig
from jev_kernels.reference import INTERLEAVE

Tensors = Mapping[str, np.ndarray]                   # BF16 (uint16) by the checkpoint's names, their prefix stripped

LINEAR = ("in_proj", "out_proj", "down_proj")        # the weights that ``Ops.linear`` multiplies by
GATED = ("gate_up",)                                 # ... and ``Ops.swiglu``


class Spec(NamedTuple):
    """One matrix or vector of the model. pieces(tensors): BF16 (uint16) views whose rows fill ``shape``: one piece after
    the other, or interleaved by so many rows of each.

    name: a field of ``Layer`` or ``Model``. layer, kind: the number of its layer and what mixes there; None outside layers.
    """
    name: str
    shape: tuple[int, ...]
    pieces: Callable[[Tensors], list[np.ndarray]]
    interleave: int = 0
    layer: int | None = None
    kind: str | None = None

    @property
    def key(self) -> str:
        """Names one weight of the model."""
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    def rows(self, tensors: Tensors) -> list[np.ndarray]:
        """The pieces as arrays that differ from ``shape`` in their number of rows alone."""
        return [p.reshape(-1, *self.shape[1:]) if p.ndim != len(self.shape) else p for p in self.pieces(tensors)]

    def stacked(self, tensors: Tensors) -> np.ndarray:
        """The whole, BF16 (uint16). A single piece stays what it is: part of a mapped file, perhaps."""
        pieces = self.rows(tensors)
        if self.interleave:
            return np.stack([p.reshape(-1, self.interleave, *self.shape[1:]) for p in pieces], 1).reshape(self.shape)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, as the ``Ops`` in use holds them. Fields of the other kind of mixer are None."""
    kind: str                  # "full_attention" or "linear_attention"
    number: int                # among the layers of its kind
    input_norm: Any
    post_norm: Any
    in_proj: Any
    out_proj: Any
    gate_up: Any
    down_proj: Any
    q_norm: Any = None
    k_norm: Any = None
    conv: Any = None
    a_log: Any = None
    dt_bias: Any = None
    gdn_norm: Any = None


@dataclass(frozen=True)
class Model:
    """Weights of the backbone."""
    embed: Any
    layers: tuple[Layer, ...]
    norm: Any


def attention_columns(config: ModelConfig) -> dict[str, slice]:
    """Column ranges of a full-attention layer's projection: q, gate, k, v."""
    wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return _ranges(q=wide, gate=wide, k=narrow, v=narrow)


def gdn_columns(config: ModelConfig) -> dict[str, slice]:
    """Column ranges of a linear-attention layer's projection: qkv (the convolution's input), z, b, a."""
    heads = config.linear_num_value_heads
    return _ranges(qkv=config.conv_dim, z=config.value_dim, b=heads, a=heads)


def in_proj_width(config: ModelConfig, kind: str) -> int:
    """Columns of the projection of a layer of this kind."""
    if kind == "full_attention":
        return attention_columns(config)["v"].stop
    return -(-gdn_columns(config)["a"].stop // 8) * 8


def _ranges(**widths: int) -> dict[str, slice]:
    ranges, at = {}, 0
    for name, width in widths.items():
        ranges[name] = slice(at, at + width)
        at += width
    return ranges


def specs(config: ModelConfig) -> list[Spec]:
    """Every weight of the backbone in the order of use, with where it comes from."""
    h, inter = config.hidden_size, config.intermediate_size
    out = [Spec("embed", (config.vocab_size, h), lambda t: [t["embed_tokens.weight"]])]
    for i, kind in enumerate(config.layer_types):
        at = f"layers.{i}."
        mixer = _attention_specs if kind == "full_attention" else _gdn_specs
        layer = [_vector("input_norm", at + "input_layernorm.weight", h), *mixer(config, at),
                 _vector("post_norm", at + "post_attention_layernorm.weight", h),
                 _stack("gate_up", h, (at + "mlp.gate_proj.weight", inter), (at + "mlp.up_proj.weight", inter),
                        interleave=INTERLEAVE),
                 _stack("down_proj", inter, (at + "mlp.down_proj.weight", h))]
        out += [spec._replace(layer=i, kind=kind) for spec in layer]
    return [*out, _vector("norm", "norm.weight", h)]


def _stack(name: str, width: int, *tensors: tuple[str, int], interleave: int = 0) -> Spec:
    """A matrix of whole tensors, each given with its number of rows."""
    return Spec(name, (sum(n for _, n in tensors), width), lambda t: [t[tensor] for tensor, _ in tensors], interleave)


def _vector(name: str, tensor: str, size: int) -> Spec:
    return Spec(name, (size,), lambda t: [t[tensor]])


def _attention_specs(config: ModelConfig, at: str) -> list[Spec]:
    h, d = config.hidden_size, config.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    a = at + "self_attn."

    def in_proj(t: Tensors) -> list[np.ndarray]:
        q_and_gate = t[a + "q_proj.weight"].reshape(heads, 2, d, h)
        return [q_and_gate[:, 0], q_and_gate[:, 1], t[a + "k_proj.weight"], t[a + "v_proj.weight"]]

    return [Spec("in_proj", (2 * d * (heads + kv), h), in_proj), _vector("q_norm", a + "q_norm.weight", d),
            _vector("k_norm", a + "k_norm.weight", d), _stack("out_proj", heads * d, (a + "o_proj.weight", h))]


def _gdn_specs(config: ModelConfig, at: str) -> list[Spec]:
    h, heads = config.hidden_size, config.linear_num_value_heads
    a = at + "linear_attn."
    width = in_proj_width(config, "linear_attention")
    fill = np.zeros((width - gdn_columns(config)["a"].stop, h), np.uint16)

    def in_proj(t: Tensors) -> list[np.ndarray]:
        return [*(t[f"{a}in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")), fill]

    def conv(t: Tensors) -> list[np.ndarray]:
        return [t[a + "conv1d.weight"].reshape(config.conv_dim, config.conv_kernel)]

    return [Spec("in_proj", (width, h), in_proj), Spec("conv", (config.conv_dim, config.conv_kernel), conv),
            _vector("a_log", a + "A_log", heads), _vector("dt_bias", a + "dt_bias", heads),
            _vector("gdn_norm", a + "norm.weight", config.linear_value_head_dim),
            _stack("out_proj", config.value_dim, (a + "out_proj.weight", h))]


def load(tensors: Tensors, config: ModelConfig, ops: Any, progress: Callable[[int], None] | None = None) -> Model:
    """The model's weights through ``ops.load``. progress: called with the bytes loaded since the last call."""
    return assemble(ops.load(specs(config), tensors, progress), config)


def assemble(held: Mapping[str, Any], config: ModelConfig) -> Model:
    """The model of weights held by key."""
    outer: dict[str, Any] = {}
    layers: list[dict[str, Any]] = [{"kind": kind, "number": config.layer_types[:i].count(kind)}
                                    for i, kind in enumerate(config.layer_types)]
    for spec in specs(config):
        (outer if spec.layer is None else layers[spec.layer])[spec.name] = held[spec.key]
    return Model(outer["embed"], tuple(Layer(**layer) for layer in layers), outer["norm"])
