import json
import multiprocessing
import os
import queue
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming.base.world import World
from torch import distributed as dist

from llmtrain.data.loader.loaders import build_train_loader, build_validation_loader
from llmtrain.data.loader.streaming_order import StreamingOrder
from llmtrain.data.shards.index import ShardError
from llmtrain.schema.data import DataConfig

Order = list[list[int]]


def one_rank(job: Callable[[], Any], rank: int, world_size: int, store: Path, results) -> None:
    torch.set_num_threads(1)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in environment.items()})
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    results.put((rank, job()))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path) -> Callable[..., list[Any]]:
    """on_ranks(world_size, job): what job() returns on each rank, each in a process of its own."""
    runs = iter(range(1000))

    def run(world_size: int, job: Callable[[], Any]) -> list[Any]:
        context = multiprocessing.get_context("fork")  # spawn would import torch anew in every process
        results = context.Queue()
        store = tmp_path / f"store{next(runs)}"
        ranks = [
            context.Process(target=one_rank, args=(job, rank, world_size, store, results)) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            found = dict(results.get(timeout=300) for _ in ranks)
        except queue.Empty:
            pytest.fail("a rank hung or died")
        finally:
            for process in ranks:
                process.join(timeout=10)
                process.kill()
        return [found[rank] for rank in range(world_size)]

    return run


def epoch(
    data: DataConfig, batch: int, skip_to: dict | None = None, stop: int | None = None
) -> tuple[Order, dict, int]:
    """(this rank's sample ids by batch, the position after them, batches per epoch)."""
    loader = build_train_loader(data, global_batch_size=batch)
    if skip_to is not None:
        loader.dataset.load_state_dict(skip_to)
    order = [b["sample_ids"].tolist() for b in islice(loader, stop)]
    return order, loader.dataset.state_dict(len(order) * batch, True), len(loader)


def global_batches(per_rank: list[Order]) -> list[list[int]]:
    """The sample ids of each global batch, sorted."""
    return [sorted(id for rank in step for id in rank) for step in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("samples", [pytest.param(96, marks=pytest.mark.slow), 101])
def test_global_batches_do_not_depend_on_ranks_or_workers(data, on_ranks, samples):
    orders = {}
    for ranks, workers in ((1, 0), (1, 3), (2, 2), (4, 0)):
        config = data({"a": samples}, num_workers=workers)
        per_rank = on_ranks(ranks, lambda config=config: epoch(config, 8)[0])
        orders[ranks, workers] = global_batches(per_rank)
    expected = orders[1, 0]
    assert len(expected) == 12
    assert all(order == expected for order in orders.values())
    ids = [id for batch in expected for id in batch]
    assert len(set(ids)) == 96 and set(ids) <= set(range(samples))
    assert ids != sorted(ids)


@pytest.mark.parametrize("order", ["streaming", "seekable"])
def test_ranks_that_share_sequences_read_the_same_samples(data, on_ranks, write_shards, tmp_path, order):
    held = str(write_shards(tmp_path / "held", 5))
    config = data({"a": 96}, order=order, validation={"streams": {"held": {"local": held}}})

    def read() -> tuple[Order, Order]:
        training = build_train_loader(config, global_batch_size=8, replication=2)
        validation = build_validation_loader(config, global_batch_size=2, replication=2)
        assert validation is not None
        first, second = ([batch["sample_ids"].tolist() for batch in loader] for loader in (training, validation))
        return first, second

    apart = on_ranks(2, lambda: epoch(config, 8)[0])
    first, *partners, last = on_ranks(4, read)
    assert partners == [first, last]
    assert [first[0], last[0]] == apart
    assert [first[1], last[1]] == [[[0], [2], [4]], [[1], [3], [-1]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_epoch_continues_where_it_stopped_on_any_number_of_ranks(data, on_ranks, workers):
    config = data({"a": 70, "b": 33}, num_workers=workers)
    whole = global_batches(on_ranks(1, lambda: epoch(config, 8)[0]))
    assert len(whole) == 12
    [(first, state, _)] = on_ranks(1, lambda: epoch(config, 8, stop=5))
    for ranks in (1, 2):
        rest = on_ranks(ranks, lambda: epoch(config, 8, skip_to=state)[0])
        assert global_batches([first]) + global_batches(rest) == whole
    [part, _] = on_ranks(2, lambda: epoch(config, 8, stop=5))
    rest = on_ranks(1, lambda: epoch(config, 8, skip_to=part[1])[0])
    assert global_batches(rest) == whole[5:]


def epochs(data: DataConfig, count: int, skip_to: dict | None = None) -> list[tuple[Order, dict]]:
    """(order, the position Composer saves once the epoch is over) per epoch."""
    loader = build_train_loader(data, global_batch_size=8)
    if skip_to:
        loader.dataset.load_state_dict(skip_to)
    # Composer takes exactly len(loader) batches and never asks for one more.
    return [
        ([b["sample_ids"].tolist() for b in islice(loader, len(loader))], loader.dataset.state_dict(0, True))
        for _ in range(count)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_between_epochs_continues_with_the_next_one(data, on_ranks, workers):
    config = data({"a": 41}, num_workers=workers)
    [whole] = on_ranks(1, lambda: epochs(config, 3))
    orders = [order for order, _ in whole]
    assert orders[0] != orders[1] != orders[2]
    # The last of the 41 samples is left out at random: over the epochs all of them have their turn.
    assert len({id for order in orders for batch in order for id in batch}) == 41
    [resumed] = on_ranks(1, lambda: epochs(config, 2, skip_to=whole[0][1]))
    assert [order for order, _ in resumed] == orders[1:]


def test_a_checkpoint_after_the_last_batch_has_nothing_left_of_the_epoch(data, on_ranks):
    config = data({"a": 40})
    [(_, state, _)] = on_ranks(1, lambda: epoch(config, 8))
    assert state["sample_in_epoch"] == 40
    [(rest, _, _)] = on_ranks(1, lambda: epoch(config, 8, skip_to=state))
    assert rest == []


@pytest.mark.parametrize(("order", "workers"), [("seekable", 0), ("seekable", 1), ("streaming", 0)])
def test_every_rank_goes_on_from_an_epochs_end_to_the_next_epoch(data, on_ranks, order, workers):
    """A rank that resumes there has nothing to read and begins the next epoch at once."""
    config = data({"a": 40}, order=order, num_workers=workers)
    [whole] = on_ranks(1, lambda: [batches for batches, _ in epochs(config, 2)])
    state = epochs(config, 1)[0][1] | {"epoch": 0, "sample_in_epoch": 40}
    resumed = on_ranks(2, lambda: [batches for batches, _ in epochs(config, 2, skip_to=state)])
    assert [first for first, _ in resumed] == [[], []]
    assert global_batches([second for _, second in resumed]) == global_batches([whole[1]])


def test_seed_decides_the_order_and_shuffle_can_be_off(data):
    def ids(**options) -> list[int]:
        loader = build_train_loader(data({"a": 64}, **options), global_batch_size=8)
        return [id for batch in loader for id in batch["sample_ids"].tolist()]

    assert ids() == ids() != ids(shuffle_seed=1)
    assert ids(shuffle=False, num_canonical_nodes=1) == list(range(64))


@pytest.mark.parametrize("order", ["streaming", "seekable"])
def test_streams_are_drawn_by_proportion(data, order):
    config = data({"a": 60, "b": 20}, proportions={"a": 1.0, "b": 3.0}, order=order)
    loader = build_train_loader(config, global_batch_size=16)
    ids = [id for batch in loader for id in batch["sample_ids"].tolist()]
    assert len(ids) == 80
    drawn = sum(id >= 60 for id in ids)
    assert drawn == 60 if order == "streaming" else abs(drawn - 60) <= 3
    assert {ids.count(id) for id in range(60, 80)} <= {drawn // 20, -(-drawn // 20)}


@pytest.mark.parametrize("order", ["streaming", "seekable"])
def test_streams_without_proportions_count_by_size_and_never_repeat(data, order):
    config = data({"a": 67, "b": 21}, num_canonical_nodes=8, order=order)
    ids = [id for batch in build_train_loader(config, global_batch_size=16) for id in batch["sample_ids"].tolist()]
    assert len(ids) == len(set(ids)) == 80
    assert abs(sum(id < 67 for id in ids) - round(80 * 67 / 88)) <= (0 if order == "streaming" else 6)


SEEKABLE: dict[str, Any] = {"order": "seekable"}
MIXTURE: dict[str, Any] = {
    "mixture": [
        {"until": "7 steps", "proportions": {"a": 6, "b": 1, "c": 1}},
        {"until": f"{20 * 24 * 8} tokens", "proportions": {"a": 1, "b": 1, "c": 0}},
        {"proportions": {"a": 0.2, "b": 0.2, "c": 0.6}},
    ]
}


@pytest.mark.parametrize(
    "options",
    [
        *(SEEKABLE, {**MIXTURE, "stratified": True}),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (MIXTURE, {**SEEKABLE, "shuffle": False})),
    ],
)
def test_the_seekable_order_continues_anywhere_on_any_ranks_and_workers(data, on_ranks, options):
    configs = [data({"a": 300, "b": 90, "c": 41}, num_workers=workers, **options) for workers in (0, 2)]
    whole = global_batches(on_ranks(1, lambda: epoch(configs[0], 24)[0]))
    assert len(whole) == 17
    for stop, before, after, config in ((3, 1, 4, configs[0]), (7, 2, 1, configs[1]), (13, 4, 2, configs[0])):
        parts = on_ranks(before, lambda stop=stop, config=config: epoch(config, 24, stop=stop))
        assert parts[0][1]["order"] == ("mixed" if "mixture" in options else "seekable")
        first, state = [order for order, _, _ in parts], parts[0][1]
        rest = on_ranks(after, lambda state=state, config=config: epoch(config, 24, skip_to=state)[0])
        assert global_batches(first) + global_batches(rest) == whole


def test_a_mixture_goes_on_over_epochs_without_repeating(data):
    loader = build_train_loader(data({"a": 300, "b": 90, "c": 41}, **MIXTURE), global_batch_size=24)
    ids = [id for _ in range(3) for batch in loader for id in batch["sample_ids"].tolist()]
    order = loader.dataset.order
    assert order is not None
    counts = [sum(first <= id < first + size for id in ids) for first, size in ((0, 300), (300, 90), (390, 41))]
    assert counts == order.counts(len(ids) // 24)
    assert all(ids.count(id) <= counts[2] // 41 + 2 for id in range(390, 431))


def test_a_signal_to_every_process_of_a_job_leaves_its_loader_at_work(data):
    """The training process saves first. It still ends the loader's processes by the same signal."""
    loader = build_train_loader(data({"a": 640}, num_workers=2), global_batch_size=4)
    batches = iter(loader)
    try:
        next(batches)
        running: Any = loader._iterator
        workers = running._workers
        for worker in workers:
            command = f"import os, signal; os.kill({worker.pid}, signal.SIGTERM)"
            subprocess.run([sys.executable, "-c", command], check=True)
        assert len(list(batches)) == 159
        assert all(worker.is_alive() for worker in workers)
        for worker in workers:
            worker.terminate()
            worker.join(timeout=600)
            assert worker.exitcode == 0
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]


def test_batches_hold_shifted_labels(data):
    batch = next(iter(build_train_loader(data({"a": 16}), global_batch_size=4)))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 8)
    assert batch["input_ids"].dtype == batch["labels"].dtype == batch["sample_ids"].dtype == torch.int64
    assert (batch["input_ids"] == batch["sample_ids"][:, None]).all()
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
    assert (batch["labels"][:, -1] == -100).all()


def test_the_order_is_the_same_on_any_number_of_nodes(data):
    config = data({"a": 96}, shuffle_block_size=64)
    made = StreamingOrder(config, build_train_loader(config, global_batch_size=8).dataset.shard_sizes(), 96, 8)

    def order(nodes: int, ranks_per_node: int) -> list[list[int]]:
        worlds = [World(nodes, ranks_per_node, 1, worker) for worker in range(nodes * ranks_per_node)]
        each = [made.ids(world, epoch=0, done=16).reshape(10, -1).tolist() for world in worlds]
        return global_batches(each)

    expected = order(1, 1)
    assert len(expected) == 10
    assert all(order(*shape) == expected for shape in ((1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)))


@pytest.mark.parametrize(("samples", "batch", "nodes"), [(7, 8, 4), (20, 8, 64), (9, 6, 4)])
def test_too_few_samples_are_an_error_rather_than_repeats(data, samples, batch, nodes):
    config = data({"a": samples}, num_canonical_nodes=nodes)
    with pytest.raises(ShardError, match=f"{samples} samples; one epoch needs a multiple"):
        build_train_loader(config, global_batch_size=batch)


def test_ranks_must_divide_the_batch(data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="8 samples cannot be divided evenly over 3 ranks"):
        build_train_loader(data({"a": 64}), global_batch_size=8)


def test_a_remote_is_cached_and_gives_the_same_order(data, tmp_path):
    near = data({"a": 64})
    far = DataConfig.model_validate(
        near.model_dump()
        | {"train": {"streams": {"a": {"remote": str(tmp_path / "a"), "local": str(tmp_path / "cache")}}}}
    )
    orders = [
        [id for batch in build_train_loader(config, global_batch_size=8) for id in batch["sample_ids"].tolist()]
        for config in (near, far)
    ]
    assert orders[0] == orders[1]
    assert (tmp_path / "cache/index.json").exists()


def validation(data: DataConfig, max_samples: int | None = None) -> list[tuple[list[int], int, int]]:
    """(sample ids, labels that count, bytes of text) per batch of this rank."""
    loader = build_validation_loader(data, global_batch_size=8, max_samples=max_samples)
    assert loader is not None
    batches = list(loader)
    assert len(batches) == len(loader)
    return [(b["sample_ids"].tolist(), int((b["labels"] != -100).sum()), int(b["text_bytes"].sum())) for b in batches]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (4, 2)])
@pytest.mark.parametrize("samples", [16, 19])
def test_validation_sees_every_sample_once_on_any_number_of_ranks(
    data, on_ranks, write_shards, tmp_path, ranks, workers, samples
):
    folder = write_shards(tmp_path / "held", samples, text_bytes=True)
    config = data({"a": 8}, validation={"streams": {"held": {"local": str(folder)}}}, num_workers=workers)
    per_rank = on_ranks(ranks, lambda: validation(config))
    assert {len(batches) for batches in per_rank} == {-(-samples // 8)}
    assert all(len(ids) == 8 // ranks for batches in per_rank for ids, _, _ in batches)
    ids = [id for batches in per_rank for batch, _, _ in batches for id in batch if id >= 0]
    assert sorted(ids) == list(range(samples))
    # 7 of the 8 positions of a real sample have a label; fillers have none.
    assert sum(labels for batches in per_rank for _, labels, _ in batches) == 7 * samples
    assert sum(size for batches in per_rank for _, _, size in batches) == sum(range(samples))


def test_validation_can_take_a_part_spread_evenly(data, write_shards, tmp_path):
    folder = write_shards(tmp_path / "held", 100)
    config = data({"a": 8}, validation={"streams": {"held": {"local": str(folder)}}})
    [(ids, _, size)] = validation(config, max_samples=5)
    assert ids == [0, 20, 40, 60, 80, -1, -1, -1]
    assert size == -5  # these shards do not say how much text is behind a sample


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (4, 0)])
def test_a_batch_of_validation_is_of_one_stream(data, on_ranks, write_shards, tmp_path, ranks, workers):
    sizes = {"a": 9, "b": 1, "c": 3}
    streams = {name: {"local": str(write_shards(tmp_path / f"held-{name}", size))} for name, size in sizes.items()}
    config = data({"a": 8}, validation={"streams": streams}, num_workers=workers)
    loader = build_validation_loader(config, global_batch_size=4)
    assert loader is not None and loader.dataset.unused == []
    assert loader.dataset.streams == {"a": range(9), "b": range(9, 10), "c": range(10, 13)}

    def batches() -> list[list[int]]:
        loader = build_validation_loader(config, global_batch_size=2 * ranks)
        assert loader is not None and len(list(loader)) == len(loader)
        return [batch["sample_ids"].tolist() for batch in loader]

    per_rank = on_ranks(ranks, batches)
    assert len({len(batches) for batches in per_rank}) == 1
    dealt = [batch for step in zip(*per_rank, strict=True) for batch in step]
    expected = [[0, 1], [2, 3], [4, 5], [6, 7], [8, -1], [9, -1], [10, 11], [12, -1]]
    assert dealt == expected  # 8 batches, whatever the number of ranks


def test_a_stream_of_which_no_sample_is_chosen_is_named(data, write_shards, tmp_path):
    streams = {name: {"local": str(write_shards(tmp_path / name, size))} for name, size in {"b": 30, "c": 1}.items()}
    config = data({"a": 8}, validation={"streams": streams})
    loader = build_validation_loader(config, global_batch_size=4, max_samples=3)
    assert loader is not None and loader.dataset.unused == ["c"]


def test_no_validation_data_is_no_loader(data):
    assert build_validation_loader(data({"a": 8}), global_batch_size=8) is None


def test_a_run_of_a_thousand_million_samples_starts_and_resumes_at_once(tmp_path):
    """No list of the samples is made, whatever their number; the shards' index alone is held."""
    shards, samples = 2_000, 500_000
    common = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "zip_data": None,
        "hashes": ["xxh64"],
        "samples": samples,
        "size_limit": 1 << 26,
        "column_names": ["tokens"],
        "column_encodings": ["ndarray:uint16:8"],
        "column_sizes": [16],
    }
    index = [
        common | {"raw_data": {"basename": f"{number}.mds", "bytes": 1, "hashes": {"xxh64": "0"}}}
        for number in range(shards)
    ]
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote/index.json").write_text(json.dumps({"version": 2, "shards": index}))
    streams = {"a": {"local": str(tmp_path / "local"), "remote": str(tmp_path / "remote")}}
    data = DataConfig.model_validate(
        {"seq_len": 8, "order": "seekable", "num_workers": 0, "train": {"streams": streams}}
    )
    tracemalloc.start()
    dataset = build_train_loader(data, global_batch_size=512).dataset
    assert dataset.order is not None
    last = dataset.epoch_size - 512
    ids = dataset.order.ids(np.arange(last, last + 512))
    assert len(np.unique(ids)) == 512 and 0 <= ids.min() <= ids.max() < shards * samples
    assert dataset.place(0) == (0, 0)
    assert dataset.place(shards * samples - 1) == (shards - 1, samples - 1)
    assert dataset.place(samples) == (1, 0)
    with pytest.raises(IndexError):
        dataset.place(shards * samples)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_loaded_while_loader_processes_run_is_theirs(data, workers):
    loader = build_train_loader(data({"a": 64}, num_workers=workers), global_batch_size=8)
    whole = [[batch["sample_ids"].tolist() for batch in loader] for _ in range(2)]
    assert loader.dataset.state_dict(0, True)["epoch"] == 2
    for epoch, step in ((0, 5), (1, 2), (0, 0)):
        loader.dataset.load_state_dict(loader.dataset.state_dict(step * 8, True) | {"epoch": epoch})
        assert [batch["sample_ids"].tolist() for batch in loader] == whole[epoch][step:]
        assert loader.dataset.state_dict(8, True)["epoch"] == epoch
    loader.dataset.load_state_dict({"epoch": -1, "sample_in_epoch": 0})  # of a run that had read nothing
    assert [batch["sample_ids"].tolist() for batch in loader] == whole[0]
