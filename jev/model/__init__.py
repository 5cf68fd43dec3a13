"""The model: the layer loop, the row pool, weights, operations, and the backends that run them."""
