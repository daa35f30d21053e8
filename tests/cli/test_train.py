"""`llmtrain train` from the outside: every launcher, resuming, refusing, and dying well."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.cli import main
from llmtrain.distributed.run_lock import RunLock
from llmtrain.distributed.world import free_port
from tests.support.project import LLMTRAIN, Project, copy_of, living, seconds_of_children

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "train.py")


def command(*arguments: str) -> tuple[int, str]:
    """A job for Ranks.run: `llmtrain ...` as one rank; (exit status, output). Saves the import of Composer."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main(arguments)
    return status, printed.getvalue()


def test_one_process_trains_and_reports(finished):
    project, text = finished
    assert "step 6/6" in text
    assert "tiny: 6 steps, 1,536 tokens" in text
    assert "validation loss  " in text and "bits per byte  " in text
    assert "sample, after the prompt 'the quick':" in text
    assert "learning rate: warmup to 0.003 at step 4, cosine decay to 0.0003 at step 6" in text
    assert "llmtrain train --fresh run.yaml train.duration='12 steps'   # anew" in text
    assert project.checkpoints() == ["step-00000006"]
    assert (project.run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in text and "Warning" not in text


def torchrun(processes: int) -> list[str]:
    port = f"--master-port={free_port()}"
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        port,
        "-m",
        "llmtrain",
        "train",
    ]


def composer(processes: int) -> list[str]:
    port = f"--master_port={free_port()}"
    return [sys.executable, "-m", "composer.cli.launcher", "-n", str(processes), port, SCRIPT]


LAUNCHERS: dict[str, Callable[[], list[str]]] = {
    "llmtrain": lambda: [*LLMTRAIN, "train", "--nproc", "2"],
    "torchrun": lambda: torchrun(2),
    "composer": lambda: composer(2),
}


@pytest.mark.ci
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("composer", marks=pytest.mark.slow)])
def test_other_launchers_run_two_ranks(project, finished, launcher):
    status, text = project.run(*LAUNCHERS[launcher](), "run.yaml")
    assert status == 0, text
    assert text.count("tiny: 6 steps, 1,536 tokens") == 1
    assert (
        text.count("start: imports of Composer, StreamingDataset and what they need  ") == 1
    )  # the longest part of a start, by rank 0 alone
    assert "Traceback" not in text
    ours, theirs = (validation_loss(printed) for printed in (text, finished[1]))
    assert ours == pytest.approx(theirs, abs=2e-4)  # printed with four decimals


def validation_loss(text: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith("validation loss")]
    return float(line.split()[2])


def test_the_same_command_again_finds_the_run_complete(ranks, finished, tmp_path):
    project = copy_of(finished, tmp_path)
    [(status, text)] = ranks(1).run(command, "train", str(project.folder / "run.yaml"))
    assert status == 0, text
    assert "resumed from" in text and "(step 6 of 6)" in text
    assert "tiny: 6 steps" in text
    assert project.checkpoints() == ["step-00000006"]


def test_what_is_free_may_change_and_the_run_goes_on(ranks, finished, tmp_path):
    project = copy_of(finished, tmp_path)
    changes = ["train.microbatch_size=4", "train.activation_checkpointing={type: selective}", "train.duration=9 steps"]
    [(status, text), _] = ranks(2).run(command, "train", str(project.folder / "run.yaml"), *changes)
    assert status == 0, text
    assert "(step 6 of 9)" in text and "step 9/9" in text
    assert project.checkpoints() == ["step-00000006", "step-00000009"]


@pytest.mark.ci
def test_a_wsd_run_is_extended_from_before_its_decay(ranks, finished, tmp_path, monkeypatch):
    project = copy_of(finished, tmp_path)
    folder, file = project.folder, str(project.folder / "run.yaml")
    schedule = ["schedule={type: wsd, warmup: 1 steps, decay: 3 steps}", "checkpoint.keep_last=1"]
    train = ["train", file, *schedule, "eval.prompt=null", f"run_dir={folder / 'run'}"]
    [(status, text)] = ranks(1).run(command, *train, "--fresh", "train.duration=6 steps")
    assert status == 0, text
    assert "learning rate: warmup to 0.003 at step 1, constant to step 3, linear decay to 0 at step 6" in text
    assert project.checkpoints() == ["step-00000003", "step-00000006"]

    copying, longer = [line.strip() for line in text.splitlines() if "-longer" in line]
    assert subprocess.run(["bash", "-ec", copying]).returncode == 0
    words = shlex.split(longer, comments=True)  # "uv run llmtrain train …" where uv runs the tests
    arguments = words[words.index("llmtrain") + 1 :]
    [(status, text)] = ranks(1).run(command, *arguments)
    assert status == 0 and "WARNING" not in text, text
    assert "the learning rate was 0.003 at step 3 and is 0.003 at step 4" in text

    [(status, text)] = ranks(1).run(command, *train, "train.duration=8 steps")
    assert status == 0, text
    assert "WARNING: train.duration was 6 steps and is 8: the learning rate was 0.001 at step 6" in text
    assert f"copy {folder}/run/checkpoints/step-00000003 to" in text


def in_process(project: Project, monkeypatch, capsys, *arguments: str) -> tuple[int, str, float]:
    """(exit status, standard error, seconds of this process: a busy machine must not count)."""
    monkeypatch.chdir(project.folder)
    began = time.process_time()
    status = main(["train", "run.yaml", *arguments])
    captured = capsys.readouterr()
    return status, captured.err, time.process_time() - began


@pytest.mark.parametrize("arguments", [[], ["--nproc", "2"], ["--fresh"]], ids=["one process", "two", "fresh"])
def test_a_run_that_another_process_trains_is_refused_and_can_be_read(
    finished, tmp_path, monkeypatch, capsys, arguments
):
    project = copy_of(finished, tmp_path)
    monkeypatch.setattr("llmtrain.train.worker._train", None)
    monkeypatch.setattr("llmtrain.distributed.launch.launch", None)
    with RunLock(project.run_dir):
        before = sorted(project.folder.rglob("*"))
        status, text, seconds = in_process(project, monkeypatch, capsys, *arguments)
        assert status == 2 and seconds < 5
        assert text.startswith(f"{project.run_dir} is held by process {os.getpid()} on ") and text.count("\n") == 1
        assert sorted(project.folder.rglob("*")) == before
        assert main(["checkpoint", "verify", str(project.run_dir)]) == 0
    assert not (project.run_dir / "lock.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "composer"])
def test_a_run_that_another_process_trains_is_refused_once_under_a_launcher(project, launcher):
    with RunLock(project.run_dir):
        status, text = project.run(*LAUNCHERS[launcher](), "run.yaml")
        assert status != 0
        assert text.count("is held by process") == 1, text
        assert [path.name for path in project.run_dir.iterdir()] == ["lock.json"]


def early_ranks(monkeypatch, project, capsys, probable: int, chosen: int) -> list[tuple[int, int]]:
    """The ranks of each launch, and those of them that were started before."""
    launched: list[tuple[int, int]] = []

    def launch(command, ranks, *settings):
        launched.append((ranks, len(settings[-1].waiting)))
        return 0

    monkeypatch.setattr("llmtrain.commands.train.probable_processes", lambda _: probable)
    monkeypatch.setattr("llmtrain.commands.train.chosen_processes", lambda _: chosen)
    monkeypatch.setattr("llmtrain.distributed.launch.launch", launch)
    assert in_process(project, monkeypatch, capsys)[:2] == (0, "")
    return launched


def test_ranks_begin_before_the_config_is_read_if_their_number_is_right(project, monkeypatch, capsys):
    assert early_ranks(monkeypatch, project, capsys, probable=2, chosen=2) == [(2, 2)]
    assert early_ranks(monkeypatch, project, capsys, probable=4, chosen=2) == [(2, 0)]


@pytest.mark.parametrize("arguments", [[], ["--nproc", "2"]], ids=["one process", "two"])
def test_a_file_where_a_checkpoint_belongs_is_refused(project, monkeypatch, capsys, arguments):
    (project.run_dir / "checkpoints").mkdir(parents=True)
    (project.run_dir / "checkpoints" / "step-00000006").touch()
    status, text, _ = in_process(project, monkeypatch, capsys, *arguments)
    assert status == 2
    assert "checkpoints has something else where a checkpoint's folder belongs: step-00000006; move it away" in text


@pytest.mark.parametrize("arguments", [[], ["--nproc", "2"]], ids=["one process", "two"])
def test_a_run_of_another_meaning_is_refused_before_anything_starts(finished, tmp_path, monkeypatch, capsys, arguments):
    project = copy_of(finished, tmp_path)
    monkeypatch.setattr("llmtrain.train.worker._train", None)
    monkeypatch.setattr("llmtrain.distributed.launch.launch", None)
    changes = ["optimizer.lr=0.1", "model.blocks.m.d_state=16", "data.shuffle_seed=1", "train.microbatch_size=1"]
    status, text, seconds = in_process(project, monkeypatch, capsys, *arguments, *changes)
    assert status == 2 and seconds < 5
    assert text.splitlines()[1:-1] == [
        "  model.blocks.m.d_state: 8 -> 16",
        "  data.shuffle_seed: 9176 -> 1",
        "  optimizer.lr: 0.003 -> 0.1",
    ]
    assert "step-00000006 was written by a run that means something else:" in text.splitlines()[0]
    assert "--fresh" in text.splitlines()[-1]


def test_other_shards_are_another_run(finished, tmp_path, monkeypatch, capsys):
    project = copy_of(finished, tmp_path)
    changes = [f"data.train.streams.text.{key}={value}" for key, value in {"split": "validation"}.items()]
    monkeypatch.setattr("llmtrain.train.worker._train", None)
    status, text, _ = in_process(project, monkeypatch, capsys, *changes)
    assert status == 2
    assert "  data: the shards are not those the run was started on" in text


def test_fresh_starts_anew_and_keeps_the_old_run_aside(ranks, finished, tmp_path):
    project = copy_of(finished, tmp_path)
    arguments = ["--fresh", str(project.folder / "run.yaml"), "optimizer.lr=0.1", "train.duration=5 steps"]
    [(status, text)] = ranks(1).run(command, "train", *arguments)
    assert status == 0, text
    [aside] = project.folder.glob("run.before-*")
    assert f"the earlier run is now in {aside}" in text
    assert (aside / "checkpoints" / "step-00000006" / "manifest.json").exists()
    assert project.checkpoints() == ["step-00000005"]
    assert "resumed" not in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train.microbatch_siz=1"], "did you mean microbatch_size?"),
        (["model.d_model=33"], "model.blocks.m.head_dim"),
        (["data.train.streams.text.local=/nowhere"], "data.train.streams.text.local"),
        (["--nproc", "3"], "must be a multiple of"),
        (["--nproc", "0"], "0"),
        (["--nproc", "1000000", "train.global_batch_size=8000000"], "expected at most"),
    ],
)
def test_a_bad_config_starts_nothing(project, arguments, expected):
    """The command, in a process of its own, does not even import torch's distributed part."""
    program = (
        "import sys\nfrom llmtrain.cli import main\nstatus = main(sys.argv[1:])\n"
        "assert 'torch.distributed' not in sys.modules\nsys.exit(status)"
    )
    began = seconds_of_children()
    status, text = project.run(sys.executable, "-c", program, "train", "run.yaml", *arguments)
    assert status == 2, text
    assert seconds_of_children() - began < 5
    assert expected in text and "Traceback" not in text
    assert not project.run_dir.exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.blocks.m.backend=triton", "model.blocks.m.backend = triton: ssd backend 'triton' cannot serve here"),
        ("train.cuda_graphs=on", "train.cuda_graphs = on: there can be no CUDA graphs here"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has them")
def test_what_this_machine_does_not_have_is_refused_before_data_are_prepared(
    project, monkeypatch, capsys, setting, said
):
    monkeypatch.chdir(project.folder)
    prepared = [
        "data.train=null",
        "data.validation=null",
        "data.prepare={sources: [stdlib], out: new, seq_len: 32, vocab_size: 300}",
    ]
    assert main(["train", "run.yaml", *prepared, setting]) == 2
    assert said in capsys.readouterr().err
    assert not Path("new").exists()


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("composer", marks=pytest.mark.slow)])
def test_a_bad_config_under_a_launcher_is_reported_once(project, launcher):
    status, text = project.run(*LAUNCHERS[launcher](), "run.yaml", "train.microbatch_siz=1")
    assert status != 0
    assert text.count("did you mean microbatch_size?") == 1
    assert not project.run_dir.exists()


def rank_process(launcher: int, folder: Path, rank: int) -> int:
    """Process id of a rank that our launcher started: it starts them in their order."""
    children = []
    for pid in living(folder):
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            children += [pid] if parent == launcher else []
    return sorted(children)[rank]


def wait_for(condition: Callable[[], Any], seconds: float = 400) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    pytest.fail("waited in vain")


@pytest.mark.ci
@pytest.mark.parametrize("stages", [1, 2])
def test_a_killed_rank_ends_the_run_with_one_error_and_it_resumes(ranks, project, stages):
    steps = {"train.duration": "100000 steps", "checkpoint.interval": "5 steps", "checkpoint.keep_last": 2}
    project.write(steps | {"train.parallel.pipeline": stages})
    with project.running(project.start_warm("train", "run.yaml", "--nproc", "2")) as process:
        wait_for((project.run_dir / "checkpoints" / "step-00000010").exists)
        os.kill(rank_process(process.pid, project.folder, 1), signal.SIGKILL)
        began = time.monotonic()
        text, _ = process.communicate(timeout=400)
        assert time.monotonic() - began < 200  # the ranks would wait for each other for longer
        assert process.returncode == 128 + signal.SIGKILL
        assert living(project.folder) == []
    # On a busy machine, a save that the next one waited for is reported too.
    *warnings, error = [
        line
        for line in text.splitlines()
        if not line.startswith(("start: ", "train.sharding", "learning rate: ", "step ", "checkpoint: "))
    ]
    assert error == "rank 1 was killed by SIGKILL (the system may have run out of memory); the other ranks were stopped"
    complete = [int(name[5:13]) for name in project.checkpoints() if not name.endswith(".partial")]
    last = max(complete)
    for warning in warnings:  # at most one: of a save that was being written
        assert warning.startswith(f"WARNING: the checkpoint of step {last + 5} was not saved; training goes on")
    assert len(warnings) <= 1
    changes = ["schedule.type=cosine", f"train.duration={last + 6} steps"]
    [(status, text), _] = ranks(2).run(command, "train", str(project.folder / "run.yaml"), *changes)
    assert status == 0, text
    assert f"(step {last} of {last + 6})" in text


@pytest.mark.ci
def test_a_killed_rank_starts_again_from_the_newest_checkpoint(project):
    project.write({"train.duration": "60 steps", "checkpoint.interval": "5 steps"})
    with project.running(project.start_warm("train", "run.yaml", "--nproc", "2", "--max-restarts", "1")) as process:
        wait_for((project.run_dir / "checkpoints" / "step-00000010").exists)
        os.kill(rank_process(process.pid, project.folder, 1), signal.SIGKILL)
        text, _ = process.communicate(timeout=400)
    assert process.returncode == 0, text
    assert "rank 1 was killed by SIGKILL" in text and "start again, from the newest checkpoint (1 of 1)" in text
    assert "resumed from" in text and "tiny: 60 steps" in text


@pytest.mark.ci
@pytest.mark.parametrize(
    "launcher", ["llmtrain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torchrun", "composer"))]
)
def test_a_rank_that_fails_is_reported_once(project, launcher):
    """A shard that turns out damaged on the way, in a process of the loader: what a user meets, without a hook in the code."""
    shards = project.folder / "shards"
    shutil.copytree(project.shards, shards)
    for file in (shards / "train").glob("*.mds"):
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    streams = {f"data.{split}.streams.text.local": str(shards) for split in ("train", "validation")}
    project.write(streams | {"data.num_workers": 1})
    with project.running(project.start([*LAUNCHERS[launcher](), "run.yaml"])) as process:
        text, _ = process.communicate(timeout=400)
        assert living(project.folder) == []
    assert process.returncode == (2 if launcher == "llmtrain" else 1)
    assert text.count("its xxh64 is not the one in the index") == 1, text
    ours = text.partition("ChildFailedError")[0] if launcher == "torchrun" else text  # it adds a report of its own
    assert ours.count("Traceback") == (launcher == "torchrun")
    if launcher == "llmtrain":
        [sharding, schedule, error] = [line for line in text.strip().splitlines() if not line.startswith("start: ")]
        assert sharding.startswith("train.sharding.strategy auto: ")
        assert schedule.startswith("learning rate: ") and error.startswith(f"the shard {shards}/train/")
        assert ".mds of the stream 'text' is not what its index says: " in error
        assert error.endswith(f"(`llmtrain data verify {shards}` reads every shard)")
