"""Buckets: capacities hold what they promise, and packed metadata is the pool."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from jev.model import row_pool
from jev.model.buckets import MAX_SLOTS, Bucket, all_buckets, choose, row_counts
from jev.model.cuda_backbone import MAX_ROWS
from jev_kernels.pool import CHUNK, CHUNKS, LASTS, ROWS, RUNS, TILES
from tests.model.test_row_pool import trees

BUCKETS = [Bucket(rows, wide) for wide in (False, True) for rows in row_counts(MAX_ROWS)]


def test_row_counts_cover_every_length_and_stop_at_the_maximum():
    counts = list(row_counts(5000))
    assert counts[0] == 16 and counts[-1] >= 5000 > counts[-2]
    assert all(b > a and b % 16 == 0 for a, b in zip(counts, counts[1:]))


@settings(max_examples=80, deadline=None)
@given(trees(12))
def test_packed_metadata_is_the_pool(sequences):
    pool = row_pool.build(sequences)
    bucket = choose(pool, BUCKETS)
    out = np.full(bucket.size, -7, np.int32)
    lasts = np.unique(pool.last_rows)
    used = bucket.pack(pool, lasts, out)
    assert (out[used:] == -7).all()
    section = bucket.sections
    read = {name: out[s.at:s.at + int(np.prod(s.shape))].reshape(s.shape) for name, s in section.items()}
    counts = read["counts"]
    assert list(counts[[ROWS, TILES, CHUNKS, RUNS, LASTS]]) == [
        pool.n_rows, len(pool.tiles), len(pool.chunk_rows), len(pool.runs), len(lasts)]
    for name in ("ids", "positions", "parents", "tiles", "runs", "chunk_slots", "chunk_rows", "chunk_out_rows", "paths"):
        expected = getattr(pool, name)
        assert (read[name][:len(expected)] == expected).all(), name
    assert (read["last_rows"][:len(lasts)] == lasts).all()
    ends = [s.at + int(np.prod(s.shape)) for s in section.values()]
    starts = [s.at for s in section.values()][1:] + [bucket.size]
    assert all(end <= start for end, start in zip(ends, starts)) and all(s.at % 64 == 0 for s in section.values())


@pytest.mark.parametrize("length", [1, 64, 65, 128, 936, 3399, MAX_ROWS])
def test_one_sequence_takes_the_first_bucket_with_enough_rows(length):
    bucket = choose(row_pool.build([np.arange(length)]), BUCKETS)
    assert not bucket.wide and bucket.rows == next(r for r in row_counts(MAX_ROWS) if r >= length)


def test_many_short_branches_take_a_bucket_of_about_their_rows():
    prefix = np.arange(300)
    pool = row_pool.build([np.append(prefix, 1000 + i) for i in range(255)])
    assert choose(pool, BUCKETS) == Bucket(560)
    pool = row_pool.build([np.append(prefix, 1000 + i) for i in range(300)])
    assert choose(pool, BUCKETS) == Bucket(608, wide=True)
    pool = row_pool.build([np.concatenate([np.arange(3000), [5000 + i] * 10]) for i in range(255)])
    assert choose(pool, BUCKETS) == Bucket(5632)
    longest = np.arange(4096)
    pool = row_pool.build([np.concatenate([longest[:-24], np.full(24, 5000 + i)]) for i in range(255)])
    assert choose(pool, BUCKETS) == Bucket(MAX_ROWS)


def test_last_rows_are_multiplied_at_numbers_of_rows_that_buckets_have():
    rows = set(row_counts(MAX_ROWS))
    assert all(b.lasts in rows for b in BUCKETS)


@pytest.mark.parametrize("options, state", [(2, 100), (20, 1000), (50, 1000), (100, 300), (20, 3000)])
def test_a_choice_of_some_options_takes_a_bucket_of_about_its_rows(options, state):
    prefix = np.arange(state)
    pool = row_pool.build([np.concatenate([prefix, np.full(6, 5000 + i)]) for i in range(options)])
    bucket = choose(pool, BUCKETS)
    assert not bucket.wide and bucket.rows <= pool.n_rows + 128


def test_what_no_bucket_holds_is_none():
    assert choose(row_pool.build([np.arange(MAX_ROWS + 1)]), BUCKETS) is None
    branching = [np.concatenate([np.full(64, i), np.full(1 + j, 7 + j)]) for i in range(MAX_SLOTS + 1) for j in range(2)]
    assert choose(row_pool.build(branching), BUCKETS) is None


@pytest.mark.parametrize("history", [True, False])
def test_every_bucket_has_room_for_the_history_that_its_metadata_may_name(history):
    """The largest one too, whose own rows take all: its kernels are launched with room for a page at least."""
    buckets = all_buckets(MAX_ROWS, history)
    assert [b.rows for b in buckets] == 2 * list(row_counts(MAX_ROWS))
    assert [b.wide for b in buckets].index(True) * 2 == len(buckets)
    for bucket in buckets:
        pages, = bucket.sections["restored_pages"].shape
        assert CHUNK * pages <= bucket.history if history else bucket.history == 0, bucket
