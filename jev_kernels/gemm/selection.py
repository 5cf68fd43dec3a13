"""BF16 GEMMs y = r(x W^T), float32 accumulation: which algorithm runs, and why its bits are safe.

The promise is that a row's result has the same bits whatever the number of rows it is computed with. A GEMM keeps it
when every algorithm that may run for a weight shape adds up in the same order. So for each shape there is a *reference
order*, and an algorithm is *admitted* for (shape, rows) only when it gives the reference's bits on random data:

  - Candidates are our own kernels (``narrow.py``, ``wide.py``) where they fit, and what cuBLASLt's
    heuristics propose without split-K (REDUCTION_SCHEME_MASK = 0, and SPLITK_NUM is looked at as well).
  - The reference order of a shape is that of the majority of the candidates at 128 rows. On H200 that is nearly all of
    them: one running sum over increasing k.
  - The reference result for more rows is the reference candidate run on blocks of 128 rows. Inputs have channels of
    very different size, as real activations do, so that another order shows in thousands of elements.

Among the admitted the fastest is taken, by timing once, remembered in a file; without timing the first. Whatever is
chosen, the bits are the same: tuning can change nothing but time. No candidate admitted is an error, never a fallback.

The MLP's first product has its activation behind it, y = r(r(silu(gate)) * up). It is chosen as a whole ("gated"): our
kernels apply it to their sums, after rounding them as a GEMM would; to cuBLASLt's algorithms ``silu.silu_mul`` is added.
What is compared is then the activation.

    gemm = Gemm(find_device(), cache="~/.cache/jev/gemm.json")
    plan = gemm.linear_plan(x, weight, y, rows=128)       # x [>= 128, K], weight [N, K], y [>= 128, N], uint16
    plan(stream, pdl=True)

Source: what was measured on H200 about the bits of cuBLASLt's algorithms, see ``recipe/open_jev/validation.md``.
"""
from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jev_kernels.gemm import narrow, wide
from jev_kernels.gemm.cublaslt import Algorithm, BlasPlan, CublasLt
from jev_kernels.gemm.problem import Key, check_rows, layout
from jev_kernels.gemm.trials import REFERENCE_ROWS, Trial
from jev_kernels.rowwise.silu import silu_mul
from jev_kernels.runtime import device, disk
from jev_kernels.runtime.device import DeviceError

VERSION = 2                    # of the candidates, the admission and the timing: part of the cache's key
MAX_CANDIDATES = 12
SMALL_BYTES = 8 << 20          # of a weight
OWN, WIDE = "own", "own:wide"  # our kernel for few rows, and for more


class NoAlgorithm(DeviceError):
    """No algorithm gives the reference's bits for a shape: answers would not be batch-invariant, so nothing is run."""


# ---------------------------------------------------------------- choices
@dataclass(frozen=True)
class Choice:
    """What runs for one (shape, rows): ``OWN``, ``WIDE`` or an algorithm as text; us a launch, None when it was not timed."""
    algorithm: str
    us: float | None = None
    differing: int = 0


def majority(groups: Sequence[int]) -> int:
    """The label that most have; among equals the one that comes first. groups: a label for each candidate."""
    if not groups:
        raise ValueError("no candidates")
    return max(dict.fromkeys(groups), key=list(groups).count)


def in_a_chain(name: str, us: float) -> float:
    """Our own kernels count 3 % less, 3 us at most: in a chain they start before the previous kernel has ended."""
    return us - min(0.03 * us, 3.0) if name.startswith(OWN) else us


def fastest(timed: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The choice among (algorithm, us), as they count ``in_a_chain``: the first of those within half a percent of the
    best, so that noise that small changes nothing."""
    if not timed:
        raise ValueError("nothing was timed")
    best = min(in_a_chain(*t) for t in timed)
    return next(t for t in timed if in_a_chain(*t) <= best * 1.005)


class TuningCache:
    """Choices in a JSON file, per key (GPU, driver, library, own version). A damaged file is ignored, with a warning.

    {key: {"checksum": ..., "choices": {"<N>x<K>[ gated]": {"reference": "own",
                                                            "<rows>/<strides>/<alignment>": [which, us]}}}}

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


# ---------------------------------------------------------------- the entry
class GatedBlasPlan:
    """y[:rows] = r(r(silu(gate)) * up) by cuBLASLt, through ``gate_up``, and ``silu_mul`` for the live rows."""

    def __init__(self, product: BlasPlan, gate_up, y, rows: int, counts):
        self.product, self.name, self.arguments = product, product.name, (gate_up[:rows], y[:rows], counts)

    def __call__(self, stream, pdl: bool = False) -> None:
        self.product(stream)
        silu_mul(stream, *self.arguments, pdl=pdl)


class Gemm:
    """All GEMMs of one GPU: admits, times, remembers, and binds plans.

    cache   file for the choices, or None
    tune    time the admitted candidates, except for small weights; otherwise the first admitted one is taken
    """

    def __init__(self, gpu: device.Device, cache=None, tune: bool = True):
        self.gpu, self.tune = gpu, tune
        self.blas = CublasLt()
        self.stream = device.Stream()
        self._scratch: wide.Scratch | None = None
        self.cache = TuningCache(cache, f"{gpu.name} | driver {gpu.driver_version} | cuBLASLt {self.blas.version} | "
                                        f"gemm {VERSION}")
        self._trial: Trial | None = None
        self._choices: dict[tuple, Choice] = {}

    def linear_plan(self, x, weight, y, rows: int):
        """A callable plan(stream, pdl=False) that computes y[:rows] = r(x[:rows] weight^T).

        x [>= rows, K], weight [N, K], y [>= rows, N]: uint16 device arrays, columns contiguous, rows at multiples of 16
        bytes (they may be slices of wider arrays). Keep the plan as long as graphs that captured it. Raises ValueError
        naming the argument, NoAlgorithm, OutOfMemory (a trial needs some weights and the activations once more).
        """
        key, alignment = layout(x, weight, y, rows)
        algorithm = self.choice(key, alignment).algorithm
        self.release()
        return self.bind(algorithm, x, weight, y, rows)

    def swiglu_plan(self, x, weight, gate_up, y, rows: int, counts):
        """A callable plan(stream, pdl=False) that computes y[:rows] = r(r(silu(gate)) * up) of x[:rows] weight^T.

        weight [N, K] and its product alternate between four of gate and four of up (see ``silu``); y [>= rows, N / 2].
        gate_up [>= rows, N] may be written, and its rows from counts[ROWS] on may be left out. Otherwise as
        ``linear_plan``.
        """
        key, alignment = layout(x, weight, gate_up, rows)
        check_rows("y", y)
        if y.shape[1] * 2 != key.n or y.shape[0] < rows:
            raise ValueError(f"y: {y.shape}, {rows} rows of {key.n} gates and ups give [{rows}, {key.n // 2}]")
        algorithm = self.choice(key._replace(gated=True), alignment).algorithm
        self.release()
        return self.bind_gated(algorithm, x, weight, gate_up, y, rows, counts)

    def bind(self, algorithm: str, x, weight, y, rows: int):
        """A plan for a given algorithm; see ``linear_plan``, which also checks its bits."""
        if algorithm.startswith(OWN):
            return self._own_plan(algorithm, x, weight, y, rows, gated=False)
        return BlasPlan(self.blas, Algorithm.parse(algorithm), x, weight, y, rows)

    def bind_gated(self, algorithm: str, x, weight, gate_up, y, rows: int, counts):
        """A plan for a given algorithm; see ``swiglu_plan``, which also checks its bits."""
        if algorithm.startswith(OWN):
            return self._own_plan(algorithm, x, weight, y, rows, gated=True)
        return GatedBlasPlan(self.bind(algorithm, x, weight, gate_up, rows), gate_up, y, rows, counts)

    def _own_plan(self, algorithm: str, x, weight, y, rows: int, gated: bool):
        if algorithm == OWN:
            return narrow.Plan(x, weight, y, rows, self.gpu.multiprocessors, gated)
        if self._scratch is None:
            self._scratch = wide.Scratch(self.stream)
        return wide.Plan(x, weight, y, rows, self._scratch, self.gpu.multiprocessors, gated)

    def prepare(self, shapes: Iterable[tuple[int, int]], rows: Sequence[int], gated: bool = False) -> int:
        """Admit and time weight shapes (N, K) at numbers of rows ahead of ``linear_plan``, or of ``swiglu_plan`` if
        gated, for contiguous arrays.

        Returns how many were not remembered from an earlier run.
        """
        new = 0
        for n, k in shapes:
            for m in sorted(rows, reverse=True):                  # the largest first: its trial serves the others
                key = Key(m, n, k, k, k, n, gated)
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

    def choice(self, key: Key, alignment: int = 256) -> Choice:
        """The algorithm for a product: remembered, or admitted and timed now. Raises NoAlgorithm."""
        known = self._choices.get((key, alignment))            # every layer asks
        if known is None:
            known = self._remembered(key, alignment)
            if known is None:
                known = self._choose(key, alignment)
                self.cache.save()
            self._choices[key, alignment] = known
        return known

    @staticmethod
    def _shape(n: int, k: int, gated: bool) -> str:
        return f"{n}x{k}{' gated' if gated else ''}"

    @classmethod
    def _entry(cls, key: Key, alignment: int) -> tuple[str, str]:
        entry = "/".join(map(str, (key.m, key.ldx, key.ldw, key.ldy, alignment)))
        return cls._shape(key.n, key.k, key.gated), entry

    def _remembered(self, key: Key, alignment: int) -> Choice | None:
        kept = self.cache.get(*self._entry(key, alignment))
        if kept is not None and (kept[1] is not None or not self._timed(key)) and self._usable(key, kept[0]):
            return Choice(*kept)
        return None

    def _choose(self, key: Key, alignment: int) -> Choice:
        shape, entry = self._entry(key, alignment)
        admitted = (c for c in self._admissions(key, alignment) if c.differing == 0)
        chosen = next(admitted, None)
        if chosen is None:
            raise NoAlgorithm(f"GEMM {key.n} x {key.k} at {key.m} rows: no algorithm gives the bits of the reference "
                              f"({self.cache.get(shape, 'reference')}); cuBLASLt {self.blas.version}, {self.gpu}")
        if self._timed(key):
            times = self.measure(key, [chosen.algorithm, *(c.algorithm for c in admitted)])
            chosen = Choice(*fastest(list(times.items())))
        self.cache.put(shape, entry, [chosen.algorithm, chosen.us and round(chosen.us, 2)])
        return chosen

    def _timed(self, key: Key) -> bool:
        """Whether algorithms are timed: not for weights of models so small that nobody waits for them."""
        return self.tune and 2 * key.n * key.k >= SMALL_BYTES

    def _usable(self, key: Key, algorithm: str) -> bool:
        try:
            return self._own(key, algorithm) if algorithm.startswith(OWN) else self.blas.runs(
                key, Algorithm.parse(algorithm))
        except ValueError:
            return False

    def _own(self, key: Key, algorithm: str) -> bool:
        (m, n, k, *_), gpu = key, (self.gpu.compute_capability, self.gpu.multiprocessors)
        if key.gated and key.n % 16:                              # rows of y must start at multiples of 16 bytes
            return False
        if algorithm == WIDE:
            return m > narrow.MAX_ROWS and wide.refusal(m, n, k, *gpu) is None
        return algorithm == OWN and narrow.refusal(m, n, k, *gpu) is None

    def candidates(self, key: Key, alignment: int = 256) -> list[str]:
        """Our kernel for few rows, cuBLASLt's proposals without split-K for these rows, those for other rows that run,
        our kernel for more rows."""
        found = dict.fromkeys([OWN] if self._own(key, OWN) else [])
        for rows in dict.fromkeys((key.m, 128, 256, 512, 1024, 2048)):
            for algorithm in self.blas.heuristics(key._replace(m=rows), alignment):
                if algorithm.split_k <= 1 and len(found) < MAX_CANDIDATES and str(algorithm) not in found and (
                        rows == key.m or self.blas.runs(key, algorithm)):
                    found[str(algorithm)] = None
        return list(found) + ([WIDE] if self._own(key, WIDE) else [])

    def trial(self, key: Key) -> Trial:
        """Random data for a weight shape and at least the key's rows; one at a time is kept."""
        trial, rows = self._trial, max(key.m, REFERENCE_ROWS)
        if trial is None or (trial.n, trial.k, trial.gated) != (key.n, key.k, key.gated) or trial.rows < rows:
            self.release()
            self._trial = Trial(key.n, key.k, key.gated, rows, self.gpu.l2_bytes, self.stream)
        return self._trial

    def reference(self, n: int, k: int, gated: bool = False) -> str:
        """The candidate whose order of addition is the shape's: one of the majority at ``REFERENCE_ROWS`` rows."""
        shape, key = self._shape(n, k, gated), Key(REFERENCE_ROWS, n, k, k, k, n, gated)
        kept = self.cache.get(shape, "reference")
        if kept is None or not self._usable(key, kept):
            trial = self.trial(key)
            names, labels, results = [], [], []       # results: one array for each pattern of bits met so far
            for name in self.candidates(key):
                plan = self._try(name, trial, REFERENCE_ROWS)
                if plan is None:
                    continue
                label = next((i for i, seen in enumerate(results)
                              if trial.differences(plan, REFERENCE_ROWS, seen) == 0), len(results))
                if label == len(results):
                    plan(trial.stream)
                    width = trial.y.shape[1]
                    results.append(device.Arena(2 * REFERENCE_ROWS * width, "comparing GEMMs").take((REFERENCE_ROWS, width)))
                    device.copy(results[-1], trial.y[:REFERENCE_ROWS], trial.stream)
                names.append(name)
                labels.append(label)
            if not names:
                raise NoAlgorithm(f"GEMM {n} x {k}: neither our kernel nor cuBLASLt {self.blas.version} runs it")
            kept = names[labels.index(majority(labels))]
            self.cache.put(shape, "reference", kept)
        return kept

    def on_trial(self, name: str, trial: Trial, rows: int, at: int = 0, weight: int = 0, y=None):
        """A plan over the trial's rows from ``at`` on, into its y unless another is given."""
        x, w, y = trial.x[at:], trial.weights[weight], trial.y if y is None else y
        if trial.gated:
            return self.bind_gated(name, x, w, trial.gate_up, y, rows, trial.counts(rows))
        return self.bind(name, x, w, y, rows)

    def _try(self, name: str, trial: Trial, rows: int):
        """A plan over the trial's data that has run once, or None where the library refuses."""
        try:
            plan = self.on_trial(name, trial, rows)
            plan(self.stream)
        except self.blas.lt.cuBLASLtError:
            return None
        return plan

    def admit(self, key: Key, alignment: int = 256, candidates: Sequence[str] | None = None) -> list[Choice]:
        """Run candidates (default: all) at these rows and count where they differ from the reference order.

        ``differing`` == 0 is admitted. Few rows are tried at four places of the data: each row is little evidence.
        """
        return list(self._admissions(key, alignment, candidates))

    def _admissions(self, key: Key, alignment: int, candidates: Sequence[str] | None = None) -> Iterator[Choice]:
        m, trial = key.m, self.trial(key)
        reference = self.reference(key.n, key.k, key.gated)
        while trial.referenced < m:
            at = trial.referenced
            self.on_trial(reference, trial, REFERENCE_ROWS, at, y=trial.reference[at:at + REFERENCE_ROWS])(self.stream)
            trial.referenced += REFERENCE_ROWS
        places = range(0, min(4 * m, REFERENCE_ROWS - m + 1), m) if m < REFERENCE_ROWS // 2 else (0,)
        for name in self.candidates(key, alignment) if candidates is None else candidates:
            if self._try(name, trial, m) is not None:
                plans = [(at, self.on_trial(name, trial, m, at)) for at in places]
                yield Choice(name, differing=sum(trial.differences(plan, m, trial.reference[at:]) for at, plan in plans))

    def measure(self, key: Key, algorithms: Sequence[str]) -> dict[str, float]:
        """us a launch of each algorithm at these rows: weights from memory, inside a graph, with PDL where known."""
        trial = self.trial(key)
        return trial.time({name: [self.on_trial(name, trial, key.m, weight=i) for i in range(len(trial.weights))]
                           for name in algorithms}, key.m)
