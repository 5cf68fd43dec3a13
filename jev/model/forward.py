"""The forward pass, written once over the operations of ``jev.model.ops``.

Qwen3.5 / Qwen3.8 text, prefill only: token ids in, the final-norm hidden state of each sequence's last token out. ``pool``
is what the operations in use make of a ``RowPool``: itself in NumPy, its arrays in device memory on a GPU.
"""
from __future__ import annotations

from jev.model.ops import Matrix, Ops, Pool
from jev.model.weights import Layer, Model


def forward(ops: Ops, model: Model, pool: Pool) -> Matrix:
    """Hidden states [sequences, hidden] after the final norm, last token of each, in the order they were given."""
    residual = ops.embed(model.embed, pool)
    x = ops.rms_norm(residual, model.layers[0].input_norm)
    for layer, following in zip(model.layers, model.layers[1:] + (None,)):
        mix = full_attention if layer.kind == "full_attention" else linear_attention
        y = mix(ops, layer, x, pool)
        if following is None:                    # past the last mixer only last tokens matter
            residual, y = ops.gather_rows(residual, pool), ops.gather_rows(y, pool)
        y = ops.linear(y, layer.out_proj)
        residual, x = ops.add_rms_norm(residual, y, layer.post_norm)
        y = ops.linear(ops.swiglu(x, layer.gate_up), layer.down_proj)
        residual, x = ops.add_rms_norm(residual, y, following.input_norm if following else model.norm)
    return x


def full_attention(ops: Ops, layer: Layer, x: Matrix, pool: Pool) -> Matrix:
    """Gated causal attention, up to its output projection."""
    projected = ops.qk_rope(ops.linear(x, layer.in_proj), layer.q_norm, layer.k_norm, pool)
    projected = ops.exchange_keys(projected, layer.number, pool)
    return ops.gated_attention(projected, pool)


def linear_attention(ops: Ops, layer: Layer, x: Matrix, pool: Pool) -> Matrix:
    """Gated DeltaNet, up to its output projection."""
    projected = ops.exchange_inputs(ops.linear(x, layer.in_proj), layer.number, pool)
    qkv, g, beta = ops.gdn_conv_gates(projected, layer.conv, layer.a_log, layer.dt_bias, pool)
    o = ops.gated_delta_rule(qkv, g, beta, pool)
    ops.keep_states(layer.number, pool)
    return ops.gated_rms_norm(o, projected, layer.gdn_norm)
