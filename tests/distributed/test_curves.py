"""Loss curves on a CPU in fp32 do not depend on how a run is split: over ranks, over microbatches, over sessions."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.support import sequential_ssd
from tests.support.runs import Run, read_tensors, train
from tests.support.tiny import STEPS_PER_EPOCH, tiny_config

STEPS = 24
DROPOUT = {"model.dropout": 0.1, "checkpoint.interval": "5 steps"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one_batch(ranks, shards, folder) -> Run:
    """One rank, the whole batch at once, no dropout."""
    [result] = ranks(1).run(train, tiny_config(shards, folder / "one", {"train.microbatch_size": 8}))
    return result


def assert_same_curve(run: Run, reference: Run, relative: float = 1e-5) -> None:
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    assert run.losses == pytest.approx(reference.losses, rel=relative, abs=0)
    assert run.validation == pytest.approx(reference.validation, rel=relative, abs=0)


def test_a_run_learns(one_batch):
    assert one_batch.losses[1] == pytest.approx(5.70, abs=0.1)  # ln(300): nothing is known yet
    assert one_batch.losses[STEPS] < 4.5
    assert one_batch.validation[STEPS] < one_batch.validation[12] < 5


@pytest.mark.parametrize(
    ("size", "microbatch", "sync"),
    [
        (2, 4, None),
        pytest.param(2, 1, True, marks=pytest.mark.ci),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((1, 1, None), (1, 4, None), (1, 1, True), (2, 1, False))
        ),
    ],
)
def test_ranks_and_microbatches_do_not_change_the_curve(ranks, shards, folder, one_batch, size, microbatch, sync):
    changes = {"train.microbatch_size": microbatch, "train.sharding.sync_every_microbatch": sync}
    runs = ranks(size).run(train, tiny_config(shards, folder / f"{size}-{microbatch}-{sync}", changes))
    assert_same_curve(runs[0], one_batch)
    assert all(run.samples == one_batch.samples for run in runs)


def test_another_seed_is_another_curve(ranks, shards, folder, one_batch):
    """The comparison above tells this curve from the others."""
    [other] = ranks(1).run(train, tiny_config(shards, folder / "seed", {"seed": 4}))
    assert other.losses != pytest.approx(one_batch.losses, rel=1e-4, abs=0)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def size(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def uninterrupted(ranks, shards, folder, size) -> tuple[Path, Run]:
    """With dropout: its folder, and what it did."""
    run_dir = folder / f"whole-{size}"
    return run_dir, ranks(size).run(train, tiny_config(shards, run_dir, DROPOUT))[0]


def interrupt_and_resume(ranks, shards, run_dir, size, stop_before, changes=DROPOUT) -> Run:
    """A run killed before step `stop_before` (from 0) and started again; samples of both sessions."""
    config = tiny_config(shards, run_dir, changes)
    first = ranks(size).run(train, config, stop_before)[0]
    assert max(first.samples) == stop_before
    second = ranks(size).run(train, config)[0]
    return Run(second.losses, first.samples | second.samples, second.validation)


@pytest.mark.parametrize(
    ("stop_before", "interval"),
    [
        pytest.param(10, 5, id="mid-epoch, nothing lost", marks=pytest.mark.slow),
        pytest.param(13, 5, id="mid-epoch, three steps lost"),
        pytest.param(STEPS_PER_EPOCH, STEPS_PER_EPOCH, id="between epochs", marks=pytest.mark.slow),
        pytest.param(
            STEPS_PER_EPOCH + 2, STEPS_PER_EPOCH, id="after an epoch's end, two steps lost", marks=pytest.mark.ci
        ),
    ],
)
def test_a_resumed_run_is_bit_identical(ranks, shards, folder, tmp_path, uninterrupted, size, stop_before, interval):
    whole_dir, whole = uninterrupted
    changes = DROPOUT | {"checkpoint.interval": f"{interval} steps"}
    resumed = interrupt_and_resume(ranks, shards, tmp_path / "run", size, stop_before, changes)
    assert resumed.losses == whole.losses
    assert resumed.samples == whole.samples
    assert resumed.validation == whole.validation
    last = f"checkpoints/step-{STEPS:08d}"
    assert_equal_tensors(read_tensors(tmp_path / "run" / last), read_tensors(whole_dir / last))


def assert_equal_tensors(a, b) -> None:
    assert a.keys() == b.keys()
    assert len(a) > 40 and {name.partition(".")[0] for name in a} == {"model", "optimizer"}
    for name in a:
        assert torch.equal(a[name], b[name]) if torch.is_tensor(a[name]) else a[name] == b[name], name


@pytest.mark.slow
def test_without_step_rng_dropout_would_not_continue(ranks, shards, folder, tmp_path):
    whole = ranks(1).run(train_without_step_rng, tiny_config(shards, tmp_path / "whole", DROPOUT))[0]
    config = tiny_config(shards, tmp_path / "run", DROPOUT)
    ranks(1).run(train_without_step_rng, config, 10)
    resumed = ranks(1).run(train_without_step_rng, config)[0]
    assert resumed.samples.items() <= whole.samples.items()
    assert resumed.losses != whole.losses


def train_without_step_rng(*args) -> Run:
    with patch("llmtrain.train.callbacks.step_rng.StepRNG.batch_start"):
        return train(*args)


@pytest.mark.slow
def test_without_the_data_position_the_epoch_would_start_again(ranks, shards, folder, tmp_path, one_batch):
    config = tiny_config(shards, tmp_path / "run", {"checkpoint.interval": "5 steps"})
    ranks(1).run(train_without_position, config, 10)
    resumed = ranks(1).run(train_without_position, config)[0]
    assert resumed.samples[11] == one_batch.samples[1] != one_batch.samples[11]
    assert resumed.losses[11] != one_batch.losses[11]


def train_without_position(*args) -> Run:
    def start_of_epoch(self, state):
        dataset = state._dataset_of(state.train_dataloader)
        return {"position": dataset.state_dict(0, True), "fingerprint": self.fingerprint()}

    with patch("llmtrain.train.callbacks.checkpointing.Checkpointing.data_position", start_of_epoch):
        return train(*args)


@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 1, marks=pytest.mark.slow), (1, 2)])
def test_a_run_continues_on_another_number_of_ranks(ranks, shards, tmp_path, one_batch, before, after):
    config = tiny_config(shards, tmp_path / "run", {"checkpoint.interval": "5 steps"})
    ranks(before).run(train, config, 12)
    resumed = ranks(after).run(train, config)[0]
    assert_same_curve(resumed, one_batch)
    assert resumed.samples == {step: ids for step, ids in one_batch.samples.items() if step > 10}


def test_loader_processes_do_not_change_what_is_resumed(ranks, shards, tmp_path, one_batch):
    """Batches that workers have fetched ahead are not counted as seen."""
    changes = {"checkpoint.interval": "5 steps", "data.num_workers": 2}
    resumed = interrupt_and_resume(ranks, shards, tmp_path / "run", 1, 12, changes)
    assert resumed.samples == one_batch.samples
    assert_same_curve(resumed, one_batch)


@pytest.mark.slow
@pytest.mark.parametrize("legs", [((4, 6), (2, 12), (1, 18), (4, None)), ((8, 6), (4, 12), (2, 18), (1, None))])
def test_a_run_moves_over_ranks(ranks, shards, tmp_path, one_batch, legs):
    """legs: numbers of ranks, each with the step (from 0) before which it is killed."""
    changes = {"checkpoint.interval": "3 steps", "train.microbatch_size": 1, "checkpoint.keep_last": 2}
    config = tiny_config(shards, tmp_path / "run", changes)
    samples: dict[int, list[int]] = {}
    for size, stop_before in legs:
        runs = ranks(size).run(train, config, stop_before)
        assert all(run.samples == runs[0].samples for run in runs)
        assert min(runs[0].samples) == len(samples) + 1
        samples |= runs[0].samples
    assert_same_curve(runs[0], one_batch)
    assert samples == one_batch.samples


def train_with_another_ssd(*args) -> Run:
    with patch("llmtrain.kernels.ssd.reference.build", sequential_ssd.build):
        before = sequential_ssd.SequentialSSD.calls
        result = train(*args)
        assert sequential_ssd.SequentialSSD.calls > before
    return result


@pytest.mark.ci
def test_a_run_continues_with_other_kernels(ranks, shards, tmp_path, one_batch):
    """Backends are free: a checkpoint knows nothing of them. For the SSD, whose reference alone trains on a CPU, other
    chunks and the plain recurrence stand for other kernels: they add up in another order."""
    legs = (
        (6, train, "reference", 16),
        (12, train_with_another_ssd, "sdpa", 16),
        (18, train, "sdpa:cpu", 8),
        (None, train_with_another_ssd, "reference", 32),
    )
    samples: dict[int, list[int]] = {}
    for stop_before, job, attention, chunk_size in legs:
        changes = {"model.blocks.s.backend": attention, "model.blocks.m.chunk_size": chunk_size}
        config = tiny_config(shards, tmp_path / "run", changes | {"checkpoint.interval": "6 steps"})
        [run] = ranks(1).run(job, config, stop_before)
        samples |= run.samples
    assert_same_curve(run, one_batch)
    assert samples == one_batch.samples
