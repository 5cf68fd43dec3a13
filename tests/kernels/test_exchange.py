"""What is exchanged with the prefix cache: every byte where it belongs, none elsewhere."""
from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from jev_kernels.pool import CHUNK, COUNTS, KEPT_PAGES, KEPT_STATES, RESTORED_PAGES, RESTORED_STATES
from jev_kernels.rowwise import exchange
from jev_kernels.rowwise.exchange import Entries, Raised
from jev_kernels.runtime.launch import address


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    monkeypatch.setattr(exchange, "BLOCKS", 3)          # simulated blocks are slow, also those that find no work


LAYERS, LAYER = 3, 1                # the cache holds several layers' parts side by side; this one is exchanged


def random(rng, *shape, dtype=np.uint16):
    """Any bits: copies must not care whether they are numbers."""
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


def counts(**of):
    out = np.zeros(COUNTS, np.int32)
    for name, n in of.items():
        out[{"restored_pages": RESTORED_PAGES, "restored_states": RESTORED_STATES, "kept_pages": KEPT_PAGES,
             "kept_states": KEPT_STATES}[name]] = n
    return cuda.to_device(out)


def entries(array, layer: int = LAYER) -> Entries:
    """A layer's part of an array [entries, layers, ...]."""
    part = array[0, 0].nbytes
    return Entries(address(array) + layer * part, LAYERS * part)


def device(x):
    return cuda.to_device(np.ascontiguousarray(x))


@pytest.mark.parametrize("restored, kept", [((), ()), ((4,), ()), ((), ((2, 1),)), ((4, 0), ((2, 1), (3, 0)))])
def test_keys(restored, kept, width=48, columns=32, first=150):
    """Pages restored to history rows and kept from a chunk's rows, which lie anywhere."""
    rng = np.random.default_rng(0)
    projected, pages = random(rng, first + 3 * CHUNK, width), random(rng, 5, LAYERS, CHUNK, columns)
    chunk_rows = np.stack([rng.permutation(first)[:CHUNK] for _ in range(2)]).astype(np.int32)
    on_device, of_cache = device(projected), device(pages)
    exchange.exchange_keys(0, on_device[:, 8:8 + columns], counts(restored_pages=len(restored), kept_pages=len(kept)),
                           device(np.array([*restored, -9][:2], np.int32)),
                           device(np.array([*kept, (-9, -9)], np.int32)), device(chunk_rows), first, entries(of_cache))
    wanted, wanted_pages = projected.copy(), pages.copy()
    for i, page in enumerate(restored):
        wanted[first + i * CHUNK:first + (i + 1) * CHUNK, 8:8 + columns] = pages[page, LAYER]
    for page, chunk in kept:
        wanted_pages[page, LAYER] = projected[chunk_rows[chunk], 8:8 + columns]
    assert (on_device.copy_to_host() == wanted).all() and (of_cache.copy_to_host() == wanted_pages).all()


@pytest.mark.parametrize("flags, first", [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("restored, kept", [((), ()), (((3, 1, 40),), ()), ((), ((2, 1),)),
                                            (((0, 2, 40), (3, 0, 43)), ((2, 1), (1, 0)))])
def test_inputs_and_states(restored, kept, flags, first, width=40, columns=24, heads=2, side=8):
    rng = np.random.default_rng(1)
    projected, inputs = random(rng, 50, width), random(rng, 4, LAYERS, 3, columns)
    snapshots, states = (random(rng, *shape, dtype=np.float32)
                         for shape in ((4, LAYERS, heads, side, side), (5, heads, side, side)))
    chunk_rows = rng.integers(0, 40, (2, CHUNK)).astype(np.int32)
    chunk_slots = np.array([4, 3], np.int32)
    projected_d, inputs_d, snapshots_d, states_d = map(device, (projected, inputs, snapshots, states))
    raised = device(np.zeros((5, heads, 2), np.uint32))
    number = counts(restored_states=len(restored), kept_states=len(kept))
    entry, kept_d = device(np.array([(*e, 0) for e in restored] + [(-9,) * 4], np.int32)), device(
        np.array([*kept, (-9, -9)], np.int32))
    exchange.exchange_inputs(0, projected_d[:, 8:8 + columns], states_d, number, entry, kept_d, device(chunk_rows),
                             device(chunk_slots), entries(inputs_d), entries(snapshots_d),
                             None if first else entries(snapshots_d, LAYER - 1),
                             Raised(address(raised), flags, 4) if flags else Raised())
    wanted, wanted_inputs, wanted_states = projected.copy(), inputs.copy(), states.copy()
    wanted_flags = np.zeros((5, heads, 2), np.uint32)
    for snapshot, slot, tail in restored:
        wanted[tail:tail + 3, 8:8 + columns] = inputs[snapshot, LAYER]
        wanted_states[slot] = snapshots[snapshot, LAYER]
        wanted_flags[slot] = 4 if flags else 0
    for snapshot, chunk in kept:
        wanted_inputs[snapshot, LAYER] = projected[chunk_rows[chunk, -3:], 8:8 + columns]
        if not first:                                   # the states of the layer before, which are in their slots still
            snapshots[snapshot, LAYER - 1] = states[chunk_slots[chunk]]
    assert (projected_d.copy_to_host() == wanted).all() and (inputs_d.copy_to_host() == wanted_inputs).all()
    assert (states_d.copy_to_host().view(np.uint32) == wanted_states.view(np.uint32)).all()
    assert (raised.copy_to_host() == wanted_flags).all()
    assert (snapshots_d.copy_to_host().view(np.uint32) == snapshots.view(np.uint32)).all()

    exchange.keep_states(0, states_d, number, kept_d, device(chunk_slots), entries(snapshots_d))
    for snapshot, chunk in kept:
        snapshots[snapshot, LAYER] = wanted_states[chunk_slots[chunk]]
    assert (snapshots_d.copy_to_host().view(np.uint32) == snapshots.view(np.uint32)).all()


def test_refusals():
    kv, number = device(np.zeros((200, 32), np.uint16)), counts()
    pages, kept, rows = (device(np.zeros(s, np.int32)) for s in (2, (1, 2), (1, CHUNK)))
    with pytest.raises(ValueError, match="^kv has 200 rows: no room for 2 pages of history from row 100"):
        exchange.exchange_keys(0, kv, number, pages, kept, rows, 100, Entries(0, 1 << 20))
    with pytest.raises(ValueError, match="^kv must have rows aligned"):
        exchange.exchange_keys(0, kv[:, 1:9], number, pages, kept, rows, 0, Entries(0, 1 << 20))
    with pytest.raises(ValueError, match="^pages must be aligned to 16 bytes and at least 4096 bytes apart, not 64"):
        exchange.exchange_keys(0, kv, number, pages, kept, rows, 0, Entries(0, 64))
    with pytest.raises(ValueError, match="^kept_pages must have shape"):
        exchange.exchange_keys(0, kv, number, pages, pages, rows, 0, Entries(0, 1 << 20))
    states, restored, far = device(np.zeros((1, 2, 8, 8), np.float32)), device(np.zeros((1, 4), np.int32)), Entries(0, 1 << 20)
    inputs = number, restored, kept, rows, pages
    with pytest.raises(ValueError, match="^before must have entries 1048576 bytes apart, as snapshots, not 64"):
        exchange.exchange_inputs(0, kv, states, *inputs, far, far, Entries(0, 64))
    with pytest.raises(ValueError, match="^raised must have a multiple of 2 flags a head, not 3"):
        exchange.exchange_inputs(0, kv, states, *inputs, far, far, raised=Raised(0, 3, 4))
    with pytest.raises(ValueError, match="^states must be contiguous"):
        exchange.keep_states(0, device(np.zeros((1, 2, 3, 3), np.float32)), number, kept, pages, Entries(0, 1 << 20))
