"""The backbone on a GPU: weights in one arena, a captured graph per row bucket, one upload and one download a forward.

A forward pass is: build the row pool, pack its metadata into pinned memory, copy it to the device, replay the graph of
the smallest bucket that holds the pool, copy the last rows back, wait (without the GIL). With ``graph=False`` the same
kernels are launched one by one, with the same bits.
"""
from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numba import cuda
from tqdm import tqdm

from jev.checkpoint.checkpoint import Export, ModelConfig
from jev.model import row_pool, weights
from jev.model.backbone import BackendError, BackendLost, forward
from jev.model.buckets import Bucket, choose, row_counts
from jev.model.ops.cuda import Buffers, CudaOps, CudaWeights
from jev.model.row_pool import RowPool
from jev_kernels.gemm.selection import Gemm
from jev_kernels.runtime import device, disk, graph as graphs
from jev_kernels.runtime.device import Device
from jev_kernels.runtime.errors import DeviceLost

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


class CudaBackbone:
    """``Backbone`` on one GPU. Raises BackendError when the model does not fit or does not run.

    load(specs) -> CudaWeights: where the weights come from; the default streams them from ``export``.
    """
    name = "cuda"

    def __init__(self, export: Export, gpu: Device, max_length: int | None = None, graph: bool = True, log=print):
        length = max_length or export.manifest.max_length

        def load(specs):
            total = sum(2 * int(np.prod(s.shape)) for s in specs)
            with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=None) as bar:
                return CudaWeights.from_tensors(specs, export.tensors, bar.update)
        self._open(export.config, gpu, load, length, graph, log)

    @classmethod
    def with_weights(cls, config: ModelConfig, gpu: Device, load, max_length: int = 4096, graph: bool = True,
                     log=print, ready_rows: int = READY_ROWS, tune: bool = True) -> CudaBackbone:
        """A backbone whose weights ``load(specs)`` provides: synthetic ones, for benchmarks and tests.

        ready_rows: capture narrow buckets up to so many rows now. tune: time GEMM algorithms; otherwise the first that
        gives the right bits is taken.
        """
        self = cls.__new__(cls)
        self._open(config, gpu, load, max_length, graph, log, ready_rows, tune)
        return self

    def _open(self, config, gpu, load, max_length, graph, log, ready_rows=READY_ROWS, tune=True):
        self.config, self.device, self.log, self.ready_rows, self.max_length = config, gpu, log, ready_rows, max_length
        started = time.perf_counter()
        self.buckets = [Bucket(rows, wide) for wide in (False, True)
                        for rows in row_counts(max(MAX_ROWS, max_length))]
        self.max_rows = self.buckets[-1].rows
        self.use_graphs = graph
        self._graphs: dict[Bucket, graphs.Graph] = {}
        self._ops: dict[Bucket, CudaOps] = {}
        with reported("the model cannot be opened on the GPU"):
            folder = disk.folder()
            self.gemm = Gemm(gpu, folder and folder / "gemm.json", tune)
            specs = weights.specs(config)
            self._tune(specs)
            self.weights = load(specs)
            self.model = weights.assemble(self.weights.held, config)
            self.buffers = Buffers(config, self.buckets, max_length)
            self.stream = device.Stream()
            self.host_metadata = device.pinned(max(b.size for b in self.buckets), np.int32)
            self.host_hidden = device.pinned((max(b.lasts for b in self.buckets), config.hidden_size), np.uint16)
            loaded = time.perf_counter()
            log(f"weights on the GPU in {loaded - started:.1f} s; preparing kernels")
            self._prepare()
        log(f"ready in {time.perf_counter() - started:.1f} s, {len(self._graphs)} graphs, "
            f"{device.peak_memory() / 1e9:.1f} GB of GPU memory")

    def _tune(self, specs) -> None:
        """Choose GEMM algorithms for the buckets that are captured at start-up, while the GPU's memory is still free."""
        ready = {n for b in self.buckets if not b.wide and b.rows <= self.ready_rows for n in (b.rows, b.lasts)}
        started, chosen = time.perf_counter(), 0
        for gated, names in ((False, weights.LINEAR), (True, weights.GATED)):
            shapes = dict.fromkeys(s.shape for s in specs if s.key.rsplit(".", 1)[-1] in names)
            chosen += self.gemm.prepare(shapes, sorted(ready), gated)
        if chosen:
            self.log(f"{chosen} GEMMs chosen in {time.perf_counter() - started:.1f} s")

    def _prepare(self) -> None:
        """Compile and run everything once, then capture the buckets that ordinary requests need."""
        started = time.perf_counter()
        pool = row_pool.build([np.zeros(1, np.int32)])
        ready = [b for b in self.buckets if not b.wide and b.rows <= self.ready_rows]
        for bucket in dict.fromkeys([self.buckets[0], *ready[-1:]]):     # few rows and many take different kernels
            self.upload(bucket, pool, pool.last_rows)
            self._launch(bucket)
        self.stream.synchronize()
        warm = time.perf_counter()
        for bucket in ready if self.use_graphs else ():
            self.graph(bucket)
        self.log(f"kernels ready in {warm - started:.1f} s, graphs of {len(self._graphs)} row buckets captured in "
                 f"{time.perf_counter() - warm:.1f} s")

    def ops(self, bucket: Bucket) -> CudaOps:
        """The operations bound to a bucket's buffers, with their plans."""
        if bucket not in self._ops:
            ops = CudaOps(self.config, self.gemm, self.buffers, bucket, self.stream)
            with ops.binding():
                forward(ops, self.model, None)
            self._ops[bucket] = ops
        return self._ops[bucket]

    def _launch(self, bucket: Bucket):
        """Every kernel of a forward pass into the stream; returns the buffer of hidden states."""
        return forward(self.ops(bucket), self.model, None)

    def graph(self, bucket: Bucket) -> graphs.Graph | None:
        """The captured forward of a bucket; None where capturing fails, and then it is launched eagerly."""
        if bucket not in self._graphs:
            ops = self.ops(bucket)
            try:
                self._graphs[bucket] = graphs.capture(self.stream, lambda: self._launch(bucket), keep=(ops,))
            except Exception as e:            # whatever it is, it concerns the capture alone if eager launches work
                self.log(f"no graph for {bucket.rows} rows, launching kernel by kernel: {type(e).__name__}: {e}")
                self._graphs[bucket] = None
        return self._graphs[bucket]

    def upload(self, bucket: Bucket, pool: RowPool, last_rows: np.ndarray) -> None:
        """Put the pool's metadata on the device, laid out for ``bucket``; last_rows: its distinct last rows."""
        used = bucket.pack(pool, last_rows, self.host_metadata)
        device.to_device(self.buffers.metadata_at, self.host_metadata[:used], self.stream)
        self.ops(bucket).clear(pool.n_rows)

    def hidden(self, sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        """BF16 (uint16) [n, hidden] of each sequence's last token, and the rows that were computed."""
        with reported("the forward pass failed on the GPU"):
            cuda.current_context()            # the calling thread may be new to CUDA
            return self._hidden(list(sequences))

    def _hidden(self, sequences: list[np.ndarray]) -> tuple[np.ndarray, int]:
        pool = row_pool.build(sequences)
        bucket = choose(pool, self.buckets)
        if bucket is None:
            return self._in_parts(sequences)
        self._check(pool)
        last_rows, where = pool.last_rows, [0]
        if len(sequences) > 1:
            last_rows, where = np.unique(pool.last_rows, return_inverse=True)
        self.upload(bucket, pool, last_rows)
        graph = self.graph(bucket) if self.use_graphs else None
        if graph is not None:
            graph.launch(self.stream)
        else:
            self._launch(bucket)
        out = self.host_hidden[:len(last_rows)]
        device.to_host(out, self.ops(bucket).hidden_at, self.stream)
        self.stream.synchronize()
        return out[where], pool.n_rows

    def bound(self, pool: RowPool) -> tuple[CudaOps, weights.Model, RowPool]:
        """See ``Backbone``. Raises BackendError for a pool that no bucket holds."""
        cuda.current_context()
        bucket = choose(pool, self.buckets)
        if bucket is None:
            raise BackendError(f"{pool.n_rows} rows in {len(pool.branches)} branches do not fit in one forward pass")
        self._check(pool)
        pool = replace(pool, last_rows=np.unique(pool.last_rows))
        self.upload(bucket, pool, pool.last_rows)
        return self.ops(bucket), self.model, pool

    def _check(self, pool: RowPool) -> None:
        """BackendError for indices past the end of a table: kernels trust them."""
        if pool.positions.max() >= self.max_length:
            raise BackendError(f"a sequence of {pool.positions.max() + 1} tokens is longer than {self.max_length}")
        if pool.ids.max() >= self.config.vocab_size:
            raise BackendError(f"token {pool.ids.max()} is not in the vocabulary of {self.config.vocab_size}")

    def _in_parts(self, sequences: list[np.ndarray]) -> tuple[np.ndarray, int]:
        """Two forwards where one would not hold everything, halved in sorted order so that prefixes stay together."""
        if len(sequences) == 1:
            raise BackendError(f"a sequence of {len(sequences[0])} tokens does not fit in {self.max_rows} rows")
        order = row_pool.sorted_order(sequences)
        out, rows = np.empty((len(sequences), self.config.hidden_size), np.uint16), 0
        for part in (order[:len(order) // 2], order[len(order) // 2:]):
            out[part], n = self._hidden([sequences[i] for i in part])
            rows += n
        return out, rows

    def close(self) -> None:
        """Wait for the GPU and free its memory."""
        cuda.current_context()
        try:
            self.stream.synchronize()
        except RuntimeError:                  # a kernel failed: the context is lost, its memory goes with the process
            return
        for graph in self._graphs.values():
            if graph is not None:
                graph.destroy()
        self._graphs.clear()
        self._ops.clear()
        self.buffers.arena.close()
        self.weights.arena.close()
