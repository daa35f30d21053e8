"""The order of a run, computed from its config, is the one in which the loader gives samples."""

import itertools
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.data.inspect.seen import RunOrder, SeenData
from llmtrain.data.loader.loaders import build_train_loader
from llmtrain.data.loader.token_dataset import Reader, WorkerSamples
from llmtrain.data.shards.index import ShardError, read_index
from llmtrain.schema.data import DataConfig

SIZES = {"a": 130, "b": 70, "c": 41}
PROPORTIONS = {"a": 0.5, "b": 0.2, "c": 0.3}
MIXTURE: dict[str, Any] = {
    "mixture": [
        {"until": "7 steps", "proportions": {"a": 6, "b": 1, "c": 1}},
        {"until": f"{20 * 24 * 8} tokens", "proportions": {"a": 1, "b": 1, "c": 0}},
        {"proportions": {"a": 0.2, "b": 0.2, "c": 0.6}},
    ]
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, write_shards) -> dict[str, str]:
    root = tmp_path_factory.mktemp("streams")
    return {name: str(write_shards(root / name, size)) for name, size in SIZES.items()}


def config(folders: dict[str, str], proportions: dict[str, float], **options) -> DataConfig:
    streams = {name: {"local": folder, "proportion": proportions.get(name)} for name, folder in folders.items()}
    values = {"seq_len": 8, "train": {"streams": streams}, "num_canonical_nodes": 4, "num_workers": 0}
    return DataConfig.model_validate(values | options)


@pytest.mark.parametrize(
    ("proportions", "options"),
    [
        ({}, {}),
        (PROPORTIONS, {}),
        ({}, {"shuffle": False}),
        ({}, {"shuffle_block_size": 16, "shuffle_seed": 3}),
        ({}, {"order": "seekable"}),
        (PROPORTIONS, {"order": "seekable"}),
        ({}, {"order": "streaming"}),
        (PROPORTIONS, {"order": "streaming", "shuffle_block_size": 16}),
        ({}, MIXTURE),
        ({}, {**MIXTURE, "stratified": True}),
    ],
)
def test_the_order_of_three_epochs_is_the_loaders(folders, proportions, options):
    data = config(folders, proportions, **options)
    loader = build_train_loader(data, global_batch_size=24)
    expected = [sorted(batch["sample_ids"].tolist()) for _ in range(3) for batch in loader]
    indexes = [read_index(stream.folder) for stream in loader.dataset.streams]
    order = RunOrder(data, 24, [index for index in indexes if index])
    assert np.sort(order.ids(range(len(expected))), axis=1).tolist() == expected
    assert order.ids(range(5, 5)).shape == (0, 24)
    assert np.array_equal(order.ids(range(17, 23)), order.ids(range(40))[17:23])


def test_samples_are_named_by_stream_and_shard(folders):
    data = config(folders, {}, **MIXTURE)
    seen = SeenData(data, 24)
    begins = dict(zip(SIZES, np.cumsum([0, *SIZES.values()]), strict=False))
    for one in seen.samples(3, 30):
        stream = next(found for found in seen.streams if found.name == one.stream)
        shard = next(
            number for number, entry in enumerate(stream.index.shards) if entry["raw_data"]["basename"] == one.shard
        )
        assert (stream.tokens(shard)[one.row] == one.sample - begins[one.stream]).all()
        assert one.documents is None
    counts = seen.counts(1, 30)
    assert counts.shape == (30, 3) and (counts.sum(axis=1) == 24).all()
    assert (counts[8:20, 2] == 0).all()
    assert seen.unrecorded == list(SIZES)


BUDGETS: dict[str, Any] = {
    "mixture": [
        {"tokens": {"a": 20_000, "b": 8_000, "c": 4_000}},
        {"repeats": {"a": 9, "b": 60, "c": 0}},
        {"tokens": {"a": 1e3, "b": 0, "c": 25_000}},
    ]
}


@pytest.mark.parametrize("stratified", [False, True])
def test_a_run_of_budgets_resumed_anywhere_reads_what_an_uninterrupted_one_does(folders, stratified):
    """500 steps as the loader's workers take them, resumed at random steps on other ranks and with other workers."""
    data = config(folders, {}, **BUDGETS, stratified=stratified)
    seen, rng = SeenData(data, 24), random.Random(int(os.environ.get("LLMTRAIN_TEST_SEED", "0")))
    order = seen.order._seekable
    assert order is not None
    epoch = seen.order.steps_per_epoch * 24
    stops = [0, *sorted(rng.sample(range(1, 500), 8)), 500]
    given: list[list[int]] = []
    for first, last in itertools.pairwise(stops):
        ranks, workers = rng.choice((1, 2, 4)), rng.choice((1, 3))
        step = first
        while step < last:
            number, done = divmod(step * 24, epoch)
            steps, each = min(last - step, (epoch - done) // 24), 24 // ranks
            batches: list[list[int]] = [[] for _ in range(steps)]
            for rank, worker in itertools.product(range(ranks), range(workers)):
                reader = Reader(rank, ranks, worker, workers)
                mine = WorkerSamples(order, reader, begin=number * epoch, done=done, size=epoch)
                for turn, at in enumerate(range(worker, steps, workers)):
                    batches[at] += [mine[turn * each + place] for place in range(each)]
            given += batches
            step += steps
    named: dict[int, list[int]] = {}
    for one in seen.samples(1, 500):
        named.setdefault(one.step, []).append(one.sample)
    assert [sorted(batch) for batch in given] == [sorted(named[step]) for step in range(1, 501)]
    counts = seen.counts(1, 500)
    # 4,000 samples are 167 steps, 9 * 130 + 60 * 70 = 5,370 to step 391 are 224: each exact, in whole steps.
    first, second = counts[:167].sum(axis=0), counts[167:391].sum(axis=0)
    assert np.abs(first - np.array([20, 8, 4]) * 167 * 24 / 32).max() <= 1
    assert np.abs(second - np.array([1170, 4200, 0]) * 224 * 24 / 5370).max() <= 1
    samples = np.bincount([id for batch in given for id in batch], minlength=241)
    assert all(np.ptp(part) <= 1 for part in np.split(samples, [130, 200]))


def test_nothing_is_written_beside_the_shards(folders):
    before = [sorted(Path(folder).iterdir()) for folder in folders.values()]
    list(SeenData(config(folders, {}), 24).samples(1, 20))
    assert [sorted(Path(folder).iterdir()) for folder in folders.values()] == before


def test_too_little_data_is_an_error(folders):
    with pytest.raises(ShardError, match="one epoch needs a multiple"):
        SeenData(config(folders, {}), 1000)
