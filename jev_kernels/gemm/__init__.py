"""Matrix products: which algorithm serves a shape, cuBLASLt, and our own for Hopper."""
