"""The SLURM job: it starts every rank, has them save before they are stopped, and goes back into the queue."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "pretrain.sbatch"

# The step is a task of its own, as under SLURM: signals to the job's script do not reach it.
SRUN = """\
shift
setsid env SLURM_NODEID=1 "$@" &
echo $! > step
wait $!"""
# Signals the task only, as proctrack/cgroup does.
SCANCEL = """\
echo "scancel $*" >> calls
kill -TERM $(cat step)"""
TORCHRUN = f"""\
echo "NODE_RANK=$NODE_RANK torchrun $*" >> calls
[[ -n ${{RANKS_RUN:-}} ]] || exit "${{EXIT:-0}}"
{sys.executable} rank.py &
wait $! || exit 1"""
RANK = """\
import pathlib, signal, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
pathlib.Path("ranks-run").touch()
while not heard:
    time.sleep(0.02)
time.sleep(1)  # it saves
with open("calls", "a") as calls:
    print(*heard, "saved", file=calls)
raise SystemExit(143)
"""


class Cluster:
    """A SLURM of one node, made of stand-ins; `calls` is what was called, and what the ranks heard."""

    def __init__(self, folder: Path):
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        scontrol = 'echo "scontrol $*" >> calls; [[ $1 != show ]] || printf "n1\\nn2\\n"'
        stubs = {"scontrol": scontrol, "srun": SRUN, "scancel": SCANCEL, "torchrun": TORCHRUN}
        stubs["squeue"] = 'echo "${STATE:-RUNNING}"'
        (folder / "rank.py").write_text(RANK)
        for name, body in stubs.items():
            path = bin_folder / name
            path.write_text(f"#!/bin/bash\n{body}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_GPUS_ON_NODE": "8",
        }

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", SCRIPT, *arguments], env=self.environment | extra, stdout=subprocess.PIPE, text=True
        )

    def submit(self, *arguments: str, **extra: str) -> int:
        process = self.start(*arguments, **extra)
        process.communicate(timeout=30)
        return process.returncode

    @property
    def calls(self) -> str:
        file = self.folder / "calls"
        return file.read_text() if file.exists() else ""

    def wait_for_ranks(self) -> None:
        deadline = time.monotonic() + 30
        while not (self.folder / "ranks-run").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_torchrun_starts_on_each_node(cluster):
    assert cluster.submit("run.yaml", "train.microbatch_size=4") == 0
    expected = "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 4711.0.0 --rdzv-endpoint n1:24711"
    assert expected in cluster.calls
    assert cluster.calls.rstrip().endswith("scripts/train.py run.yaml train.microbatch_size=4")
    assert "NODE_RANK=1 " in cluster.calls
    assert (ROOT / "scripts" / "train.py").exists()
    assert "requeue" not in cluster.calls


def test_a_run_that_fails_starts_again_so_many_times_and_then_fails_the_job(cluster):
    assert cluster.submit("run.yaml", EXIT="3", MAX_RESTARTS="2") == 3
    assert [f"--rdzv-id 4711.0.{start}" in cluster.calls for start in range(4)] == [True, True, True, False]
    assert "requeue" not in cluster.calls


def test_without_a_yaml_it_says_how_it_is_used(cluster):
    assert (cluster.submit(), cluster.calls) == (2, "")


def test_near_the_time_limit_the_ranks_save_and_the_job_goes_back_into_the_queue(cluster):
    process = cluster.start("run.yaml", RANKS_RUN="yes")
    cluster.wait_for_ranks()
    process.send_signal(signal.SIGTERM)  # as --signal=B:TERM@180 says: to the script alone
    text, _ = process.communicate(timeout=30)
    assert cluster.calls.splitlines()[2:] == [
        "scancel --signal=TERM 4711",
        "SIGTERM saved",  # heard once: a second one would end a rank before it has saved
        "scontrol requeue 4711",
    ]
    assert cluster.calls.count("torchrun") == 1  # ranks that have saved and left are not started again
    assert "back into the queue" in text
    assert not list(cluster.folder.glob(".slurm-*"))


def test_a_preemption_that_only_the_nodes_hear_puts_the_job_back_too(cluster):
    process = cluster.start("run.yaml", RANKS_RUN="yes")
    cluster.wait_for_ranks()
    os.kill(int((cluster.folder / "step").read_text()), signal.SIGTERM)
    process.communicate(timeout=30)
    assert cluster.calls.splitlines()[2:] == ["SIGTERM saved", "scontrol requeue 4711"]


def test_a_cancelled_job_saves_and_stays_cancelled(cluster):
    process = cluster.start("run.yaml", RANKS_RUN="yes", STATE="COMPLETING")
    cluster.wait_for_ranks()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert "saved" in cluster.calls and "requeue" not in cluster.calls


def test_only_the_first_start_is_fresh(cluster):
    assert cluster.submit("run.yaml", "--fresh", EXIT="1", MAX_RESTARTS="1") == 1
    assert ["--fresh" in line for line in cluster.calls.splitlines() if "torchrun" in line] == [True, False]
    (cluster.folder / "calls").unlink()
    assert cluster.submit("run.yaml", "--fresh", SLURM_RESTART_COUNT="1") == 0  # put back, it continues what it began
    assert "--fresh" not in cluster.calls and "--rdzv-id 4711.1.0" in cluster.calls
