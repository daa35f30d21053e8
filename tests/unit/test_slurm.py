"""The SLURM job: it starts every rank, has them save before they are stopped, and goes back into the queue."""

import os
import signal

import pytest

from tests.support.slurm import Cluster


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_torchrun_starts_on_each_node(cluster):
    assert cluster.submit("run.yaml", "train.microbatch_size=4") == 0
    expected = "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 4711.0.0 --rdzv-endpoint n1:24711"
    assert expected in cluster.calls
    assert cluster.calls.rstrip().endswith("-m llmtrain train run.yaml train.microbatch_size=4")
    assert "NODE_RANK=1 " in cluster.calls
    assert "requeue" not in cluster.calls


def test_a_run_that_fails_starts_again_so_many_times_and_then_fails_the_job(cluster):
    assert cluster.submit("run.yaml", EXIT="3", MAX_RESTARTS="2") == 3
    assert [f"--rdzv-id 4711.0.{start}" in cluster.calls for start in range(4)] == [True, True, True, False]
    assert "requeue" not in cluster.calls


def test_without_a_yaml_it_explains_how_it_is_used(cluster):
    assert (cluster.submit(), cluster.calls) == (2, "")


def test_near_the_time_limit_the_ranks_save_and_the_job_goes_back_into_the_queue(cluster):
    process = cluster.start("run.yaml", RANKS_RUN="yes")
    cluster.wait_for_ranks()
    process.send_signal(signal.SIGTERM)  # as --signal=B:TERM@180 says: to the script alone
    text, _ = process.communicate(timeout=120)
    assert cluster.calls.splitlines()[1:] == [
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
    process.communicate(timeout=120)
    assert cluster.calls.splitlines()[1:] == ["SIGTERM saved", "scontrol requeue 4711"]


def test_a_cancelled_job_saves_and_stays_cancelled(cluster):
    process = cluster.start("run.yaml", RANKS_RUN="yes", STATE="COMPLETING")
    cluster.wait_for_ranks()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert "saved" in cluster.calls and "requeue" not in cluster.calls


def test_only_the_first_start_is_fresh(cluster):
    assert cluster.submit("run.yaml", "--fresh", EXIT="1", MAX_RESTARTS="1") == 1
    assert ["--fresh" in line for line in cluster.calls.splitlines() if "torchrun" in line] == [True, False]
    (cluster.folder / "calls").unlink()
    assert cluster.submit("run.yaml", "--fresh", SLURM_RESTART_COUNT="1") == 0  # put back, it continues what it began
    assert "--fresh" not in cluster.calls and "--rdzv-id 4711.1.0" in cluster.calls


@pytest.mark.parametrize(
    ("given", "status", "torchruns", "said"),
    [
        ({"SPARES": "1"}, 0, ["--nnodes 3"], ""),
        ({"SPARES": "1", "DOWN": "n1"}, 0, ["--nnodes 3"], "n1 is left out: State=DOWN*"),
        ({"PREFLIGHT": "1", "SPARES": "1", "BAD": "n2"}, 0, ["--nnodes 3"], "--exclude=n2"),
        ({"PREFLIGHT": "1"}, 0, ["--nnodes 4"], ""),
        ({"DOWN": "n4", "DIVIDES": "16"}, 0, ["--nnodes 2"], "the run goes on with 2 of 4 nodes"),
        (
            {"DOWN": "n1", "SPARES": "1", "EXIT": "3", "MAX_RESTARTS": "1"},
            3,
            ["--nnodes 3"] * 2,
            "all ranks start again",
        ),
        ({"PREFLIGHT": "1", "BAD": "n2"}, 1, [], "submit again with --exclude=n2"),
        ({"PREFLIGHT": "1", "UNNAMED": "1"}, 1, [], "preflight: a fault of no node"),
        ({"DOWN": "n4"}, 143, [], "too few of the job's nodes are left"),
        ({"DOWN": "n1 n2 n3 n4", "DIVIDES": "8"}, 143, [], "back into the queue"),
    ],
)
def test_nodes_that_are_lost_or_fail_the_preflight_are_left_out(tmp_path, given, status, torchruns, said):
    cluster = Cluster(tmp_path, nodes=4)
    process = cluster.start("run.yaml", "a.b=c", "--fresh", **given)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == status, text
    assert said in text
    found = [line for line in cluster.calls.splitlines() if " torchrun " in line]
    assert [line[line.index("--nnodes") :][:10] for line in found] == torchruns
    left = [name for name in ("n1", "n2", "n3", "n4") if name not in given.get("DOWN", "") + given.get("BAD", "")]
    assert all(f"--rdzv-endpoint {left[0]}:" in line for line in found)
    assert ("scontrol requeue 4711" in cluster.calls) == (status == 143)
    if "PREFLIGHT" in given:
        assert "llmtrain doctor --cluster run.yaml a.b=c n1 n2 n3 n4" in cluster.calls
