"""The wait for uploads at the end of a run."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.save_load import SaveError
from llmtrain.checkpoint.stored import list_stored
from llmtrain.checkpoint.stores.mounted import MountedStore
from llmtrain.data.shards.index import ShardError
from llmtrain.distributed.world import World
from llmtrain.errors import Preempted
from llmtrain.train.checkpoints import Uploads
from tests.support.stores import make_checkpoint

ALONE = World(0, 1, 0, 1)


class Limit:
    """A stand-in for Preemption."""

    def __init__(self, seconds_left: float):
        self.seconds_left = seconds_left


def uploads(address: str | None, root: Path) -> Uploads:
    limit: Any = Limit(0.3)
    return Uploads(address, root, Retention(), ALONE, limit)


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
    assert [found.step for found in list_stored(MountedStore(tmp_path / "there")) if found.manifest] == [1, 2]
    assert "uploaded step-00000002" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "at_least"),
    [(Preempted(1, Path("step-00000001")), 0.3), (RuntimeError(), 0.0)],
    ids=["preempted", "failed"],
)
def test_a_run_that_ends_early_waits_no_longer_than_it_may(tmp_path, monkeypatch, capfd, error, at_least):
    release = threading.Event()
    monkeypatch.setattr(MountedStore, "put", lambda *arguments: release.wait(60))
    make_checkpoint(tmp_path / "here", 1)
    began = time.monotonic()
    with pytest.raises(type(error)), uploads(str(tmp_path / "there"), tmp_path / "here"):
        raise error
    assert at_least <= time.monotonic() - began < 50
    assert "the same command again goes on with the upload" in capfd.readouterr().err
    release.set()


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), ShardError("damaged"), SaveError("full")],
    ids=lambda e: type(e).__name__,
)
def test_a_full_disk_ends_a_run_only_when_its_uploads_are_done(tmp_path, error):
    make_checkpoint(tmp_path / "here", 1)
    with pytest.raises(type(error)), uploads(str(tmp_path / "there"), tmp_path / "here"):
        raise error
    assert [found.step for found in list_stored(MountedStore(tmp_path / "there")) if found.manifest] == [1]
