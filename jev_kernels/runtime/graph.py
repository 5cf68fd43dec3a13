"""Capture a piece of a stream once, replay it for the cost of one launch.

A replay launches every kernel with the grid and the arguments of the capture, so what changes between requests must be
read from device memory (row counts, indices), and every buffer must outlive the graph. Kernels launched with
programmatic dependent launch keep their early start: the capture records it as a programmatic edge.

    graph = capture(stream, lambda: forward(stream), keep=(plans, buffers))
    graph.launch(stream)

Source: CUDA driver API, graph management.
"""
from __future__ import annotations

from collections.abc import Callable

from jev_kernels.runtime import device
from jev_kernels.runtime.launch import check, stream_address


class CaptureError(RuntimeError):
    """A capture or instantiation failed; the stream is usable again. ``__cause__`` has the first reason."""


class Graph:
    """An instantiated graph. Made by ``capture``.

    nodes         kernels, copies and memsets in it
    memory_bytes  device memory that instantiating and uploading it took, as far as the driver shows it
    """

    def __init__(self, graph, executable, nodes: int, keep: tuple):
        self._graph, self._executable, self.nodes, self._keep = graph, executable, nodes, keep
        self.memory_bytes = 0

    def launch(self, stream) -> None:
        """Put one replay into ``stream``; returns at once."""
        from cuda.bindings import driver
        if self._executable is None:
            raise RuntimeError("this graph was destroyed")
        check(driver.cuGraphLaunch(self._executable, stream_address(stream)))

    def upload(self, stream) -> None:
        """Bring the graph to the device now, so that the first launch is as fast as the next."""
        from cuda.bindings import driver
        check(driver.cuGraphUpload(self._executable, stream_address(stream)))

    def destroy(self) -> None:
        """Free the graph. The caller sees to it that no replay is running."""
        if self._executable is not None:
            from cuda.bindings import driver
            executable, graph, self._executable = self._executable, self._graph, None
            check(driver.cuGraphExecDestroy(executable))
            check(driver.cuGraphDestroy(graph))
            self._keep = ()

    def __del__(self):
        try:
            self.destroy()
        except Exception:             # interpreter exit: the context may be gone
            pass


def capture(stream, fn: Callable[[], object], keep: tuple = ()) -> Graph:
    """The work that ``fn()`` puts into ``stream``, as a Graph, uploaded. Nothing runs.

    stream   a stream other than the default one, with nothing being captured
    fn       must only launch into ``stream``: no synchronizing, no allocating. Run it once before, so that kernels are
             compiled and libraries have their handles
    keep     objects that must live as long as the graph: plans (they keep their arrays), buffers

    Raises CaptureError; an exception of ``fn`` itself passes through. Either way the stream is usable afterwards.
    """
    from cuda.bindings import driver
    handle = stream_address(stream)
    before, _ = device.memory()
    # Relaxed: loading a kernel's code lazily inside the capture is no error, and other threads may do as they like.
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    try:
        check(driver.cuStreamBeginCapture(handle, mode))
    except RuntimeError as e:
        raise CaptureError(f"the stream cannot be captured: {e}") from e
    try:
        fn()
    except BaseException:
        result = driver.cuStreamEndCapture(handle)
        if not int(result[0]) and result[1]:
            driver.cuGraphDestroy(result[1])
        raise
    try:
        graph = check(driver.cuStreamEndCapture(handle))
    except RuntimeError as e:
        raise CaptureError(f"something that was captured is not allowed in a graph ({e})") from e
    try:
        nodes = int(check(driver.cuGraphGetNodes(graph, 0))[1])
        executable = check(driver.cuGraphInstantiate(graph, 0))
    except RuntimeError as e:
        driver.cuGraphDestroy(graph)
        raise CaptureError(f"the captured graph cannot be instantiated ({e})") from e
    made = Graph(graph, executable, nodes, tuple(keep))
    made.upload(stream)
    after, _ = device.memory()
    made.memory_bytes = max(0, before - after)
    return made
