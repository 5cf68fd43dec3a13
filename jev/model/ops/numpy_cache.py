"""The memory behind the prefix cache of the NumPy backend."""
from __future__ import annotations

import numpy as np

from jev.checkpoint.config import ModelConfig
from jev.prefix_cache.tree import PrefixTree
from jev_kernels.pool import CHUNK, TAPS


class NumpyCache:
    """Pages and snapshots in float64, as the operations compute.

    keys [attention layers, pages, 64, 2 * kv_dim], states [linear layers, snapshots, value heads, 128, 128],
    inputs [linear layers, snapshots, 3, conv_dim].
    """

    def __init__(self, config: ModelConfig, pages: int, snapshots: int):
        c, kinds = config, config.layer_types
        self.tree = PrefixTree(pages, snapshots)
        self.keys = np.empty((kinds.count("full_attention"), pages, CHUNK, 2 * c.num_key_value_heads * c.head_dim))
        linear = kinds.count("linear_attention")
        self.states = np.empty((linear, snapshots, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim))
        self.inputs = np.empty((linear, snapshots, TAPS, c.conv_dim))

    @classmethod
    def of_size(cls, config: ModelConfig, nbytes: int) -> NumpyCache:
        """As many places as ``nbytes`` hold, pages taking the larger part. Raises ValueError for too little."""
        one = cls(config, 1, 1)
        page, snapshot = one.keys.nbytes or 1, (one.states.nbytes + one.inputs.nbytes) or 1
        snapshots = int(0.4 * nbytes // snapshot)
        pages = int((nbytes - snapshots * snapshot) // page)
        if not (pages and snapshots):
            raise ValueError(f"a prefix cache of {nbytes / 1e9:.3f} GB holds nothing: a snapshot takes {snapshot / 1e6:.1f} MB "
                             f"and 64 tokens {page / 1e6:.1f} MB")
        return cls(config, pages, snapshots)

    def __str__(self) -> str:
        return (f"{self.tree.n_pages * CHUNK:,} tokens and {self.tree.n_snapshots} snapshots in "
                f"{(self.keys.nbytes + self.states.nbytes + self.inputs.nbytes) / 1e9:.2f} GB")
