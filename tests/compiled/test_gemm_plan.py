"""What the GEMMs decide before a GPU is asked: configurations, tensor maps, choices and where they are kept."""
from __future__ import annotations

import json
import re
import warnings

import numpy as np
import pytest
from numba import cuda
from numba.cuda.core import config

if config.ENABLE_CUDASIM:
    pytest.skip("no kernel runs here: not under NUMBA_ENABLE_CUDASIM", allow_module_level=True)

from jev.model import weights  # noqa: E402
from jev_kernels.gemm import (
    narrow,  # noqa: E402
    selection as gemm,  # noqa: E402
    wide,  # noqa: E402
)
from jev_kernels.gemm.cublaslt import Algorithm  # noqa: E402
from jev_kernels.gemm.problem import Key, layout  # noqa: E402
from jev_kernels.runtime import (
    device,  # noqa: E402
    tensor_maps,  # noqa: E402
)

SHAPES = [(16480, 5120), (14336, 5120), (5120, 6144), (34816, 5120), (5120, 17408),              # 27B
          (12352, 4096), (10240, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]              # 9B


class Fake:
    """A device array as far as the checks look at one."""

    def __init__(self, rows, cols, stride=None, dtype=np.uint16, at=4096):
        self.shape, self.dtype, self.ndim = (rows, cols), np.dtype(dtype), 2
        self.strides = ((stride or cols) * 2, 2)
        self.__cuda_array_interface__ = {"data": (at, False), "shape": self.shape, "strides": self.strides}


# ---------------------------------------------------------------- our kernel's configurations
@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("m", [1, 7, 8, 63, 64, 65, 107, 127, 128])
@pytest.mark.parametrize("multiprocessors", [114, 132])
def test_configuration_covers_the_product(n, k, m, multiprocessors):
    assert narrow.refusal(m, n, k, multiprocessors=multiprocessors) is None
    c = narrow.choose(n, multiprocessors)
    assert c.smem <= narrow.SMEM_LIMIT and c.stages >= 3
    assert k % (64 * c.slices) == 0
    assert c.bn % 8 == 0 and (c.w_rows * 128) % 1024 == 0                  # parts of a tile start at swizzle atoms
    assert c.w_rows % c.w_box == 0 and c.w_box <= 256
    x_rows = c.x_rows(m)
    assert x_rows % 8 == 0 and x_rows <= 256
    assert m <= c.cluster * x_rows and x_rows <= c.groups * 64
    slabs = c.grid(n) // (c.cluster if c.split else 1)
    assert slabs * c.bn >= n
    assert c.grid(n) <= multiprocessors and c.grid(n) % c.cluster == 0     # one block a multiprocessor


@pytest.mark.parametrize("m,n,k,words", [
    (129, 5120, 5120, "rows"), (0, 5120, 5120, "rows"), (64, 5124, 5120, "multiple of 8"), (64, 5120, 5152, "multiple"),
    (64, 200000, 5120, "weight rows"), (64, 4, 5120, "multiple of 8")])
def test_refusals_say_why(m, n, k, words):
    assert words in narrow.refusal(m, n, k)


def test_other_gpus_are_refused():
    assert "9.0" in narrow.refusal(64, 5120, 5120, (8, 0))
    assert "9.0" in narrow.refusal(64, 5120, 5120, (10, 0))


@pytest.mark.parametrize("m", [129, 200, 256, 257, 320, 512, 700, 1024, 4096])
def test_wide_configuration(m):
    for n, k in SHAPES:
        assert wide.refusal(m, n, k) is None
        c = wide.choose(m)
        assert c.smem <= narrow.SMEM_LIMIT and c.stages >= 4 and c.tokens % 16 == 0
        assert 128 <= c.tokens <= wide.MAX_TOKENS and c.tokens * -(-m // c.tokens) < max(1.2 * m, 144)
        assert c.grid(m, n) <= 132 and c.grid(m, n) % 2 == 0
        gated = wide.choose(m, gated=True)
        assert gated.tokens == c.tokens and gated.smem <= narrow.SMEM_LIMIT and gated.stages >= c.stages
    assert "multiple of 8" in wide.refusal(m, 5120, 96)
    assert "9.0" in wide.refusal(m, 5120, 64, (8, 0))


@pytest.mark.parametrize("tiles,steps,clusters", [(136, 80, 66), (91, 80, 66), (65, 80, 65), (66, 272, 66),
                                                  (67, 272, 66), (1, 1, 1), (131, 3, 66), (700, 1, 66),
                                                  (132, 80, 66), (1224, 80, 66), (133, 272, 66)])
def test_wide_ranges_do_every_step_once_and_never_wait(tiles, steps, clusters):
    done, when, waits = set(), {}, []
    for cluster in range(clusters):
        clock = 0
        parts = wide.work_tiles(tiles, steps, cluster, clusters)
        rounds = tiles // clusters - (tiles % clusters > 0)
        assert parts[:rounds] == [(cluster + i * clusters, 0, steps) for i in range(rounds)]
        assert tiles // clusters - 1 <= sum(end - first for _, first, end in parts) / steps <= tiles / clusters + 1
        for i, (tile, first, end) in enumerate(parts):
            assert 0 <= first < end <= steps
            assert end - first >= min(steps, wide.MIN_STEPS)
            if first:                                                     # goes on from sums of the cluster before
                assert i == len(parts) - 1
                waits.append((tile, first, cluster, clock))
            clock += end - first
            if end < steps:                                               # leaves sums to the cluster after
                assert all(p[1:] == (0, steps) for p in parts[:i])
                when[tile, end] = cluster, clock
            for k in range(first, end):
                assert (tile, k) not in done
                done.add((tile, k))
    assert len(done) == tiles * steps and len(waits) == len(when)
    for tile, first, cluster, clock in waits:
        before, ready = when[tile, first]
        assert before == cluster - 1 and ready <= clock


@pytest.mark.parametrize("pairs,columns", [(68, 1), (68, 8), (20, 9), (3, 25), (1, 1), (65, 16)])
def test_wide_places_cover_the_product_in_bands(pairs, columns):
    places = [wide.tile_coordinates(tile, pairs, columns) for tile in range(pairs * columns)]
    assert set(places) == {(pair, column) for pair in range(pairs) for column in range(columns)}
    band = min(columns, wide.BAND)
    for at in range(0, band * pairs - 65, 66):                # a round reads little x and little W
        some = places[at:at + 66]
        assert len({c for _, c in some}) == band and len({p for p, _ in some}) <= 66 // band + 2


def test_tensor_map_dimensions():
    assert tensor_maps.matrix_dimensions(107, 5120, 5120, 56) == ((5120, 107), (10240,), (64, 56))
    assert tensor_maps.matrix_dimensions(107, 5120, 16480, 256)[1] == (32960,)                   # a slice of wider rows
    assert tensor_maps.matrix_dimensions(107, 5120, 5120, 56, 32) == ((5120, 107), (10240,), (32, 56))
    for rows, cols, stride, box in ((8, 64, 64, 12), (8, 64, 64, 264), (8, 64, 64, 0), (8, 64, 56, 8), (8, 64, 68, 8)):
        with pytest.raises(ValueError):
            tensor_maps.matrix_dimensions(rows, cols, stride, box)


# ---------------------------------------------------------------- what linear_plan refuses
def test_layout_of_slices():
    key, alignment = layout(Fake(256, 5120, 16480), Fake(640, 5120), Fake(128, 640, 1280, at=4096 + 32), 107)
    assert key == Key(107, 640, 5120, 16480, 5120, 1280) and alignment == 16
    assert layout(Fake(256, 64), Fake(8, 64), Fake(256, 8), 256)[1] == 256


@pytest.mark.parametrize("x,weight,y,rows,words", [
    (Fake(128, 64, dtype=np.int16), Fake(8, 64), Fake(128, 8), 128, "x: BF16"),
    (Fake(128, 72), Fake(8, 64), Fake(128, 8), 128, "x: 72 columns"),
    (Fake(128, 64), Fake(8, 64), Fake(128, 16), 128, "y: 16 columns"),
    (Fake(128, 64), Fake(8, 64), Fake(127, 8), 128, "rows: 128"),
    (Fake(128, 64), Fake(8, 64), Fake(128, 8), 0, "rows: 0"),
    (Fake(128, 64, at=4096 + 2), Fake(8, 64), Fake(128, 8), 128, "x: rows must start"),
    (Fake(128, 64), Fake(8, 64), Fake(128, 8, 12), 128, "y: rows must start"),
    (Fake(128, 64), Fake(8, 64, 56), Fake(128, 8), 128, "weight: columns must be contiguous")])
def test_layout_names_the_argument(x, weight, y, rows, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        layout(x, weight, y, rows)


# ---------------------------------------------------------------- choices
def test_majority_is_deterministic():
    assert gemm.majority([0, 1, 1, 2]) == 1
    assert gemm.majority([3, 1, 1, 3]) == 3
    with pytest.raises(ValueError):
        gemm.majority([])


def test_fastest_ignores_noise_and_favours_our_kernel():
    assert gemm.fastest([("a", 10.0), ("b", 9.97)])[0] == "a"
    assert gemm.fastest([("a", 10.0), ("b", 9.0)]) == ("b", 9.0)
    assert gemm.fastest([("a", 10.0), (gemm.OWN, 10.2)]) == (gemm.OWN, 10.2)
    assert gemm.fastest([("a", 10.0), (gemm.OWN, 10.5)])[0] == "a"
    assert gemm.fastest([("a", 1000.0), (gemm.WIDE, 1010.0)])[0] == "a"                    # 3 us are little there
    with pytest.raises(ValueError):
        gemm.fastest([])


class Admitting(gemm.Gemm):
    """A Gemm without a GPU: every candidate is admitted, the second is the fastest; keeps what was asked of it."""

    def __init__(self, cache, tune=True):
        self.tune, self.cache, self.asked = tune, cache, []
        self._choices, self._trial = {}, None

    def _usable(self, key, algorithm):
        return True

    def _admissions(self, key, alignment, candidates=None):
        for name in ("first", "second"):
            self.asked.append((key.m, name))
            yield gemm.Choice(name)

    def measure(self, key, algorithms):
        return {"first": 20.0, "second": 10.0}


def test_small_weights_take_the_first_algorithm_and_are_remembered(tmp_path):
    cache = gemm.TuningCache(tmp_path / "gemm.json", "gpu")
    made = Admitting(cache)
    assert made.prepare([(768, 256)], [16, 32]) == 2 and made.asked == [(32, "first"), (16, "first")]
    assert made.prepare([(5120, 6144)], [16]) == 1 and made.asked[2:] == [(16, "first"), (16, "second")]
    assert made.prepare([(5120, 6144)], [16], gated=True) == 1                     # another choice
    again = Admitting(gemm.TuningCache(tmp_path / "gemm.json", "gpu"))
    for gated in (False, True):
        assert again.prepare([(5120, 6144)], [16], gated) == 0
    assert again.prepare([(768, 256)], [16, 32]) == 0 and again.asked == []
    assert again.choice(Key(16, 768, 256, 256, 256, 768)) == gemm.Choice("first")
    assert again.choice(Key(16, 5120, 6144, 6144, 6144, 5120)) == gemm.Choice("second", 10.0)


def test_what_was_taken_untimed_is_timed_when_tuning(tmp_path):
    cache = gemm.TuningCache(tmp_path / "gemm.json", "gpu")
    assert Admitting(cache, tune=False).prepare([(5120, 6144)], [16]) == 1
    assert Admitting(cache, tune=False).prepare([(5120, 6144)], [16]) == 0
    assert Admitting(cache).prepare([(5120, 6144)], [16]) == 1
    assert Admitting(cache, tune=False).choice(Key(16, 5120, 6144, 6144, 6144, 5120)) == gemm.Choice("second", 10.0)


def test_algorithms_survive_text():
    a = Algorithm((1, 2**64 - 1, 0, 4, 5, 6, 7, 8))
    assert Algorithm.parse(str(a)) == a
    for text in ("own", "lt:1:2", "lt:x:0:0:0:0:0:0:0"):
        with pytest.raises(ValueError):
            Algorithm.parse(text)


# ---------------------------------------------------------------- the file
def test_cache_round_trip_and_other_keys(tmp_path):
    path = tmp_path / "a" / "gemm.json"
    one, other = gemm.TuningCache(path, "gpu 1"), gemm.TuningCache(path, "gpu 2")
    one.put("8x64", "reference", "own")
    one.put("8x64", "128/64/64/8/256", ["own", 1.5])
    one.save()
    other.put("8x64", "reference", "lt:0")
    other.save()
    again = gemm.TuningCache(path, "gpu 1")
    assert again.get("8x64", "128/64/64/8/256") == ["own", 1.5] and again.get("8x64", "reference") == "own"
    assert again.get("8x64", "64/64/64/8/256") is None and again.get("9x9", "reference") is None
    assert gemm.TuningCache(path, "gpu 2").get("8x64", "reference") == "lt:0"
    assert gemm.TuningCache(path, "gpu 3").choices == {}
    assert [p.name for p in path.parent.iterdir()] == ["gemm.json"]         # nothing left beside it


@pytest.mark.parametrize("damage", ["{", "[]", "", "\x00\xff"])
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path, damage):
    path = tmp_path / "gemm.json"
    path.write_text(damage)
    with pytest.warns(UserWarning, match="measured again"):
        cache = gemm.TuningCache(path, "gpu")
    assert cache.choices == {}
    cache.put("8x64", "reference", "own")
    cache.save()
    assert gemm.TuningCache(path, "gpu").get("8x64", "reference") == "own"


def test_edited_choices_are_not_trusted(tmp_path):
    path = tmp_path / "gemm.json"
    cache = gemm.TuningCache(path, "gpu")
    cache.put("8x64", "128", ["own", 1.0])
    cache.save()
    content = json.loads(path.read_text())
    content["gpu"]["choices"]["8x64"]["128"][0] = "lt:1:2:3:4:5:6:7:8"
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="damaged"):
        assert gemm.TuningCache(path, "gpu").choices == {}


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = gemm.TuningCache(tmp_path / "file" / "gemm.json", "gpu")
    cache.put("8x64", "128", ["own", 1.0])
    with pytest.warns(UserWarning, match="cannot be kept"):
        cache.save()
    assert gemm.TuningCache(None, "gpu").save() is None


# ---------------------------------------------------------------- device.py, as far as it goes without one
def test_array_bytes():
    assert device.array_bytes(1) == 256 and device.array_bytes((128, 64)) == 16384
    assert device.array_bytes((3, 5), np.float32) == 256 and device.array_bytes((0, 8)) == 0


@pytest.mark.parametrize("shape,limit", [((10, 8), 48), ((10, 8), 1000), ((3, 5, 7), 14), ((2, 100), 32), ((), 2)])
def test_slabs_cut_in_order(shape, limit):
    array = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    parts = list(device.parts_of(array, limit))
    assert all(p.nbytes <= limit for p in parts)
    assert np.array_equal(np.concatenate([p.reshape(-1) for p in parts]), array.reshape(-1))


def test_slabs_of_permuted_rows():
    array = np.arange(2 * 3 * 4 * 5, dtype=np.uint16).reshape(2, 3, 4, 5).transpose(1, 0, 2, 3)
    parts = list(device.parts_of(array, 40))
    assert np.array_equal(np.concatenate([p.reshape(-1) for p in parts]), array.reshape(-1))


@pytest.mark.parametrize("rows,interleave,limit", [(8, 4, 1000), (96, 4, 200), (30, 2, 81), (12, 3, 1)])
def test_interleaved_rows_are_those_of_a_stacked_weight(rows, interleave, limit):
    arrays = [np.arange(rows * 5, dtype=np.uint16).reshape(rows, 5) + 1000 * i for i in range(2)]
    parts = list(device.interleaved(arrays, interleave, limit))
    assert all(sum(p.nbytes for p in part) <= max(limit, 20 * interleave) for part in parts)
    got = np.concatenate([np.stack(part, 1).reshape(-1, 5) for part in parts])
    spec = weights.Spec("w", (2 * rows, 5), lambda tensors: list(tensors), interleave)
    assert np.array_equal(got, spec.stacked(arrays)) and got[interleave, 0] == 1000 and got[2 * interleave, 0] == 5 * interleave


@pytest.mark.parametrize("shapes,interleave", [([(8, 5), (8, 4)], 4), ([(8, 5), (8, 5)], 3)])
def test_rows_that_cannot_be_interleaved(shapes, interleave):
    with pytest.raises(ValueError, match=f"interleaved by {interleave}"):
        list(device.interleaved([np.zeros(s, np.uint16) for s in shapes], interleave, 100))


@pytest.mark.skipif(cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_what_is_missing():
    with pytest.raises(device.NoDevice, match="driver"):
        device.find_device()
