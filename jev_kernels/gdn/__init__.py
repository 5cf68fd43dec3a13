"""The gated delta rule over a tree of chunks: ``conv`` (convolution and gates), ``portable`` for any GPU from sm_80, and
Hopper's two kernels (``prepare``, ``scan``, together in ``hopper``).

    qkv        uint16 [rows, (2 key_heads + value_heads) * 128] (BF16): q | k | v, each [rows, heads, 128]
    g, beta    float32, uint16 [rows, value_heads]: log decay and rate
    o          uint16 [rows, value_heads, 128], as [rows, value_heads * 128]
    states     float32 [slots, value_heads, 128, 128], in the order of the kernel: ``portable.state_matrices``
    counts, chunk_rows, chunk_out_rows, chunk_slots, runs    int32, ``jev_kernels.pool``

    portable.gated_delta_rule(stream, qkv, g, beta, o, counts, chunk_rows, chunk_out_rows, chunk_slots, runs, states,
                              scratch, progress)     # sizes: portable.scratch_bytes, portable.progress_entries
"""
