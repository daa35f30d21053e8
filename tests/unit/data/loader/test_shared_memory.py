from __future__ import annotations

import os
import signal
import tempfile
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.data.loader import shared_memory
from llmtrain.data.loader.loaders import build_train_loader
from llmtrain.data.loader.shared_memory import dataset_lock, remove_stale_segments
from llmtrain.errors import RunError
from llmtrain.schema.data import DataConfig

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is looked up in Linux's /dev/shm")
NUMBER = "987654"


@pytest.fixture(autouse=True)
def any_age(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "_MIN_AGE", -1.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_only_segments_without_a_living_process_are_removed(tmp_path):
    dead, lock = Path(f"/dev/shm/{NUMBER}_resume"), tmp_path / f"{NUMBER}_cache_filelock"
    other = Path(f"/dev/shm/{NUMBER}_not_of_streaming")
    alive = SharedMemory(f"{int(NUMBER) + 1}_locals", create=True, size=16)
    for path in (dead, lock, other):
        path.write_bytes(b"x")
    try:
        removed = remove_stale_segments()
        assert {dead.name, lock.name} <= set(removed)
        assert not dead.exists() and not lock.exists()
        assert other.exists() and Path(f"/dev/shm/{alive.name}").exists()
    finally:
        other.unlink()
        alive.close()
        alive.unlink()


def test_a_position_left_by_a_killed_run_is_not_adopted(tmp_path, write_shards):
    folder = write_shards(tmp_path / "a", 16)
    data = DataConfig.model_validate(
        {"seq_len": 8, "num_workers": 0, "num_canonical_nodes": 1, "train": {"streams": {"a": {"local": str(folder)}}}}
    )

    def die_with_a_position() -> None:
        loader = build_train_loader(data, global_batch_size=4)
        loader.dataset.load_state_dict({"epoch": 7, "sample_in_epoch": 8, "shuffle_seed": 1, "num_canonical_nodes": 1})
        os.kill(os.getpid(), signal.SIGKILL)

    process = get_context("fork").Process(target=die_with_a_position)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert len(list(build_train_loader(data, global_batch_size=4))) == 4


@pytest.mark.parametrize("order", ["streaming", "seekable"])
def test_a_list_of_samples_that_shared_memory_cannot_hold_is_refused(write_shards, tmp_path, monkeypatch, order):
    """Writing it would end the process by SIGBUS."""
    streams = {"a": {"local": str(write_shards(tmp_path / "a", 16))}}
    data = DataConfig.model_validate({"seq_len": 8, "num_workers": 0, "order": order, "train": {"streams": streams}})
    loader = build_train_loader(data, global_batch_size=4)
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda folder: SimpleNamespace(total=200, free=100))
    if order == "seekable":
        assert len(list(loader)) == 4
        return
    with pytest.raises(RunError, match=r"takes 128 B of shared memory, but /dev/shm has 100 B free; .*--shm-size"):
        list(loader)


def test_several_ranks_need_the_process_group_first(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AssertionError, match="process group"), dataset_lock():
        pass
