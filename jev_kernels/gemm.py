"""BF16 GEMMs y = r(x W^T), float32 accumulation: which algorithm runs, and why its bits are safe.

The promise is that a row's result has the same bits whatever the number of rows it is computed with. A GEMM keeps it
when every algorithm that may run for a weight shape adds up in the same order. So for each shape there is a *reference
order*, and an algorithm is *admitted* for (shape, rows) only when it gives the reference's bits on random data:

  - Candidates are our own kernels (``hopper_gemm.py``, ``hopper_gemm_wide.py``) where they fit, and what cuBLASLt's
    heuristics propose without split-K (REDUCTION_SCHEME_MASK = 0, and SPLITK_NUM is looked at as well).
  - The reference order of a shape is that of the majority of the candidates at 128 rows. On H200 that is nearly all of
    them: one running sum over increasing k.
  - The reference result for more rows is the reference candidate run on blocks of 128 rows. Inputs have channels of
    very different size, as real activations do, so that another order shows in thousands of elements.

Among the admitted the fastest is taken, by timing once, remembered in a file; without timing the first. Whatever is
chosen, the bits are the same: tuning can change nothing but time. No candidate admitted is an error, never a fallback.

    gemm = Gemm(find_device(), cache="~/.cache/jev/gemm.json")
    plan = gemm.linear_plan(x, weight, y, rows=128)       # x [>= 128, K], weight [N, K], y [>= 128, N], uint16
    plan(stream, pdl=True)

Source: what was measured on H200 about the bits of cuBLASLt's algorithms, see ``recipe/open_jev/validation.md``.
"""
from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels import device, disk, hopper_gemm, hopper_gemm_wide
from jev_kernels.cublaslt import Algorithm, BlasPlan, CublasLt, layout
from jev_kernels.device import DeviceError
from jev_kernels.graph import capture
from jev_kernels.launch import Kernel
from jev_kernels.ptx import pack

VERSION = 1                    # of the candidates, the admission and the timing: part of the cache's key
REFERENCE_ROWS = 128           # rows at which the reference order is chosen, and of the blocks that apply it
MAX_CANDIDATES = 12
OWN, WIDE = "own", "own:wide"  # our kernel for few rows, and for more
WIDE_ROWS = 4096               # above, nothing is left to even out


class NoAlgorithm(DeviceError):
    """No algorithm gives the reference's bits for a shape: answers could depend on company, so nothing is run."""


# ---------------------------------------------------------------- random data and comparison
@cuda.jit(device=True, inline="always")
def hashed_normal(index, seed):
    """float32, near-normal, from the bytes of a 32-bit mix (MurmurHash3's finalizer) of index and seed."""
    h = types.uint32(index ^ types.uint32(seed * types.uint32(0x9E3779B9)))
    h = types.uint32(types.uint32(h ^ (h >> types.uint32(16))) * types.uint32(0x85EBCA6B))
    h = types.uint32(types.uint32(h ^ (h >> types.uint32(13))) * types.uint32(0xC2B2AE35))
    h = types.uint32(h ^ (h >> types.uint32(16)))
    total = (h & types.uint32(255)) + ((h >> types.uint32(8)) & types.uint32(255)) + (
        (h >> types.uint32(16)) & types.uint32(255)) + (h >> types.uint32(24))
    return (types.float32(total) - types.float32(510.0)) * types.float32(1 / 147.8)


def random_bf16(out, seed, spread):
    """out [rows, cols] uint16: BF16 near-normal numbers (four added bytes) of variance 1, times exp(spread z) with a z
    per column. A function of (seed, row, column) alone."""
    rows, cols = out.shape
    first = cuda.grid(1)
    for i in range(first, rows * cols, cuda.gridsize(1)):
        row = i // cols
        col = i - row * cols
        value = hashed_normal(types.uint32(i), types.uint32(seed))
        scale = cuda.libdevice.expf(spread * hashed_normal(types.uint32(col), types.uint32(seed + 1)))
        out[row, col] = types.uint16(pack(value * scale, types.float32(0)) & types.uint32(0xFFFF))


def count_different(a, b, found):
    """found[0] += the number of elements in which a and b, uint16 [rows, cols], differ."""
    rows, cols = a.shape
    wrong = 0
    for i in range(cuda.grid(1), rows * cols, cuda.gridsize(1)):
        row = i // cols
        col = i - row * cols
        if a[row, col] != b[row, col]:
            wrong += 1
    if wrong:
        cuda.atomic.add(found, 0, wrong)


_MATRIX = types.Array(types.uint16, 2, "A")
RANDOM = Kernel(random_bf16, types.void(_MATRIX, types.int32, types.float32), threads=256)
DIFFERENT = Kernel(count_different, types.void(_MATRIX, _MATRIX, types.Array(types.int32, 1, "C")), threads=256)
FILL_BLOCKS = 132 * 8


def kernels() -> dict:
    """The two helpers for the resource budget: {name: (Kernel, [cc], registers, spilled bytes)}."""
    return {k.name: (k, [(8, 0), (9, 0, "a")], 64, 0) for k in (RANDOM, DIFFERENT)}


# ---------------------------------------------------------------- choices
@dataclass(frozen=True)
class Choice:
    """What runs for one (shape, rows): ``OWN`` or an algorithm as text; us a launch, None when it was not timed."""
    algorithm: str
    us: float | None = None
    differing: int = 0


def majority(groups: Sequence[int]) -> int:
    """The label that most have; among equals the one that comes first. groups: a label for each candidate."""
    if not groups:
        raise ValueError("no candidates")
    return max(dict.fromkeys(groups), key=list(groups).count)


def fastest(timed: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The choice among (algorithm, us): the first of those within half a percent of the best, so that noise that small
    changes nothing. Our own kernels count 3 % less: in a chain they start before the previous kernel has ended."""
    if not timed:
        raise ValueError("nothing was timed")
    handicap = [us * 0.97 if name.startswith(OWN) else us for name, us in timed]
    best = min(handicap)
    return next(t for t, h in zip(timed, handicap) if h <= best * 1.005)


class TuningCache:
    """Choices in a JSON file, per key (GPU, driver, library, own version). A damaged file is ignored, with a warning.

    {key: {"checksum": ..., "choices": {"<N>x<K>": {"reference": "own", "<rows>/<strides>/<alignment>": [which, us]}}}}

    path None: memory only. Writes are atomic, and keep what other processes wrote meanwhile under other keys.
    """

    def __init__(self, path, key: str):
        self.path, self.key = (Path(path).expanduser() if path else None), key
        self.choices: dict[str, dict] = {}
        entry = self._read().get(key)
        if entry is not None:
            choices = entry.get("choices") if isinstance(entry, dict) else None
            if not isinstance(choices, dict) or entry.get("checksum") != _checksum(choices):
                warnings.warn(f"{self.path}: the GEMM tuning for {key} is damaged and is measured again", stacklevel=2)
            else:
                self.choices = choices

    def _read(self) -> dict:
        if self.path is None or not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text())
            if not isinstance(content, dict):
                raise ValueError("not an object")
            return content
        except (OSError, ValueError) as e:
            warnings.warn(f"{self.path}: the GEMM tuning cannot be read ({e}) and is measured again", stacklevel=3)
            return {}

    def get(self, shape: str, entry: str):
        """What was put, or None."""
        return self.choices.get(shape, {}).get(entry)

    def put(self, shape: str, entry: str, value) -> None:
        self.choices.setdefault(shape, {})[entry] = value

    def save(self) -> None:
        """Write the file. Failing to is a warning: the choices of this run stand."""
        if self.path is None:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                content = self._read()
            content[self.key] = {"checksum": _checksum(self.choices), "choices": self.choices}
            disk.write(self.path, json.dumps(content, indent=1, sort_keys=True).encode())
        except OSError as e:
            warnings.warn(f"{self.path}: the GEMM tuning cannot be kept ({e})", stacklevel=2)


def _checksum(choices: dict) -> str:
    return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- trials
class Trial:
    """Random data of one weight shape for up to ``rows`` rows, on the device: what admission and timing run on.

    weights   copies that together exceed the L2 cache several times, so that timing reads them from memory
    x         [rows, K]; reference, y [rows, N], with rows rounded up to whole reference blocks
    """

    def __init__(self, n: int, k: int, rows: int, l2_bytes: int, stream):
        self.n, self.k, self.stream = n, k, stream
        self.rows = rows = -(-rows // REFERENCE_ROWS) * REFERENCE_ROWS
        copies = max(1, -(-4 * l2_bytes // (2 * n * k)))
        sizes = [(n, k)] * copies + [(rows, k), (rows, n), (rows, n)]
        self.arena = device.Arena(sum(map(device.array_bytes, sizes)) + 256, f"tuning GEMMs of {n} x {k}")
        *self.weights, self.x, self.reference, self.y = (self.arena.take(s) for s in sizes)
        self.found = self.arena.take(1, np.int32)
        self.referenced = 0                       # rows of ``reference`` that are there
        for seed, w in enumerate(self.weights):
            RANDOM(stream, FILL_BLOCKS, w, 2 * seed + 11, 0.0)
        RANDOM(stream, FILL_BLOCKS, self.x, 1, 2.0)

    def differences(self, plan: Callable, rows: int, reference=None) -> int:
        """Elements in which ``plan``, bound to y's first rows, differs from the reference; y is poisoned before."""
        reference = self.reference if reference is None else reference
        device.fill(self.y[:rows], 0x7FC1, self.stream)
        device.fill(self.found, 0, self.stream)
        plan(self.stream)
        DIFFERENT(self.stream, FILL_BLOCKS, self.y[:rows], reference[:rows], self.found)
        self.stream.synchronize()
        return int(self.found.copy_to_host()[0])

    def time(self, plans: dict[str, Sequence[Callable]], rows: int, repeats: int = 3) -> dict[str, float]:
        """us a launch for each name: the median of ``repeats`` replays of a graph that goes round the weights.

        Names take turns, so that heat and clocks are shared evenly.
        """
        launches = len(self.weights) * max(1, (8 if rows <= 512 else 4 if rows <= 1024 else 2) // len(self.weights))
        graphs = {}
        for name, bound in plans.items():
            def launch_all(bound=bound):
                for i in range(launches):
                    bound[i % len(bound)](self.stream, pdl=True)
            graphs[name] = capture(self.stream, launch_all, keep=tuple(bound))
        times: dict[str, list[float]] = {name: [] for name in plans}
        for turn in range(repeats + 1):           # the first is warm-up
            for name, graph in graphs.items():
                start = device.Event().record(self.stream)
                graph.launch(self.stream)
                end = device.Event().record(self.stream)
                end.synchronize()
                if turn:
                    times[name].append(start.milliseconds_to(end) * 1e3 / launches)
        for graph in graphs.values():
            graph.destroy()
        return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


# ---------------------------------------------------------------- the entry
class Gemm:
    """All GEMMs of one GPU: admits, times, remembers, and binds plans.

    cache   file for the choices, or None
    tune    time the admitted candidates; otherwise the first admitted one is taken
    """

    def __init__(self, gpu: device.Device, cache=None, tune: bool = True):
        self.gpu, self.tune = gpu, tune
        self.blas = CublasLt()
        self.stream = device.Stream()
        self._scratch: hopper_gemm_wide.Scratch | None = None
        self.cache = TuningCache(cache, f"{gpu.name} | driver {gpu.driver_version} | cuBLASLt {self.blas.version} | "
                                        f"gemm {VERSION}")
        self._trial: Trial | None = None
        self._choices: dict[tuple, Choice] = {}

    def linear_plan(self, x, weight, y, rows: int):
        """A callable plan(stream, pdl=False) that computes y[:rows] = r(x[:rows] weight^T).

        x [>= rows, K], weight [N, K], y [>= rows, N]: uint16 device arrays, columns contiguous, rows at multiples of 16
        bytes (they may be slices of wider arrays). Keep the plan as long as graphs that captured it. Raises ValueError
        naming the argument, NoAlgorithm, OutOfMemory (a trial needs one to four weights and the activations once more).
        """
        key, alignment = layout(x, weight, y, rows)
        algorithm = self.choice(key, alignment).algorithm
        self.release()
        return self.bind(algorithm, x, weight, y, rows)

    def bind(self, algorithm: str, x, weight, y, rows: int):
        """A plan for a given algorithm; see ``linear_plan``, which also checks its bits."""
        if algorithm == OWN:
            return hopper_gemm.Plan(x, weight, y, rows, self.gpu.multiprocessors)
        if algorithm == WIDE:
            if self._scratch is None:
                self._scratch = hopper_gemm_wide.Scratch(self.stream)
            return hopper_gemm_wide.Plan(x, weight, y, rows, self._scratch, self.gpu.multiprocessors)
        return BlasPlan(self.blas, Algorithm.parse(algorithm), x, weight, y, rows)

    def prepare(self, shapes: Iterable[tuple[int, int]], rows: Sequence[int]) -> int:
        """Admit and time weight shapes (N, K) at numbers of rows ahead of ``linear_plan``, for contiguous arrays.

        Returns how many were not remembered from an earlier run.
        """
        new = 0
        for n, k in shapes:
            for m in sorted(rows, reverse=True):                  # the largest first: its trial serves the others
                key = (m, n, k, k, k, n)
                if self._remembered(key, 256) is None:
                    self._choose(key, 256)
                    new += 1
            self.release()
            if new:
                self.cache.save()
        return new

    def release(self) -> None:
        """Free the memory of the last trial."""
        if self._trial is not None:
            self._trial.arena.close()
            self._trial = None

    def choice(self, key: tuple, alignment: int = 256) -> Choice:
        """The algorithm for (m, n, k, ldx, ldw, ldy): remembered, or admitted and timed now. Raises NoAlgorithm."""
        known = self._choices.get((key, alignment))            # every layer asks
        if known is None:
            known = self._remembered(key, alignment)
            if known is None:
                known = self._choose(key, alignment)
                self.cache.save()
            self._choices[key, alignment] = known
        return known

    @staticmethod
    def _entry(key: tuple, alignment: int) -> tuple[str, str]:
        m, n, k, ldx, ldw, ldy = key
        return f"{n}x{k}", "/".join(map(str, (m, ldx, ldw, ldy, alignment)))

    def _remembered(self, key: tuple, alignment: int) -> Choice | None:
        kept = self.cache.get(*self._entry(key, alignment))
        if kept is not None and (kept[1] is not None or not self.tune) and self._usable(key, kept[0]):
            return Choice(*kept)
        return None

    def _choose(self, key: tuple, alignment: int) -> Choice:
        m, n, k, *_ = key
        shape, entry = self._entry(key, alignment)
        admitted = [c for c in self.admit(key, alignment) if c.differing == 0]
        if not admitted:
            raise NoAlgorithm(f"GEMM {n} x {k} at {m} rows: no algorithm gives the bits of the reference "
                              f"({self.cache.get(shape, 'reference')}); cuBLASLt {self.blas.version}, {self.gpu}")
        chosen = admitted[0]
        if self.tune:
            times = self.measure(key, [c.algorithm for c in admitted])
            chosen = Choice(*fastest(list(times.items())))
        self.cache.put(shape, entry, [chosen.algorithm, chosen.us and round(chosen.us, 2)])
        return chosen

    def _usable(self, key: tuple, algorithm: str) -> bool:
        try:
            return self._own(key, algorithm) if algorithm.startswith(OWN) else self.blas.runs(
                key, Algorithm.parse(algorithm))
        except ValueError:
            return False

    def _own(self, key: tuple, algorithm: str) -> bool:
        (m, n, k, *_), gpu = key, (self.gpu.compute_capability, self.gpu.multiprocessors)
        if algorithm == WIDE:
            return hopper_gemm.MAX_ROWS < m <= WIDE_ROWS and hopper_gemm_wide.refusal(m, n, k, *gpu) is None
        return algorithm == OWN and hopper_gemm.refusal(m, n, k, *gpu) is None

    def candidates(self, key: tuple, alignment: int = 256) -> list[str]:
        """Our kernel for few rows, cuBLASLt's proposals without split-K for these rows, those for other rows that run,
        our kernel for more rows."""
        m, n, k, *rest = key
        found = dict.fromkeys([OWN] if self._own(key, OWN) else [])
        for rows in dict.fromkeys((m, 128, 256, 512, 1024, 2048)):
            for algorithm in self.blas.heuristics((rows, n, k, *rest), alignment):
                if algorithm.split_k <= 1 and len(found) < MAX_CANDIDATES and str(algorithm) not in found and (
                        rows == m or self.blas.runs(key, algorithm)):
                    found[str(algorithm)] = None
        return list(found) + ([WIDE] if self._own(key, WIDE) else [])

    def trial(self, n: int, k: int, rows: int) -> Trial:
        """Random data for a shape and at least ``rows`` rows; one at a time is kept."""
        trial = self._trial
        if trial is None or (trial.n, trial.k) != (n, k) or trial.rows < rows:
            self.release()
            self._trial = Trial(n, k, rows, self.gpu.l2_bytes, self.stream)
        return self._trial

    def reference(self, n: int, k: int) -> str:
        """The candidate whose order of addition is the shape's: one of the majority at ``REFERENCE_ROWS`` rows."""
        shape, key = f"{n}x{k}", (REFERENCE_ROWS, n, k, k, k, n)
        kept = self.cache.get(shape, "reference")
        if kept is None or not self._usable(key, kept):
            trial = self.trial(n, k, REFERENCE_ROWS)
            names, labels, results = [], [], []       # results: one array for each pattern of bits met so far
            for name in self.candidates(key):
                plan = self._try(name, trial, REFERENCE_ROWS)
                if plan is None:
                    continue
                label = next((i for i, seen in enumerate(results)
                              if trial.differences(plan, REFERENCE_ROWS, seen) == 0), len(results))
                if label == len(results):
                    plan(trial.stream)
                    results.append(device.Arena(2 * REFERENCE_ROWS * n, "comparing GEMMs").take((REFERENCE_ROWS, n)))
                    device.copy(results[-1], trial.y[:REFERENCE_ROWS], trial.stream)
                names.append(name)
                labels.append(label)
            if not names:
                raise NoAlgorithm(f"GEMM {n} x {k}: neither our kernel nor cuBLASLt {self.blas.version} runs it")
            kept = names[labels.index(majority(labels))]
            self.cache.put(shape, "reference", kept)
        return kept

    def _try(self, name: str, trial: Trial, rows: int):
        """A plan over the trial's data that has run once, or None where the library refuses."""
        try:
            plan = self.bind(name, trial.x, trial.weights[0], trial.y, rows)
            plan(self.stream)
        except self.blas.lt.cuBLASLtError:
            return None
        return plan

    def admit(self, key: tuple, alignment: int = 256, candidates: Sequence[str] | None = None) -> list[Choice]:
        """Run candidates (default: all) at these rows and count where they differ from the reference order.

        ``differing`` == 0 is admitted. Few rows are tried at four places of the data: each row is little evidence.
        """
        m, n, k, *_ = key
        trial = self.trial(n, k, max(m, REFERENCE_ROWS))
        reference = self.reference(n, k)
        while trial.referenced < m:
            block = slice(trial.referenced, trial.referenced + REFERENCE_ROWS)
            self.bind(reference, trial.x[block], trial.weights[0], trial.reference[block], REFERENCE_ROWS)(self.stream)
            trial.referenced = block.stop
        places = range(0, min(4 * m, REFERENCE_ROWS - m + 1), m) if m < REFERENCE_ROWS // 2 else (0,)
        found = []
        for name in self.candidates(key, alignment) if candidates is None else candidates:
            if self._try(name, trial, m) is not None:
                plans = [(at, self.bind(name, trial.x[at:], trial.weights[0], trial.y, m)) for at in places]
                found.append(Choice(name, differing=sum(trial.differences(plan, m, trial.reference[at:])
                                                        for at, plan in plans)))
        return found

    def measure(self, key: tuple, algorithms: Sequence[str]) -> dict[str, float]:
        """us a launch of each algorithm at these rows: weights from memory, inside a graph, with PDL where known."""
        m, n, k, *_ = key
        trial = self.trial(n, k, max(m, REFERENCE_ROWS))
        return trial.time({name: [self.bind(name, trial.x, w, trial.y, m) for w in trial.weights]
                           for name in algorithms}, m)
