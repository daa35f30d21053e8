"""Which rank uploads what, and how long the end of a run waits for it."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from llmtrain.checkpoint.remote.catalogue import stored
from llmtrain.checkpoint.remote.download import verify
from llmtrain.checkpoint.remote.mounted import MountedBucket
from llmtrain.checkpoint.remote.uploader import Answerer
from llmtrain.checkpoint.rotation import Keep
from llmtrain.train.distributed import World
from llmtrain.train.preemption import Preempted
from llmtrain.train.uploads import Uploads
from tests.support.stores import make_checkpoint

ALONE = World(0, 1, 0, 1)


class Limit:
    """In place of a Preemption."""

    def __init__(self, seconds_left: float):
        self.seconds_left = seconds_left


def uploads(address: str | None, root: Path, world: World = ALONE, seconds_left: float = 0.3) -> Uploads:
    limit: Any = Limit(seconds_left)
    return Uploads(address, root, Keep(), world, limit)


def test_nothing_is_done_without_a_store(tmp_path):
    with uploads(None, tmp_path) as nothing:
        pass
    nothing.finish()
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_run_waits_for_its_uploads(tmp_path, capfd):
    make_checkpoint(tmp_path / "here", 1)
    with uploads(str(tmp_path / "there"), tmp_path / "here") as made:
        make_checkpoint(tmp_path / "here", 2)
    made.finish()
    assert [found.step for found in stored(MountedBucket(tmp_path / "there")) if found.manifest] == [1, 2]
    assert "uploaded step-00000002" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "at_least"),
    [(Preempted(1, Path("step-00000001")), 0.3), (RuntimeError(), 0.0)],
    ids=["preempted", "failed"],
)
def test_a_run_that_ends_early_waits_no_longer_than_it_may(tmp_path, monkeypatch, capfd, error, at_least):
    release = threading.Event()
    monkeypatch.setattr(MountedBucket, "put", lambda *arguments: release.wait(20))
    make_checkpoint(tmp_path / "here", 1)
    began = time.monotonic()
    with pytest.raises(type(error)), uploads(str(tmp_path / "there"), tmp_path / "here"):
        raise error
    assert at_least <= time.monotonic() - began < 5
    assert "the same command again goes on with the upload" in capfd.readouterr().err
    release.set()


def upload_from_two_nodes(roots: list[Path], store: Path) -> None:
    """A job: each rank is a node of its own."""
    rank = dist.get_rank()
    with patch("llmtrain.train.uploads.Answerer", partial(Answerer, seconds=0.1)):
        made = uploads(str(store), roots[rank], World(rank, 2, 0, 1))
    made.finish()


@pytest.mark.parametrize("shared", [True, False])
def test_each_node_sends_the_files_that_it_has(ranks, tmp_path, monkeypatch, shared):
    one, other = tmp_path / "one", tmp_path / ("one" if shared else "other")
    folder = make_checkpoint(one, 1)
    if not shared:
        (other / "step-00000001.partial").mkdir(parents=True)
        for i in (1, 2):
            (folder / f"shard-{i}.bin").rename(other / "step-00000001.partial" / f"shard-{i}.bin")
    ranks(2).run(upload_from_two_nodes, [one, other], tmp_path / "there")
    [found] = stored(MountedBucket(tmp_path / "there"))
    verify(found)
    assert not list(one.glob(".rank0-*"))
