"""Saving in the background: what is saved is the state at that moment, and what fails is told and costs nothing else."""

import contextlib
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from llmtrain.checkpoint import local, save_load
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.tensor_file import TensorFile
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.save_load import RunState, SaveError
from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.staging import Staging
from llmtrain.checkpoint.stored import list_stored
from llmtrain.checkpoint.stores.mounted import MountedStore
from llmtrain.distributed.world import gloo_group, world_from_environment
from llmtrain.schema.config import Config
from llmtrain.train import checkpoints
from llmtrain.train.faults.preemption import Preemption
from tests.support.sharded import build_causal_lm, same, state_of
from tests.support.stores import make_checkpoint
from tests.support.tiny import tiny_config


@pytest.fixture
def config(shards, tmp_path) -> Config:
    return tiny_config(shards, tmp_path / "run")


def about(step: int) -> RunState:
    return RunState(step, tokens=8 * step, config={}, clock={}, data={})


class Session:
    """A model, its optimizer, and a Saver whose warnings are kept."""

    def __init__(self, config: Config, root: Path, background: bool = True):
        self.causal_lm, self.optimizer = build_causal_lm(config)
        self.model = self.causal_lm.hybrid
        self.warnings: list[str] = []
        self.saver = Saver(
            root,
            self.model,
            self.optimizer,
            retention=Retention(),
            background=background,
            group=gloo_group(),
            warn=self.warnings.append,
        )

    def train(self) -> None:
        tokens = torch.arange(64).reshape(2, 32)
        self.causal_lm.loss(tokens, tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> list[torch.Tensor]:
        return state_of(self.model, self.optimizer)

    def reload(self, folder: Path) -> None:
        save_load.load(folder, self.model, self.optimizer)


@contextlib.contextmanager
def slow_disk() -> Iterator[Callable[[], None]]:
    """Inside, no tensor reaches a file before the function that this yields is called."""
    gate, write = threading.Event(), TensorFile._write

    def waiting(self: TensorFile, content: memoryview) -> None:
        assert gate.wait(60)
        write(self, content)

    with patch.object(TensorFile, "_write", waiting):
        yield gate.set


def mutate_while_saving(config: Config, root: Path) -> tuple[bool, bool]:
    """A job: whether the step was free while nothing was written, and whether what was saved is the state before it."""
    session = Session(config, root)
    with session.saver as saver, slow_disk() as release:
        before = session.state
        saver.save(about(3))
        session.train()  # collectives, too, beside those of the save
        free = not (root / "step-00000003").exists()
        assert not same(session.state, before)
        release()
        saver.finish()
        session.reload(root / "step-00000003")
        return free, same(session.state, before)


def mutate_without_staging(config: Config, root: Path) -> tuple[bool, bool]:
    with patch.object(Staging, "copy", lambda self, tensors: dict(tensors)):
        return mutate_while_saving(config, root)


@pytest.mark.parametrize("size", [1, 2])
def test_weights_that_change_during_a_save_do_not_change_what_is_saved(ranks, config, tmp_path, size):
    assert ranks(size).run(mutate_while_saving, config, tmp_path / "a") == [(True, True)] * size
    # And that is the copy's doing:
    assert ranks(size).run(mutate_without_staging, config, tmp_path / "b") == [(True, False)] * size


def slow_then_next(config: Config, root: Path) -> tuple[list[str], list[bool], bool]:
    """A job: saves step 2 while step 1 is held up; warnings, whether each is as it was, whether buffers were reused."""
    session = Session(config, root)
    states, buffers = [], []
    with session.saver as saver, slow_disk() as release:
        for step in (1, 2):
            session.train()
            states.append(session.state)
            if step == 2:
                threading.Timer(0.2, release).start()
            saver.save(about(step))
            buffers.append({name: buffer.data_ptr() for name, buffer in saver._staging._buffers.items()})
        saver.finish()
    kept = []
    for step, state in zip((1, 2), states, strict=True):
        session.reload(root / f"step-0000000{step}")
        kept.append(same(session.state, state))
    return session.warnings, kept, buffers[0] == buffers[1]


def test_a_save_waits_for_the_one_before_and_reports_it(ranks, config, tmp_path):
    for warnings, kept, reused in ranks(2).run(slow_then_next, config, tmp_path):
        [warning] = warnings
        assert warning.startswith("checkpoint: step 2 waited ") and "for the save of step 1" in warning
        assert kept == [True, True] and reused


@contextlib.contextmanager
def limited_files(rank: int, nbytes: int) -> Iterator[None]:
    """On one rank no file can grow beyond so many bytes: the kernel refuses the write, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_on_a_full_disk(config: Config, root: Path, background: bool, failing_rank: int) -> dict[str, Any]:
    session = Session(config, root, background)
    with session.saver as saver:
        saver.save(about(1))
        saver.finish()
        with limited_files(failing_rank, 2000):
            saver.save(about(2))
            saver._thread.join()  # pyright: ignore[reportOptionalMemberAccess]
        session.train()
        saver.poll()
        saver.poll()  # told once
        told = list(session.warnings)
        session.train()
        saver.save(about(3))
        saver.finish()
        with limited_files(failing_rank, 2000):
            saver.save(about(4))
            with pytest.raises(SaveError) as error:
                saver.finish()
    return {"told": told, "after": session.warnings[len(told) :], "raised": str(error.value)}


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failed_save_is_reported_and_training_goes_on(ranks, config, tmp_path, background, failing_rank):
    root = tmp_path / "root"
    for found in ranks(2).run(save_on_a_full_disk, config, root, background, failing_rank):
        [warning] = found["told"]
        assert warning.startswith("WARNING: the checkpoint of step 2 was not saved; training goes on")
        assert f"(rank {failing_rank}: OSError: [Errno 27] File too large)" in warning
        assert found["after"] == []
        assert f"could not write {root}/step-00000004.partial (rank {failing_rank}: " in found["raised"]
    assert [path.name for path in sorted(root.iterdir())] == ["step-00000001", "step-00000003"]  # and no half of one
    for folder in local.folders(root):
        manifests.verify(folder, manifests.read(folder))


def lose_a_rank(config: Config, root: Path, answers: int) -> list[str]:
    """A job: a save whose group breaks after so many answers of the ranks (its folder is made, its tensors are written,
    it is published); the warnings."""
    session = Session(config, root)
    gather, left = dist.all_gather_object, answers

    def breaking(*arguments: Any, **options: Any) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("Connection closed by peer")
        left -= 1
        gather(*arguments, **options)

    with session.saver as saver, patch.object(save_load.dist, "all_gather_object", breaking):
        saver.save(about(1))
        saver._thread.join()  # pyright: ignore[reportOptionalMemberAccess]
        saver.poll()
    return session.warnings


def test_a_rank_lost_in_the_middle_of_a_save_is_reported(ranks, config, tmp_path):
    [[warning]] = ranks(1).run(lose_a_rank, config, tmp_path, 1)
    assert warning.startswith("WARNING: the checkpoint of step 1 was not saved") and "closed by peer" in warning
    assert local.folders(tmp_path) == []


def test_a_rank_lost_after_it_leaves_a_checkpoint_and_no_false_warning(ranks, config, tmp_path):
    assert ranks(1).run(lose_a_rank, config, tmp_path, 2) == [[]]
    [folder] = local.folders(tmp_path)
    manifests.verify(folder, manifests.read(folder))


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no permission to mount")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def save_until_full(config: Config, root: Path, ballast: Path) -> list[str]:
    session = Session(config, root)
    with session.saver as saver:
        saver.save(about(1))
        saver.finish()
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError), ballast.open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
        dist.barrier()
        saver.save(about(2))
        saver._thread.join()  # pyright: ignore[reportOptionalMemberAccess]
        saver.poll()
        dist.barrier()
        ballast.unlink(missing_ok=True)
        dist.barrier()
        saver.save(about(3))
        saver.finish()
    return session.warnings


def test_a_disk_that_fills_up_costs_one_checkpoint(ranks, config, small_disk):
    for warnings in ranks(2).run(save_until_full, config, small_disk / "root", small_disk / "ballast"):
        [warning] = warnings
        assert "the checkpoint of step 2 was not saved" in warning and "No space left on device" in warning
    folders = local.folders(small_disk / "root")
    assert [local.step_of(folder) for folder in folders] == [1, 3]
    for folder in folders:
        manifests.verify(folder, manifests.read(folder))


def end_with_a_failed_save(root: Path) -> list[int]:
    """Steps in the store when this rank may end."""
    world, put, limit = world_from_environment(), MountedStore.put, Mock(spec=Preemption, seconds_left=60.0)

    def slowly(*arguments: Any) -> None:
        time.sleep(0.4)
        put(*arguments)

    with (
        patch.object(MountedStore, "put", slowly),
        patch.object(checkpoints, "_TOGETHER_SECONDS", 0.1),
        contextlib.suppress(SaveError),
        checkpoints.Uploads(str(root / "there"), root / "here", Retention(), world, limit),
    ):
        raise SaveError("full")
    return [found.step for found in list_stored(MountedStore(root / "there")) if found.manifest]


def test_no_rank_ends_before_the_uploads_of_rank_0(ranks, tmp_path):
    """The launcher ends all ranks once one has ended."""
    make_checkpoint(tmp_path / "here", 1)
    assert ranks(2).run(end_with_a_failed_save, tmp_path) == [[1], [1]]
