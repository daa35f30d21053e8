"""Saving and loading by several ranks: all or nothing, and never at the cost of an earlier checkpoint."""

import errno
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.repository import Repository
from llmtrain.schema.config import Config
from tests.support.ranks import RankFailed
from tests.support.sharded import build, same, state_of, write
from tests.support.tiny import tiny_config


def save_and_load(config: Config, root: Path) -> bool:
    """A job: whether a fresh model gets back exactly what was saved, optimizer included."""
    model, optimizer = build(config)
    saved = state_of(model, optimizer)
    folder = write(root, model, optimizer, 3)
    other, its_optimizer = build(config, seed=2)
    assert not same(state_of(other, its_optimizer), saved)
    save_load.load(folder, other, its_optimizer)
    return same(state_of(other, its_optimizer), saved)


@pytest.fixture
def config(shards, tmp_path) -> Config:
    return tiny_config(shards, tmp_path / "run")


@pytest.mark.parametrize("size", [1, 2])
def test_a_round_trip_is_exact(ranks, config, tmp_path, size):
    assert ranks(size).run(save_and_load, config, tmp_path) == [True] * size


def save_many(config: Config, root: Path) -> list[str]:
    model, optimizer = build(config)
    (root / "step-00000099.partial").mkdir(parents=True, exist_ok=True)  # a kill's leftover
    dist.barrier()
    for step in (1, 2, 3, 3):  # the same step again, as after a resume
        write(root, model, optimizer, step, keep_last=2)
    dist.barrier()
    return sorted(path.name for path in root.iterdir())


def test_keep_last_deletes_the_oldest(ranks, config, tmp_path):
    for names in ranks(2).run(save_many, config, tmp_path / "root"):
        assert names == ["step-00000002", "step-00000003", "step-00000099.partial"]
    assert manifests.read(tmp_path / "root" / "step-00000003").step == 3


def save_with_a_full_disk(config: Config, root: Path, failing_rank: int, where: str) -> None:
    model, optimizer = build(config)
    write(root, model, optimizer, 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() == failing_rank:
        with patch(where, full):
            write(root, model, optimizer, 2)
    else:
        write(root, model, optimizer, 2)


@pytest.mark.parametrize(
    ("failing_rank", "where"),
    [
        pytest.param(0, "llmtrain.checkpoint.format.tensor_file.TensorFile._write", id="shards of rank 0"),
        pytest.param(1, "llmtrain.checkpoint.format.tensor_file.TensorFile._write", id="shards of rank 1"),
        pytest.param(0, "llmtrain.checkpoint.format.index.write", id="index"),
        pytest.param(0, "llmtrain.checkpoint.format.manifest.write", id="manifest"),
        pytest.param(0, "llmtrain.checkpoint.save_load.clear", id="folder"),
    ],
)
def test_a_failed_write_is_reported_on_every_rank_and_leaves_the_earlier_checkpoint(
    ranks, config, tmp_path, failing_rank, where
):
    with pytest.raises(RankFailed) as error:
        ranks(2).run(save_with_a_full_disk, config, tmp_path / "root", failing_rank, where)
    assert str(error.value).count("SaveError: could not") + str(error.value).count("SaveError: cannot") == 2
    assert str(error.value).count("No space left on device") >= 2
    found = Repository(tmp_path / "root").newest(pytest.fail)
    assert found is not None and found.step == 1
