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

from jev.checkpoint.checkpoint import ModelConfig
from jev_kernels.reference import INTERLEAVE

LINEAR = ("in_proj", "out_proj", "down_proj")        # last part of the keys that ``Ops.linear`` multiplies by
GATED = ("gate_up",)                                 # ... and ``Ops.swiglu``


class Spec(NamedTuple):
    """One matrix or vector of the model. pieces(tensors): BF16 (uint16) views whose rows fill ``shape``: one piece after
    the other, or interleaved by so many rows of each."""
    key: str
    shape: tuple[int, ...]
    pieces: Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]
    interleave: int = 0

    def rows(self, tensors: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The pieces as arrays that differ from ``shape`` in their number of rows alone."""
        return [p.reshape(-1, *self.shape[1:]) if p.ndim != len(self.shape) else p for p in self.pieces(tensors)]

    def stacked(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The whole, BF16 (uint16). A single piece stays what it is: part of a mapped file, perhaps."""
        pieces = self.rows(tensors)
        if self.interleave:
            return np.stack([p.reshape(-1, self.interleave, *self.shape[1:]) for p in pieces], 1).reshape(self.shape)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, as the ``Ops`` in use holds them. Fields of the other kind of mixer are None."""
    kind: str
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

    def stack(key, width, *names, interleave=0):
        return Spec(key, (sum(n for _, n in names), width), lambda t: [t[name] for name, _ in names], interleave)

    def vector(key, name, size):
        return Spec(key, (size,), lambda t: [t[name]])

    out = [Spec("embed", (config.vocab_size, h), lambda t: [t["embed_tokens.weight"]])]
    for i, kind in enumerate(config.layer_types):
        at = f"layers.{i}."
        out.append(vector(at + "input_norm", at + "input_layernorm.weight", h))
        if kind == "full_attention":
            out += _attention_specs(config, at, stack, vector)
        else:
            out += _gdn_specs(config, at, stack, vector)
        out += [vector(at + "post_norm", at + "post_attention_layernorm.weight", h),
                stack(at + "gate_up", h, (at + "mlp.gate_proj.weight", inter), (at + "mlp.up_proj.weight", inter),
                      interleave=INTERLEAVE),
                stack(at + "down_proj", inter, (at + "mlp.down_proj.weight", h))]
    return out + [vector("norm", "norm.weight", h)]


def _attention_specs(config: ModelConfig, at: str, stack, vector) -> list[Spec]:
    h, d = config.hidden_size, config.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    a = at + "self_attn."

    def in_proj(t):
        q_and_gate = t[a + "q_proj.weight"].reshape(heads, 2, d, h)
        return [q_and_gate[:, 0], q_and_gate[:, 1], t[a + "k_proj.weight"], t[a + "v_proj.weight"]]

    return [Spec(at + "in_proj", (2 * d * (heads + kv), h), in_proj),
            vector(at + "q_norm", a + "q_norm.weight", d), vector(at + "k_norm", a + "k_norm.weight", d),
            stack(at + "out_proj", heads * d, (a + "o_proj.weight", h))]


def _gdn_specs(config: ModelConfig, at: str, stack, vector) -> list[Spec]:
    h, heads = config.hidden_size, config.linear_num_value_heads
    a = at + "linear_attn."
    width = in_proj_width(config, "linear_attention")
    fill = np.zeros((width - gdn_columns(config)["a"].stop, h), np.uint16)
    return [Spec(at + "in_proj", (width, h), lambda t: [t[f"{a}in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")] + [fill]),
            Spec(at + "conv", (config.conv_dim, config.conv_kernel),
                 lambda t: [t[a + "conv1d.weight"].reshape(config.conv_dim, config.conv_kernel)]),
            vector(at + "a_log", a + "A_log", heads), vector(at + "dt_bias", a + "dt_bias", heads),
            vector(at + "gdn_norm", a + "norm.weight", config.linear_value_head_dim),
            stack(at + "out_proj", config.value_dim, (a + "out_proj.weight", h))]


def load(tensors: Mapping[str, np.ndarray], config: ModelConfig, ops, progress=None) -> Model:
    """The model's weights through ``ops.load``. progress: called with the bytes loaded since the last call."""
    return assemble(ops.load(specs(config), tensors, progress), config)


def assemble(held: Mapping[str, Any], config: ModelConfig) -> Model:
    """The model of weights held by key."""
    layers = []
    for i, kind in enumerate(config.layer_types):
        at = f"layers.{i}."
        layers.append(Layer(kind, **{key[len(at):]: w for key, w in held.items() if key.startswith(at)}))
    return Model(held["embed"], tuple(layers), held["norm"])
