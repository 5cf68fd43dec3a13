"""Causal attention over the row pool with its gate, portable and for Hopper."""
