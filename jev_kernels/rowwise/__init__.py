"""Kernels that treat every row alike: norms, SiLU, RoPE, embedding and gather."""
