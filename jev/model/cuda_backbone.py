"""The backbone on a GPU: weights in one arena, a captured graph per row bucket, one upload and one download a forward.

A forward pass is: build the row pool, pack its metadata into pinned memory, copy it to the device, replay the graph of
the smallest bucket that holds the pool, copy the last rows back, wait (without the GIL). With ``graph=False`` the same
kernels are launched one by one, with the same bits.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numba import cuda
from tqdm import tqdm

from jev.checkpoint.config import ModelConfig
from jev.checkpoint.opening import Export
from jev.model import row_pool, weights
from jev.model.backbone import BackendError, BackendLost, Bound, Computed
from jev.model.buckets import Bucket, all_buckets, choose
from jev.model.forward import forward
from jev.model.ops.cuda import CudaOps
from jev.model.ops.cuda_buffers import Activation, Buffers, CudaWeights
from jev.model.ops.cuda_cache import CudaCache
from jev.model.row_pool import RowPool
from jev.model.sequences import Sequences
from jev.model.weights import Model, Spec
from jev.prefix_cache.passes import forward_pass
from jev_kernels.gemm.selection import Gemm
from jev_kernels.runtime import device, disk, graph as graphs
from jev_kernels.runtime.device import Device
from jev_kernels.runtime.errors import DeviceLost
from jev_kernels.runtime.launch import address

MAX_ROWS = 10240            # rows of a forward, unless one prompt may be longer: a state of 4,096 tokens and 255 options
READY_ROWS = MAX_ROWS       # narrow buckets up to here are captured at start-up, the others when first needed


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Whatever goes wrong with the GPU inside the block as a BackendError that begins with ``what``."""
    try:
        yield
    except (BackendError, ValueError):        # said already; wrong arguments
        raise
    except DeviceLost as e:
        raise BackendLost(f"{what}: {e}") from e
    except Exception as e:                    # of the driver, Numba or cuBLASLt, which have no class in common
        kind = "" if isinstance(e, RuntimeError) else f"{type(e).__name__}: "
        raise BackendError(f"{what}: {kind}{e}") from e


class BucketRunner:
    """Runs pools through the model in the buffers of one row bucket: its operations with their plans, its graph.

    buffers: shared with the runners of other buckets, so one runs at a time. log: told if no graph can be captured.
    """

    def __init__(self, config: ModelConfig, model: Model, gemm: Gemm, buffers: Buffers, bucket: Bucket, stream,
                 cache: CudaCache | None, log: Callable[[str], None]):
        self.bucket, self._model, self._buffers, self._stream, self._log = bucket, model, buffers, stream, log
        self.ops = CudaOps(config, gemm, buffers, bucket, stream, cache)
        with self.ops.binding():
            self.hidden: Activation = self.launch()
        self._hidden_at = address(self.hidden.array)
        self._graph: graphs.Graph | None = None
        self._captured = False

    def launch(self) -> Activation:
        """Every kernel of a forward pass into the stream; returns the buffer of hidden states."""
        return forward(self.ops, self._model, self.ops.pool)

    def graph(self) -> graphs.Graph | None:
        """The captured forward pass; None where capturing fails, and then it is launched kernel by kernel."""
        if not self._captured:
            self._captured = True
            try:
                self._graph = graphs.capture(self._stream, self.launch, keep=(self.ops,))
            except Exception as e:            # whatever it is, it concerns the capture alone if eager launches work
                self._log(f"no graph for {self.bucket.rows} rows, launching kernel by kernel: {type(e).__name__}: {e}")
        return self._graph

    def upload(self, pool: RowPool, last_rows: np.ndarray) -> None:
        """Put the pool's metadata on the device; last_rows: its distinct last rows."""
        used = self.bucket.pack(pool, last_rows, self._buffers.host_metadata)
        device.to_device(self._buffers.metadata_at, self._buffers.host_metadata[:used], self._stream)
        self.ops.clear(pool.n_rows)

    def run(self, pool: RowPool, use_graph: bool) -> np.ndarray:
        """BF16 (uint16) [sequences, hidden]: the hidden state of each sequence's last token."""
        last_rows, where = pool.last_rows, np.zeros(1, np.int64)
        if len(last_rows) > 1:
            last_rows, where = np.unique(last_rows, return_inverse=True)
        self.upload(pool, last_rows)
        graph = self.graph() if use_graph else None
        if graph is not None:
            graph.launch(self._stream)
        else:
            self.launch()
        out = self._buffers.host_hidden[:len(last_rows)]
        device.to_host(out, self._hidden_at, self._stream)
        self._stream.synchronize()
        return out[where]

    def close(self) -> None:
        if self._graph is not None:
            self._graph.destroy()
            self._graph = None


class CudaBackbone:
    """``Backbone`` on one GPU. Raises BackendError when the model does not fit or does not run.

    load(specs) -> CudaWeights: where the weights come from; the default streams them from ``export``.
    """
    name = "cuda"

    def __init__(self, export: Export, gpu: Device, max_length: int | None = None, graph: bool = True,
                 cache_gb: float = 0.0, log=print):
        length = max_length or export.manifest.max_length

        def load(specs: Sequence[Spec]) -> CudaWeights:
            total = sum(2 * int(np.prod(s.shape)) for s in specs)
            with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=None) as bar:
                return CudaWeights.from_tensors(specs, export.tensors, bar.update)
        self._open(export.config, gpu, load, length, graph, cache_gb, log)

    @classmethod
    def with_weights(cls, config: ModelConfig, gpu: Device, load, max_length: int = 4096, graph: bool = True,
                     cache_gb: float = 0.0, log=print, ready_rows: int = READY_ROWS, tune: bool = True) -> CudaBackbone:
        """A backbone whose weights ``load(specs)`` provides: synthetic ones, for benchmarks and tests.

        ready_rows: capture narrow buckets up to so many rows now. tune: time GEMM algorithms; otherwise the first that
        gives the right bits is taken.
        """
        self = cls.__new__(cls)
        self._open(config, gpu, load, max_length, graph, cache_gb, log, ready_rows, tune)
        return self

    def _open(self, config, gpu, load, max_length, graph, cache_gb, log, ready_rows=READY_ROWS, tune=True):
        self.config, self.device, self.log, self.max_length, self.use_graphs = config, gpu, log, max_length, graph
        started = time.perf_counter()
        self.buckets = all_buckets(max(MAX_ROWS, max_length), history=cache_gb > 0)
        self.max_rows = self.buckets[-1].rows
        self._runners: dict[Bucket, BucketRunner] = {}
        ready = [b for b in self.buckets if not b.wide and b.rows <= ready_rows]
        with reported("the model cannot be opened on the GPU"):
            folder = disk.folder()
            self.gemm = Gemm(gpu, folder and folder / "gemm.json", tune)
            specs = weights.specs(config)
            self._tune(specs, ready)
            self.weights = load(specs)
            self.model = weights.assemble(self.weights.held, config)
            self.buffers = Buffers(config, self.buckets, max_length)
            self.stream = device.Stream()
            self.cache = self._open_cache(cache_gb)
            loaded = time.perf_counter()
            log(f"weights on the GPU in {loaded - started:.1f} s; preparing kernels")
            captured = self._prepare(ready)
        log(f"ready in {time.perf_counter() - started:.1f} s, {captured} graphs, "
            f"{device.peak_memory() / 1e9:.1f} GB of GPU memory")

    def _open_cache(self, gb: float) -> CudaCache | None:
        """The prefix cache of so many GB."""
        if not gb:
            return None
        try:
            cache = CudaCache(self.config, int(gb * 1e9))
        except ValueError as error:           # too little for anything
            raise BackendError(str(error)) from None
        self.log(f"prefix cache: {cache}")
        return cache

    def _tune(self, specs: Sequence[Spec], ready: Sequence[Bucket]) -> None:
        """Choose GEMM algorithms for the buckets that are captured at start-up, while the GPU's memory is still free."""
        rows = sorted({n for b in ready for n in (b.rows, b.lasts)})
        started, chosen = time.perf_counter(), 0
        for gated, names in ((False, weights.LINEAR), (True, weights.GATED)):
            chosen += self.gemm.prepare(dict.fromkeys(s.shape for s in specs if s.name in names), rows, gated)
        if chosen:
            self.log(f"{chosen} GEMMs chosen in {time.perf_counter() - started:.1f} s")

    def _prepare(self, ready: Sequence[Bucket]) -> int:
        """Compile and run everything once, then capture the buckets that ordinary requests need; how many there are."""
        started = time.perf_counter()
        pool = row_pool.build([np.zeros(1, np.int32)])
        for bucket in dict.fromkeys([self.buckets[0], *ready[-1:]]):     # few rows and many take different kernels
            self.runner(bucket).upload(pool, pool.last_rows)
            self.runner(bucket).launch()
        self.stream.synchronize()
        warm = time.perf_counter()
        captured = sum(self.runner(bucket).graph() is not None for bucket in ready) if self.use_graphs else 0
        self.log(f"kernels ready in {warm - started:.1f} s, graphs of {captured} row buckets captured in "
                 f"{time.perf_counter() - warm:.1f} s")
        return captured

    def runner(self, bucket: Bucket) -> BucketRunner:
        """What runs pools in this bucket, made at its first use."""
        if bucket not in self._runners:
            self._runners[bucket] = BucketRunner(self.config, self.model, self.gemm, self.buffers, bucket, self.stream,
                                                 self.cache, self.log)
        return self._runners[bucket]

    def hidden(self, sequences: Sequence[np.ndarray]) -> Computed:
        """See ``Backbone``."""
        with reported("the forward pass failed on the GPU"):
            cuda.current_context()            # the calling thread may be new to CUDA
            return self._hidden(Sequences.of(sequences))

    def _hidden(self, sequences: Sequences) -> Computed:
        for keep in (True, False) if self.cache is not None else ():       # what is kept takes slots that branches may need
            found = self._resumed(self.cache, sequences, keep)
            if found is not None:
                return found
        pool = row_pool.build(sequences)
        bucket = choose(pool, self.buckets)
        if bucket is None:
            return self._in_parts(sequences)
        self._check(sequences.longest, int(sequences.tokens.max()))
        return Computed(self.runner(bucket).run(pool, self.use_graphs), pool.n_rows, np.zeros(len(sequences), np.intp))

    def _resumed(self, cache: CudaCache, sequences: Sequences, keep: bool) -> Computed | None:
        """A forward pass that goes on from what is kept, and keeps more; None where no bucket holds such a pass."""
        with forward_pass(cache, sequences, keep) as made:
            pool = row_pool.build(sequences, made.plan)
            bucket = choose(pool, self.buckets)
            if bucket is None:                # nothing has been done: made.finite is False still
                return None
            self._check(sequences.longest, int(sequences.tokens.max()))
            try:
                hidden = self.runner(bucket).run(pool, self.use_graphs)
            except BaseException:             # who knows what the device has written
                cache.tree.clear()
                raise
            made.done(hidden)
        return Computed(hidden, pool.n_rows, made.plan.tokens)

    def resumable(self, ids: np.ndarray) -> int:
        return 0 if self.cache is None else self.cache.tree.length(ids)

    def bound(self, pool: RowPool) -> Bound:
        """See ``Backbone``. Raises BackendError for a pool that no bucket holds."""
        cuda.current_context()
        bucket = choose(pool, self.buckets)
        if bucket is None:
            raise BackendError(f"{pool.n_rows} rows in {len(pool.branches)} branches do not fit in one forward pass")
        self._check(int(pool.positions.max()) + 1, int(pool.ids.max()))
        pool = replace(pool, last_rows=np.unique(pool.last_rows))
        runner = self.runner(bucket)
        runner.upload(pool, pool.last_rows)
        return Bound(runner.ops, self.model, runner.ops.pool, pool)

    def _check(self, longest: int, largest: int) -> None:
        """BackendError for indices past the end of a table: kernels trust them."""
        if longest > self.max_length:
            raise BackendError(f"a sequence of {longest} tokens is longer than {self.max_length}")
        if largest >= self.config.vocab_size:
            raise BackendError(f"token {largest} is not in the vocabulary of {self.config.vocab_size}")

    def _in_parts(self, sequences: Sequences) -> Computed:
        """Two forwards where one would not hold everything, halved in lexicographic order: prefixes stay together."""
        n = len(sequences)
        if n == 1:
            raise BackendError(f"a sequence of {sequences.longest} tokens does not fit in {self.max_rows} rows")
        out, rows, resumed = np.empty((n, self.config.hidden_size), np.uint16), 0, []
        for start, end in ((0, n // 2), (n // 2, n)):
            part = self._hidden(sequences.part(start, end))
            out[sequences.order[start:end]] = part.hidden
            rows += part.rows
            resumed.append(part.resumed)
        return Computed(out, rows, np.concatenate(resumed))

    def close(self) -> None:
        """Wait for the GPU and free its memory."""
        cuda.current_context()
        try:
            self.stream.synchronize()
        except RuntimeError:                  # a kernel failed: the context is lost, its memory goes with the process
            return
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        if self.cache is not None:
            self.cache.close()
        self.buffers.arena.close()
        self.weights.arena.close()
