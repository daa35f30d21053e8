"""`llmtrain doctor --cluster` on two ranks, each of which is a node."""

import contextlib
import os
import re
import time
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from llmtrain.distributed.world import World, free_port
from llmtrain.doctor import cluster, cluster_exchange, cluster_node
from llmtrain.errors import RunError


def job(folders: list[Path | None], fault: str = "", patience: float = 300.0) -> tuple[str, str]:
    """A job: (faults, what rank 0 printed). fault: of rank 1."""
    rank = int(os.environ["RANK"])
    packages = cluster_node.versions
    with contextlib.ExitStack() as held:
        held.enter_context(patch.dict(os.environ, SLURMD_NODENAME=f"node{rank}"))
        out = held.enter_context(contextlib.redirect_stdout(StringIO()))
        if rank == 1 and fault == "clock":
            held.enter_context(patch.object(cluster_exchange, "wall_clock", lambda: time.time() - 5))
        elif rank == 1 and fault == "versions":
            held.enter_context(patch.object(cluster_node, "versions", lambda *of: packages(*of) | {"torch": "1.0"}))
        elif rank == 1 and fault == "measurement hangs":
            held.enter_context(patch.object(cluster_node, "measure", lambda *of: time.sleep(300)))
        elif rank == 1 and fault == "all-reduce hangs":
            held.enter_context(patch.object(cluster, "measure_links", lambda *of: time.sleep(300)))
        return cluster.examine(World(rank, 2, 0, 1), folders[rank], patience), out.getvalue()


def test_two_healthy_nodes(ranks, tmp_path):
    (faults, printed), other = ranks(2).run(job, [tmp_path / "run"] * 2)
    assert (faults, *other) == ("", "", "")
    assert re.search(r"rank 1  node 1  node1 .* TFLOP/s .* GB/s .* clock [+-]0\.\d+ s  pass\n", printed)
    assert re.search(r"all-reduce, nodes 0 and 1, 2 ranks: [\d.]+ GB/s\npreflight: no fault\n", printed)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("clock", r"preflight: node1: its clock is 5\.\d s behind rank 0's"),
        ("versions", r"preflight: node1: torch 1\.0, elsewhere 2\.\S+"),
    ],
)
def test_a_faulty_node_is_named_on_every_rank(ranks, fault, said):
    (faults, printed), (others, _) = ranks(2).run(job, [None, None], fault)
    assert faults == others
    assert re.fullmatch(rf"{said}\n--exclude=node1", faults)
    assert printed.endswith(f"{faults}\n")


def test_a_folder_that_is_not_shared_is_named(ranks, tmp_path):
    [(faults, _), _] = ranks(2).run(job, [tmp_path / "one", tmp_path / "other"], "", 3.0)
    # On a loaded machine the rank is late besides.
    assert "preflight: node1: does not see what rank 0 writes to the run's folder" in faults
    assert list((tmp_path / "one").iterdir()) == []


@pytest.mark.parametrize("fault", ["measurement hangs", "all-reduce hangs"])
def test_a_rank_that_hangs_is_named(ranks, fault):
    began = time.monotonic()
    [(faults, _), _] = ranks(2).run(job, [None, None], fault, 5.0)
    # Of an all-reduce all ranks wait for one, and the first whose time is over is named.
    who = "node1, rank 1" if fault == "measurement hangs" else r"node(\d), rank \1: an all-reduce"
    assert re.search(rf"preflight: {who}: no answer in 5 s", faults)
    assert time.monotonic() - began < 200
    ranks(2).kill()  # a thread waits in the group's all-reduce


def lone(rank: int, monkeypatch) -> World:
    for name, value in {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("SLURMD_NODENAME", f"node{rank}")
    return World(rank, 4, 0, 2)


def test_a_node_that_never_comes_is_named(monkeypatch, capsys):
    faults = cluster.examine(lone(0, monkeypatch), None, 0.5)
    assert faults.splitlines() == [
        "preflight: node0: node 0 (rank 1 of 4) did not come in 0.5 s; the others: node0",
        "preflight: node 1 (ranks 2 to 3 of 4) did not come in 0.5 s; the others: node0",
        "--exclude=node0",
    ]
    assert capsys.readouterr().out == faults + "\n"


def test_a_rank_0_that_never_comes_is_named(monkeypatch):
    began = time.monotonic()
    with pytest.raises(
        RunError, match=r"rank 2 on node2 does not reach rank 0 at 127.0.0.1:\d+ in 0.4 s .*MASTER_ADDR"
    ):
        cluster.examine(lone(2, monkeypatch), None, 0.4)
    assert time.monotonic() - began < 100


def test_variables_of_srun_make_ranks(monkeypatch):
    monkeypatch.setattr(cluster, "_hosts", {"n[3-4]": ["n3", "n4"]}.get)
    found = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "n[3-4]"}
    found |= {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "41234"}
    cluster.adopt_srun(found)
    made = [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    assert made == ["9", "16", "1", "8", "n3"]
    assert found["MASTER_PORT"] == "21234"


@pytest.mark.parametrize("given", [{}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_NUM_TASKS": "2", "RANK": "0"}])
def test_other_processes_keep_their_variables(given):
    found = dict(given)
    cluster.adopt_srun(found)
    assert found == given
