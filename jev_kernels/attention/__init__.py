"""Gated causal attention over the paths of a row pool, head dim 256: ``portable`` for any GPU from sm_80, ``hopper``.

    q, gate, out    uint16 [rows, q_heads, 256] (BF16), as [rows, q_heads * 256], rows any stride apart
    k, v            uint16 [rows, kv_heads, 256], as [rows, kv_heads * 256]
    counts, tiles   int32 [16], [capacity, 4]; paths int32 [capacity]: ``jev_kernels.pool``

    plan = portable.Plan(q, k, v, gate, out, counts, tiles, paths)   # chooses the kernel, makes tensor maps
    plan(stream)                                                     # launches it, as often as you like, also in a graph
"""
