"""The seekable order: every sample once an epoch, any position at once, near samples from near shards, mixtures as told."""

import os
import time

import numpy as np
import pytest

from llmtrain.data.loader.mixture_blocks import Phase
from llmtrain.data.loader.order import SampleOrder
from llmtrain.data.loader.permutation import key, permute
from llmtrain.data.loader.token_dataset import Reader, WorkerSamples

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "0"))


def order(*sources, batch=8, lanes=4, phases=(), **options) -> SampleOrder:
    sizes = [np.array(sizes, np.int64) for sizes in sources]
    return SampleOrder(sizes, phases, global_batch=batch, canonical_nodes=lanes, seed=SEED, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000, 65_537])
def test_a_permutation_has_every_number_once(size):
    first, second = (permute(np.arange(size), size, key(SEED, number)) for number in (1, 2))
    assert np.array_equal(np.sort(first), np.arange(size))
    assert size < 16 or not np.array_equal(first, second)


def test_a_permutation_is_the_same_on_every_machine():
    assert permute(np.arange(10), 10, key(17, 0)).tolist() == [8, 5, 7, 4, 0, 2, 6, 9, 1, 3]


def test_a_permutation_is_even():
    """Where a number goes is independent of where it was: chi-squared over 64 x 64 cells, 63² degrees of freedom."""
    cells = np.zeros((64, 64))
    for seed in range(400):
        cells[np.arange(64), permute(np.arange(64), 64, key(SEED, seed))] += 1
    expected = 400 / 64
    assert abs(((cells - expected) ** 2 / expected).sum() - 63**2) < 6 * np.sqrt(2 * 63**2)


@pytest.mark.parametrize("window", [None, 32, 100])
@pytest.mark.parametrize("shards", [[10] * 10, [7, 3, 9, 100, 1], [997] * 23, [4096] * 6])
@pytest.mark.parametrize("batch,lanes", [(8, 4), (6, 4), (48, 8), (5, 8)])
def test_every_epoch_has_every_sample_once(shards, window, batch, lanes):
    size = sum(shards)
    made = order(shards, batch=batch, lanes=lanes, window=window)
    ids = made.ids(np.arange(4 * size // batch * batch))
    epochs = [ids[begin : begin + size] for begin in range(0, 3 * size, size)]
    if size % batch == 0:
        assert all(np.array_equal(np.sort(epoch), np.arange(size)) for epoch in epochs)
        assert not np.array_equal(epochs[0], epochs[1])
    # A batch that lies across the border of two epochs holds the last of one and the first of the other.
    counts = np.bincount(ids, minlength=size)
    assert counts.max() - counts.min() <= 2 and np.bincount(ids[: size // batch * batch]).max() == 1


def test_any_position_can_be_asked_for_alone():
    made, again = (order([500] * 40, [300] * 7, phases=[Phase(0, (6, 4)), Phase(100, (1, 9))], batch=16) for _ in "ab")
    ids = made.ids(np.arange(16 * 300))
    asked = np.random.default_rng(SEED).permutation(len(ids))
    assert np.array_equal(again.ids(asked), ids[asked])


def test_without_shuffling_one_lane_reads_in_order():
    made = order([10, 20, 30], lanes=1, shuffle=False)
    assert made.ids(np.arange(70)).tolist() == [*range(60), *range(10)]


def test_a_lane_needs_few_shards_at_a_time():
    """Of 1,000 shards, a machine that has two of eight lanes reads its part of an epoch through a cache of 50."""
    made = order([1000] * 1000, batch=64, lanes=8)
    positions = np.arange(999_936).reshape(-1, 64)[:, :16].ravel()
    shards = made.ids(positions) // 1000
    last, fetched, cache = {}, 0, set()
    for moment, shard in enumerate(shards.tolist()):
        if shard not in cache:
            fetched += 1
            if len(cache) == 50:
                cache.remove(min(cache, key=last.__getitem__))
            cache.add(shard)
        last[shard] = moment
    assert fetched < 1.25 * len(set(shards)) and len(set(shards)) < 400


@pytest.mark.parametrize("stratified", [False, True])
def test_phases_hold_their_proportions(stratified):
    phases = [Phase(0, (7, 2, 1)), Phase(50, (1, 1, 0)), Phase(101, (0.1, 0.1, 0.8))]
    made = order([1000] * 10, [500] * 5, [50] * 3, phases=phases, batch=64, lanes=8, stratified=stratified)
    ids = made.ids(np.arange(64 * 200))
    source = np.searchsorted([10_000, 12_500], ids, side="right")
    for first, last, wanted in ((0, 50, (0.7, 0.2, 0.1)), (50, 101, (0.5, 0.5, 0)), (101, 200, (0.1, 0.1, 0.8))):
        found = np.bincount(source[first * 64 : last * 64], minlength=3)
        # A block of each of the eight lanes may be cut off.
        assert np.abs(found - np.array(wanted) * 64 * (last - first)).max() <= (8 * 3 if stratified else 8 * 20)
    assert made.counts(200) == np.bincount(source, minlength=3).tolist()
    assert made.counts(73) == np.bincount(source[: 64 * 73], minlength=3).tolist()
    batches = np.stack([np.bincount(batch, minlength=3) for batch in source[: 64 * 50].reshape(-1, 64)])
    assert (batches.std(axis=0)[0] < 2) == stratified


def test_a_source_is_read_whole_before_it_is_read_again():
    made = order([100] * 50, [10] * 5, phases=[Phase(0, (0.9, 0.1)), Phase(60, (0.5, 0.5))], batch=16)
    ids = made.ids(np.arange(16 * 200))
    for step in (3, 20, 71, 72, 150, 200):
        counts = np.bincount(ids[: 16 * step], minlength=5050)
        assert all(np.ptp(source) <= 1 for source in (counts[:5000], counts[5000:]))


@pytest.mark.parametrize("sizes", [[1], [2], [90], [3, 7, 1, 40]])
@pytest.mark.parametrize("stratified", [False, True])
def test_after_any_step_a_small_source_was_read_evenly(sizes, stratified):
    phases = [Phase(0, (0.9, 0.1)), Phase(37, (0.3, 0.7)), Phase(90, (1, 1))]
    made = order([5000] * 40, sizes, phases=phases, batch=24, lanes=8, stratified=stratified)
    ids = made.ids(np.arange(24 * 150)).reshape(150, 24)
    for step in range(1, 151):
        small = ids[:step][ids[:step] >= 200_000] - 200_000
        counts = np.bincount(small, minlength=sum(sizes))
        assert counts.max() - counts.min() <= 1


def test_shares_of_very_different_size_are_read_exactly():
    phases = [Phase(0, (1e6, 1, 37)), Phase(40_000, (1, 0, 0))]
    made = order([10_000] * 400, [100], [500], phases=phases, batch=256, lanes=8)
    read = np.array(made.counts(40_000))
    assert np.abs(read - 256 * 40_000 * np.array([1e6, 1, 37]) / 1_000_038).max() <= 1.01


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8, 24])
@pytest.mark.parametrize("workers", [1, 3])
def test_ranks_and_workers_share_the_same_batches(ranks, workers):
    made = order([1000] * 13, batch=48, lanes=8)
    size, begin, done = 12_960, 12_960, 48 * 5
    expected = made.ids(np.arange(begin + done, begin + size)).reshape(-1, 48)
    for rank in range(ranks):
        mine = [
            WorkerSamples(made, Reader(rank, ranks, worker, workers), begin=begin, done=done, size=size)
            for worker in range(workers)
        ]
        each = 48 // ranks
        for step, batch in enumerate(expected[:20]):
            turn, worker = divmod(step, workers)
            found = [mine[worker][turn * each + place] for place in range(each)]
            assert found == batch[rank * each : (rank + 1) * each].tolist()
        assert sum(map(len, mine)) == each * len(expected)


def test_a_thousand_million_samples_need_no_time_and_no_memory():
    began = time.process_time()
    made = order([10_000] * 100_000, batch=1024, lanes=8)
    ids = made.ids(np.arange(1024) + 700_000_000 // 1024 * 1024)
    assert len(set(ids.tolist())) == 1024 and ids.max() < 10**9
    assert time.process_time() - began < 5
