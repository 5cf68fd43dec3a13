"""Kernels without a GPU: lanes, PTX instructions, tensor cores and copies in plain Python, and a race detector."""
