"""SIGTERM, as a job manager sends it: the run saves, ends with its own status, and goes on as if nothing had been."""

import contextlib
import os
import signal
import time
from unittest.mock import patch

import pytest

from tests.cli.test_train import LAUNCHERS, command, wait_for
from tests.support.project import LLMTRAIN, Project, living
from tests.support.slurm import Cluster

ENDLESS = {"train.duration": "100000 steps", "checkpoint.interval": "50000 steps", "schedule.type": "constant"}


def steps(project: Project) -> int:
    file = project.run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.parametrize(
    "launcher", ["llmtrain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one process", "torchrun"))]
)
def test_a_preempted_run_saves_and_goes_on(ranks, project, launcher):
    project.write(ENDLESS)
    how = LAUNCHERS[launcher]() if launcher in LAUNCHERS else [*LLMTRAIN, "train"]
    with project.running(project.start([*how, "run.yaml"])) as process:
        wait_for(lambda: steps(project) > 3)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=110)  # less than the 120 s after which it would end anyway
        assert living(project.folder) == []
    if launcher != "torchrun":  # which reports the signal
        assert process.returncode == 143
        assert "Traceback" not in text
    assert text.count("SIGTERM: saving after this step, within 120 s") == 1
    [name] = project.checkpoints()
    step = int(name[5:])
    assert f"SIGTERM: saved step {step} in {project.run_dir}/checkpoints/{name}; the same command continues" in text
    assert steps(project) == step  # nothing was done that is not in it
    # On another number of ranks, too.
    size = 1 if launcher == "llmtrain" else 2
    changes = ["schedule.type=constant", f"train.duration={step + 3} steps"]
    (status, text), *_ = ranks(size).run(command, "train", str(project.folder / "run.yaml"), *changes)
    assert status == 0, text
    assert f"(step {step} of {step + 3})" in text


@pytest.mark.parametrize(
    "arguments",
    [["--nproc", "2", "data.num_workers=1"], pytest.param(["data.num_workers=1"], marks=pytest.mark.slow)],
    ids=["two", "one process"],
)
def test_ctrl_c_saves_and_ends_with_130(project, arguments):
    """A terminal sends it to every process of the command: the launcher, the ranks, and the workers that read data."""
    project.write(ENDLESS)
    with project.running(project.start_warm("train", "run.yaml", *arguments, own_session=True)) as process:
        wait_for(lambda: steps(project) > 3)
        os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=110)
        assert living(project.folder) == []
    assert process.returncode == 130, text
    [name] = project.checkpoints()
    assert text.count("Ctrl-C: saving after this step, within 120 s; a second one ends at once") == 1
    assert (
        f"Ctrl-C: saved step {int(name[5:])} in {project.run_dir}/checkpoints/{name}; the same command continues"
        in text
    )
    assert "Traceback" not in text and steps(project) == int(name[5:])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--nproc", "2"]], ids=["one process", "two"])
def test_a_signal_during_the_start_is_143_as_well(project, arguments):
    """Composer, whose import is the longest part of the start, would make it 1."""
    with project.running(project.start([*LLMTRAIN, "train", "run.yaml", *arguments])) as process:
        wait_for(lambda: any(has_torch(pid) for pid in living(project.folder) if arguments == [] or pid != process.pid))
        time.sleep(3)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=110)
        assert living(project.folder) == []
    assert process.returncode == 143, text
    assert text == "SIGTERM: ending; there is nothing to save\n"
    assert not (project.run_dir / "lock.json").exists()


@pytest.mark.slow
def test_a_signal_to_one_rank_reaches_all(project):
    """A job manager that drains one node of many signals that node alone."""
    project.write(ENDLESS)
    with project.running(project.start([*LLMTRAIN, "train", "--nproc", "2", "run.yaml"])) as process:
        wait_for(lambda: steps(project) > 3)
        children = [pid for pid in living(project.folder) if pid != process.pid]
        one = next(pid for pid in children if b"\0RANK=1\0" in environment(pid))
        os.kill(one, signal.SIGTERM)
        text, _ = process.communicate(timeout=110)
    assert process.returncode == 143
    [name] = project.checkpoints()
    assert f"saved step {int(name[5:])}" in text and "Traceback" not in text


@pytest.mark.slow
def test_a_slurm_job_saves_before_its_time_limit_and_goes_on_when_it_is_started_again(project):
    project.write(ENDLESS | {"train.microbatch_size": 4})
    cluster = Cluster(project.folder, real_torchrun=True)
    with project.running(cluster.start("run.yaml")) as process:
        wait_for(lambda: steps(project) > 3)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=110)
        assert living(project.folder) == []
    [name] = project.checkpoints()
    step = int(name[5:])
    assert f"SIGTERM: saved step {step}" in text, text
    assert cluster.calls.splitlines()[-2:] == ["scancel --signal=TERM 4711", "scontrol requeue 4711"]
    with project.running(
        cluster.start("run.yaml", f"train.duration={step + 3} steps", SLURM_RESTART_COUNT="1")
    ) as process:
        text, _ = process.communicate(timeout=110)
    assert process.returncode == 0, text
    assert f"(step {step} of {step + 3})" in text


def has_torch(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
        return "libtorch_cpu" in file.read()
    return False


def environment(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return b"\0" + file.read()


def test_a_run_whose_folder_is_renamed_reports_it_and_saves_nothing_under_the_old_name(project):
    project.write(ENDLESS | {"checkpoint.interval": "4 steps"})
    renamed = project.folder / "renamed"
    with project.running(project.start_warm("train", "run.yaml")) as process:
        wait_for(lambda: (project.run_dir / "checkpoints" / "step-00000004").exists())
        project.run_dir.rename(renamed)
        time.sleep(3)  # some saves
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=110)
    assert process.returncode == 1
    assert f"{project.run_dir} was renamed to {renamed} while the run works in it: give it its name back" in text
    assert "Traceback" not in text and not project.run_dir.exists()


def command_on_a_full_disk(*arguments: str) -> tuple[int, str]:
    """A job for Ranks.run: `llmtrain ...`, which cannot make the folder of a checkpoint."""
    with patch("llmtrain.checkpoint.save_load.clear", side_effect=OSError("No space left on device")):
        return command(*arguments)


def test_a_final_checkpoint_that_cannot_be_written_fails_the_run(ranks, project):
    [(status, text)] = ranks(1).run(command_on_a_full_disk, "train", str(project.folder / "run.yaml"))
    assert status == 1, text
    assert text.strip().splitlines()[-1].startswith("cannot create ")
    assert "Traceback" not in text
