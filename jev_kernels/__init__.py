"""GPU kernels of the worker in Numba-CUDA, one operation a file: arrays in, arrays out.

Nothing here knows of requests or models, and importing the package imports nothing else: take what you need, e.g.
``from jev_kernels import rms_norm``.
"""
