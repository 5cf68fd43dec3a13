"""Device memory, copies, events: what is written arrives, and what does not fit says so in GB."""
from __future__ import annotations

import time

import numpy as np
import pytest

from jev_kernels.runtime import device

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu():
    return device.find_device()


def test_discovery(gpu):
    assert gpu.compute_capability >= (8, 0) and gpu.multiprocessors > 10 and gpu.l2_bytes > 1 << 20
    assert gpu.memory_bytes > 1 << 30 and gpu.driver_version[0].isdigit() and gpu.cuda_version >= (12, 0)
    assert gpu.name in str(gpu) and gpu.driver_version in str(gpu)
    with pytest.raises(device.NoDevice, match="no GPU 99"):
        device.find_device(99)


def test_arena_views(gpu):
    with device.Arena(1 << 20, "test") as arena:
        a, b, c = arena.take((3, 5)), arena.take(7, np.int32), arena.take((2, 3, 4), np.float32)
        pointers = [x.__cuda_array_interface__["data"][0] for x in (a, b, c)]
        assert all(p % 256 == 0 for p in pointers) and pointers == sorted(set(pointers))
        assert (a.dtype, b.dtype, c.dtype) == (np.uint16, np.int32, np.float32) and c.shape == (2, 3, 4)
        for array in (a, b, c):
            host = np.arange(array.size, dtype=array.dtype).reshape(array.shape)
            array.copy_to_device(host)
            assert np.array_equal(array.copy_to_host(), host)
        with pytest.raises(device.OutOfMemory, match=r"test: an array .* GB of the arena's"):
            arena.take((1 << 20,))


def test_out_of_memory_says_how_much(gpu):
    free, total = device.memory()
    with pytest.raises(device.OutOfMemory) as caught:
        device.Arena(total + (1 << 34), "the weights of a large model")
    text = str(caught.value)
    assert "the weights of a large model" in text and f"{(total + (1 << 34)) / 1e9:.2f} GB of GPU memory needed" in text
    assert "are free" in text
    before = device.peak_memory()
    with device.Arena(1 << 30, "a gigabyte"):
        assert device.peak_memory() >= total - free + (1 << 30) - (1 << 26)
    assert device.peak_memory() >= before


def test_upload_joins_chunks_in_order(gpu):
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 65536, s, np.uint16) for s in ((3,), (1000, 37), (64, 1 << 12), (5, 7, 11), (1, 1 << 21))]
    parts.append(rng.integers(0, 65536, (6, 256, 512), np.uint16).reshape(3, 2, 256, 512).transpose(1, 0, 2, 3))
    whole = np.concatenate([p.reshape(-1) for p in parts])
    with device.Arena(4 * whole.nbytes + 4096, "test") as arena, device.Uploader(1 << 20, 2, 3) as uploader:
        first, second, seen = arena.take(whole.size), arena.take(whole.size), []
        uploader.upload(first, parts, seen.append)
        uploader.upload(second, [whole])
        uploader.finish()
        assert np.array_equal(first.copy_to_host(), whole) and np.array_equal(second.copy_to_host(), whole)
        assert sum(seen) == whole.nbytes
        with pytest.raises(ValueError, match="has 20"):
            uploader.upload(arena.take(10), [whole])
        with pytest.raises(ValueError, match="has 100"):
            uploader.upload(arena.take(50), [whole[:49]])
        with pytest.raises(ValueError, match="float32"):
            uploader.upload(arena.take(50), [np.zeros(25, np.float32)])


def test_upload_takes_turns(gpu):
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 65536, (4096, 640), np.uint16) for _ in range(2)]
    want = np.stack([p.reshape(-1, 4, 640) for p in parts], 1).reshape(-1, 640)
    with device.Arena(2 * want.nbytes + 4096, "test") as arena, device.Uploader(8 << 20, 2, 3) as uploader:
        target, seen = arena.take(want.shape), []
        uploader.upload(target, parts, seen.append, interleave=4)
        uploader.finish()
        assert np.array_equal(target.copy_to_host(), want) and sum(seen) == want.nbytes and len(seen) > 2
        with pytest.raises(ValueError, match="interleaved by 3"):
            uploader.upload(target, parts, interleave=3)


def test_upload_speed_from_the_page_cache(gpu, tmp_path):
    """Prints the rate; 51 GB in 20 s would be 2.5 GB/s, and that must hold on any machine with a GPU."""
    size = 4 << 30
    path = tmp_path / "weights"
    block = np.random.default_rng(0).integers(0, 65536, 1 << 25, np.uint16)
    with open(path, "wb") as file:
        for _ in range(size // block.nbytes):
            block.tofile(file)
    source = np.memmap(path, np.uint16, "r").reshape(-1, 1 << 12)
    with device.Arena(size, "test") as arena:
        target = arena.take(source.shape)
        started = time.perf_counter()
        with device.Uploader() as uploader:
            ready = time.perf_counter()
            for i in range(0, len(source), 20000):
                uploader.upload(target[i:i + 20000], [source[i:i + 20000]])
            uploader.finish()
            done = time.perf_counter()
        print(f"\nbuffers {ready - started:.2f} s, then {size / (done - ready) / 1e9:.1f} GB/s "
              f"({uploader.threads} threads)")
        assert np.array_equal(target[-1:].copy_to_host(), source[-1:])
    assert size / (done - ready) > 2.5e9


def test_streams_events_copies(gpu):
    a, b = device.Stream(), device.Stream()
    with device.Arena(1 << 26, "test") as arena:
        x, y = arena.take(1 << 22), arena.take(1 << 22)
        start = device.Event().record(a)
        device.fill(x, 0x1234, a)
        end = device.Event().record(a)
        b.wait(end)
        device.copy(y, x, b)
        host = device.pinned(1 << 22, np.uint16)
        device.to_host(host, y, b)
        b.synchronize()
        assert (host == 0x1234).all() and start.milliseconds_to(end) > 0
        host[:] = np.arange(1 << 22).astype(np.uint16)
        device.to_device(x, host, a)
        device.Event(timing=False, blocking=True).record(a).synchronize()
        assert np.array_equal(x.copy_to_host(), host)
        with pytest.raises(ValueError, match="do not fit"):
            device.to_device(arena.take(4), host, a)
        with pytest.raises(ValueError, match="contiguous"):
            device.to_device(x, host[::2], a)
