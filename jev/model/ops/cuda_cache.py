"""The memory behind the prefix cache on a GPU: pages of keys and values, snapshots of states and convolution inputs.

==============  ==============================================  =====================================================
a page          [attention layers, 64, 2 * kv_dim] BF16          keys and values of 64 tokens
a snapshot      [linear layers, value heads, 128, 128] float32   states after a multiple of 64 tokens, in the layout of
                                                                 the delta rule's slots
                [linear layers, 3, conv_dim] BF16                inputs of the convolutions for the three tokens before
==============  ==============================================  =====================================================

27B: 4 MB a page, 154 MB a snapshot. Everything is allocated at once, and nothing later.
"""
from __future__ import annotations

import numpy as np

from jev.checkpoint.config import ModelConfig
from jev.prefix_cache.tree import PrefixTree
from jev_kernels.pool import CHUNK, TAPS
from jev_kernels.rowwise.exchange import Entries
from jev_kernels.runtime import device
from jev_kernels.runtime.launch import address

PAGE_SHARE = 0.6                        # of the memory, for pages: 200 snapshots and 780,000 tokens in 80 GB for the 27B


class CudaCache:
    """Places for what is kept, in one allocation of at most ``nbytes``. Raises OutOfMemory, ValueError for too little."""

    def __init__(self, config: ModelConfig, nbytes: int):
        kinds = config.layer_types
        attention, linear = kinds.count("full_attention"), kinds.count("linear_attention")
        self._page_layer = CHUNK * 2 * config.num_key_value_heads * config.head_dim * 2
        self._state_layer = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
        self._inputs_layer = TAPS * config.conv_dim * 2
        self.page_bytes = max(attention * self._page_layer, 16)
        self._states_bytes, self._inputs_bytes = linear * self._state_layer, linear * self._inputs_layer
        self.snapshot_bytes = max(self._states_bytes + self._inputs_bytes, 16)
        snapshots = int((1 - PAGE_SHARE) * nbytes // self.snapshot_bytes)
        pages = int((nbytes - snapshots * self.snapshot_bytes) // self.page_bytes)
        if not snapshots or not pages:
            raise ValueError(f"a prefix cache of {nbytes / 1e9:.2f} GB holds nothing: a snapshot takes "
                             f"{self.snapshot_bytes / 1e6:.0f} MB and 64 tokens {self.page_bytes / 1e6:.1f} MB")
        self.tree = PrefixTree(pages, snapshots)
        self.arena = device.Arena(device.array_bytes(pages * self.page_bytes, np.uint8)
                                  + device.array_bytes(snapshots * self.snapshot_bytes, np.uint8), "the prefix cache")
        self._pages = self.arena.take(pages * self.page_bytes, np.uint8)
        self._snapshots = self.arena.take(snapshots * self.snapshot_bytes, np.uint8)
        self._pages_at, self._snapshots_at = address(self._pages), address(self._snapshots)

    def __str__(self) -> str:
        return (f"{self.tree.n_pages * CHUNK:,} tokens and {self.tree.n_snapshots} snapshots in "
                f"{(self.tree.n_pages * self.page_bytes + self.tree.n_snapshots * self.snapshot_bytes) / 1e9:.1f} GB")

    def keys(self, layer: int) -> Entries:
        """An attention layer's part of every page, by its number among those layers."""
        return Entries(self._pages_at + layer * self._page_layer, self.page_bytes)

    def states(self, layer: int) -> Entries:
        """A linear layer's states in every snapshot, by its number among those layers."""
        return Entries(self._snapshots_at + layer * self._state_layer, self.snapshot_bytes)

    def inputs(self, layer: int) -> Entries:
        """... and the inputs of its convolution."""
        return Entries(self._snapshots_at + self._states_bytes + layer * self._inputs_layer, self.snapshot_bytes)

    def close(self) -> None:
        self.arena.close()
