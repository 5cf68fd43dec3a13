"""Capture and replay: the same work, new data, clear errors, and a stream that is usable afterwards."""
from __future__ import annotations

import numpy as np
import pytest

from jev_kernels.gemm.trials import RANDOM
from jev_kernels.runtime import device
from jev_kernels.runtime.graph import CaptureError, capture

pytestmark = pytest.mark.gpu


@pytest.fixture
def stream():
    device.find_device()
    return device.Stream()


def test_replays_read_memory_anew(stream):
    with device.Arena(1 << 20, "test") as arena:
        x, y = arena.take((64, 64)), arena.take((64, 64))
        RANDOM(stream, 4, x, 1, 0.0)                                        # compiled before the capture
        graph = capture(stream, lambda: (device.copy(y, x, stream), RANDOM(stream, 4, x, 2, 0.0, pdl=True)))
        assert graph.nodes == 2 and graph.memory_bytes >= 0
        stream.synchronize()
        before = x.copy_to_host()
        graph.launch(stream)
        stream.synchronize()
        after = x.copy_to_host()
        assert np.array_equal(y.copy_to_host(), before) and not np.array_equal(before, after)
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(y.copy_to_host(), after)
        graph.destroy()
        with pytest.raises(RuntimeError, match="destroyed"):
            graph.launch(stream)


def test_a_failing_capture_leaves_the_stream_usable(stream):
    with device.Arena(1 << 20, "test") as arena:
        x = arena.take((64, 64))
        RANDOM(stream, 4, x, 1, 0.0)

        def broken():
            device.fill(x, 0, stream)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            capture(stream, broken)

        def waits():
            device.fill(x, 0, stream)
            try:
                stream.synchronize()                                        # not allowed inside a capture
            except RuntimeError:
                pass

        with pytest.raises(CaptureError, match="not allowed"):
            capture(stream, waits)
        with pytest.raises(CaptureError, match="cannot be captured"):
            capture(0, lambda: None)
        graph = capture(stream, lambda: device.fill(x, 7, stream))
        graph.launch(stream)
        stream.synchronize()
        assert (x.copy_to_host() == 7).all()


def test_a_capture_keeps_what_it_is_told_to(stream):
    import weakref

    class Thing:
        pass

    thing = Thing()
    there = weakref.ref(thing)
    with device.Arena(1 << 12, "test") as arena:
        graph = capture(stream, lambda: device.fill(arena.take(8), 1, stream), keep=(thing,))
        del thing
        assert there() is not None
        graph.destroy()
        assert there() is None
