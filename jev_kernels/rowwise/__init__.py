"""One row at a time: embedding and gather, RMS norms, RoPE, SiLU. Every launcher takes device arrays and a stream:

    x, y       uint16 [capacity, width] (BF16), rows any stride apart
    counts     int32 [16], ``jev_kernels.pool``: how many rows are live

    stream, counts = device.Stream(), cuda.to_device(np.array([rows] + [0] * 15, np.int32))
    rms_norm.rms_norm(stream, x, weight, y, counts, eps=1e-6)
    silu.silu_mul(stream, gate_up, y, counts)                    # gate_up [capacity, 2 width], interleaved
    rope.qk_rope(stream, qkv, q_weight, k_weight, table, positions, counts, q_heads=24, k_heads=4, eps=1e-6)
"""
