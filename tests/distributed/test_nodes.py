"""`llmtrain doctor --cluster` on nodes with networks of their own: whatever is wrong is named within 60 s, and nothing hangs."""

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import main as torchrun

from tests.support import runs
from tests.support.nodes import Node, Nodes, why_not
from tests.support.slurm import Cluster
from tests.support.tiny import tiny_settings

NAMED = 60.0
"""Seconds after which a fault must have been named, and every process ended."""
STEPS = 40
_reason = cache(why_not)


@pytest.fixture
def nodes(tmp_path) -> Iterator:
    if _reason():
        pytest.skip(_reason())
    with contextlib.ExitStack() as held:

        def make(count: int) -> Nodes:
            folder = tmp_path / f"{count}"
            folder.mkdir()
            made = Nodes(count, folder)
            held.callback(made.close)
            return made

        yield make


def doctor(nodes: Nodes, node: int, **options) -> Node:
    run_dir = nodes.folder / "run"
    return nodes.start(node, "doctor", "--cluster", "quickstart", f"run_dir={run_dir}", **options)


def faults(started: list[Node]) -> list[str]:
    """Lines of what rank 0 found, after every process has ended with status 1 in time."""
    deadline = time.monotonic() + NAMED
    assert [one.wait(deadline - time.monotonic()) for one in started] == [1] * len(started)
    return [line for line in started[0].text.splitlines() if line.startswith(("preflight: ", "--exclude"))]


@pytest.mark.ci
def test_three_healthy_nodes_of_which_one_comes_late(nodes):
    three = nodes(3)
    started = [doctor(three, 0), doctor(three, 1)]
    time.sleep(3)
    started.append(doctor(three, 2))
    assert [one.wait(NAMED) for one in started] == [0, 0, 0], started[0].text
    text = started[0].text
    assert [f"node {node}  node{node} " in text for node in range(3)] == [True] * 3
    assert len(re.findall(r"all-reduce, nodes \d and \d, 2 ranks", text)) == 3
    assert text.endswith("preflight: no fault\n")


@pytest.mark.ci
def test_nodes_without_ipv4_are_healthy(nodes):
    two = nodes(2)
    two.without_ipv4()
    started = [doctor(two, node, MASTER_ADDR="fd00::1") for node in (0, 1)]
    assert [one.wait(NAMED) for one in started] == [0, 0], started[0].text
    assert started[0].text.endswith("preflight: no fault\n")


@pytest.mark.ci
def test_a_node_behind_a_slow_cable_is_left_out(nodes):
    three = nodes(3)
    three.slow(1, "100mbit")
    found = faults([doctor(three, node) for node in range(3)])
    assert "preflight: node1: slow with both its neighbours" in found and found[-1] == "--exclude=node1"


def _metadata(folder: Path) -> tuple[str, str]:
    """(a changed copy of a package's metadata, its place): what `mount --bind` takes."""
    [path] = [one for one in importlib.metadata.files("transformers") or [] if one.name == "METADATA"]
    place = Path(str(path.locate()))
    changed = folder / "METADATA"
    changed.write_text(re.sub(r"(?m)^Version: .*", "Version: 0.1", place.read_text()))
    return str(changed), str(place)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("versions", r"preflight: node1: transformers 0\.1, elsewhere [\d.]+"),
        ("folder", "preflight: node1: does not see what rank 0 writes to the run's folder.*"),
        (
            "no interface",
            "preflight: node1, rank 1: .*GLOO_SOCKET_IFNAME=ib0, but this node has the interfaces lo, .*eth0.*",
        ),
        ("docker0", r"preflight: node1: is not reached from node0 at 172\.17\.0\.1 \(GLOO_SOCKET_IFNAME=docker0\): .*"),
        ("lo", r"preflight: node1: is not reached from node0 at 127\.0\.0\.1 \(GLOO_SOCKET_IFNAME=lo\): .*"),
        ("no name", r"preflight: node1: is not reached from node0 at 127\.0\.\d\.1 \(.* the name node1; set GLOO_.*"),
    ],
)
def test_a_node_that_is_set_up_otherwise_is_named(nodes, kind, said):
    two = nodes(2)
    (two.folder / "run").mkdir()
    if kind == "docker0":  # each node has one, with the same address
        for node in (0, 1):
            two.add_interface(node, "docker0", "172.17.0.1/16")
    options = {
        "versions": {"mounts": (("--bind", *_metadata(two.folder)),)},
        "folder": {"mounts": (("-t", "tmpfs", "none", str(two.folder / "run")),)},
        "no interface": {"GLOO_SOCKET_IFNAME": "ib0"},
        "no name": {"GLOO_SOCKET_IFNAME": ""},
    }.get(kind, {"GLOO_SOCKET_IFNAME": kind})
    found = faults([doctor(two, 0), doctor(two, 1, **options)])
    assert any(re.fullmatch(said, line) for line in found), found
    assert found[-1] == "--exclude=node1"


@pytest.mark.ci
def test_nodes_that_die_are_cut_off_never_come_or_look_elsewhere_are_named(nodes):
    """Four clusters at once: they only wait."""
    died, cut, absent, elsewhere = (nodes(count) for count in (2, 3, 4, 5))
    started = {one: [doctor(one, node) for node in range(one.count)] for one in (died, cut)}
    began = time.monotonic()
    started[absent] = [doctor(absent, node) for node in (0, 1)]
    started[elsewhere] = [doctor(elsewhere, 1, MASTER_ADDR=elsewhere.address(8))]
    ends = {died: started[died][1].kill, cut: lambda: cut.cut_off(1)}
    while ends:  # each as soon as all of its nodes have come: what follows is short
        for one in [one for one in ends if list((one.folder / "run").glob(".preflight-*"))]:
            ends.pop(one)()
        time.sleep(0.01)
    found = {one: faults([of for of in started[one] if of is not started[died][1]]) for one in started}
    assert time.monotonic() - began < NAMED + 10
    assert found == {
        died: [
            "preflight: node1: node 1 (rank 1 of 2) came, and did not answer; the others: node0",
            "--exclude=node1",
        ],
        cut: [
            "preflight: node1: node 1 (rank 1 of 3) came, and did not answer; the others: node0, node2",
            "--exclude=node1",
        ],
        absent: [
            f"preflight: node {node} (rank {node} of 4) did not come in 45 s; the others: node0, node1"
            for node in (2, 3)
        ],
        elsewhere: [
            "preflight: rank 1 on node1 does not reach rank 0 at 10.231.0.9:29500 in 45 s (timed out): that node is not there, "
            "or MASTER_ADDR is wrong"
        ],
    }
    assert "rank 0 at 10.231.0.1 stopped answering node1" in started[cut][1].text


def checkpoint(run_dir: Path) -> dict:
    return runs.read_tensors(run_dir / "checkpoints" / f"step-{STEPS:08}")


@pytest.mark.slow
def test_a_run_whose_node_is_killed_ends_at_once_and_goes_on_to_the_same_bits(nodes, shards):
    two = nodes(2)

    def train(name: str) -> list[Node]:
        changes = {"train.duration": f"{STEPS} steps", "checkpoint.interval": "10 steps", "train.preflight": "on"}
        file = two.folder / f"{name}.yaml"
        file.write_text(json.dumps(tiny_settings(shards, two.folder / name, changes)))
        return [two.start(node, "train", str(file)) for node in (0, 1)]

    assert [one.wait(200) for one in train("whole")] == [0, 0]
    survivor, victim = train("killed")
    await_checkpoint(survivor, two.folder / "killed")
    victim.kill()
    assert survivor.wait(10) not in (0, None)
    assert re.search(r"rank 0 of 2 failed: .*10\.231\.0\.2", survivor.text), survivor.text
    again = train("killed")
    assert [one.wait(200) for one in again] == [0, 0], again[0].text
    assert re.search(r"resumed from .* \(step [123]0 of 40\)", again[0].text)
    whole, resumed = (checkpoint(two.folder / name) for name in ("whole", "killed"))
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]) if isinstance(value, torch.Tensor) else value == resumed[name], name


def written(nodes: Nodes, shards: Path, **changes: object) -> Path:
    file = nodes.folder / "run.yaml"
    changes = {"train.duration": f"{STEPS} steps", "checkpoint.interval": "10 steps", "train.preflight": "on"} | changes
    file.write_text(json.dumps(tiny_settings(shards, nodes.folder / "run", changes)))
    return file


@pytest.mark.slow
def test_torchrun_on_two_nodes_of_which_one_is_killed_goes_on(nodes, shards):
    two = nodes(2)
    file, hosts = written(two, shards), two.hosts()

    def train(attempt: str) -> list[Node]:
        meeting = ("--rdzv-backend", "c10d", "--rdzv-id", attempt, "--rdzv-endpoint", "node0:29400")
        command = ("--nnodes", "2", "--nproc-per-node", "1", *meeting, "-m", "llmtrain", "train", str(file))
        return [two.start(node, *command, program=torchrun, mounts=(hosts,)) for node in (0, 1)]

    survivor, victim = train("first")
    await_checkpoint(survivor, two.folder / "run")
    victim.kill()
    assert survivor.wait(60) not in (0, None)
    assert re.search(r"rank 0 of 2 failed: .*10\.231\.0\.2", survivor.text), survivor.text
    again = train("second")
    assert [one.wait(400) for one in again] == [0, 0], again[0].text
    assert re.search(r"resumed from .* \(step [123]0 of 40\)", again[0].text)


@pytest.mark.slow
def test_a_slurm_job_on_two_nodes_of_which_one_is_killed_starts_them_again(nodes, shards):
    two = nodes(2)
    file, (_, hosts, _) = written(two, shards), two.hosts()
    cluster = Cluster(two.folder, real_torchrun=True, on_nodes=("node0", "node1"))
    job = cluster.start(str(file), NAMESPACE=two.namespace(0)[:-1], HOSTS=hosts, GLOO_SOCKET_IFNAME="eth0")
    try:
        await_checkpoint(job, two.folder / "run")
        os.killpg(int((two.folder / "step-node1").read_text()), signal.SIGKILL)
        text, _ = job.communicate(timeout=500)
    finally:
        job.kill()
        for step in two.folder.glob("step-*"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(step.read_text()), signal.SIGKILL)
    assert job.returncode == 0, text
    assert "all ranks start again (1 of 3)" in text
    assert re.search(r"resumed from .* \(step [123]0 of 40\)", text), text


def await_checkpoint(job: Any, run_dir: Path) -> None:
    """Wait for the first checkpoint of a run that a Node or a Popen is."""
    deadline = time.monotonic() + 400
    while not (run_dir / "checkpoints" / "step-00000010").exists():
        alive = job.process.is_alive() if isinstance(job, Node) else job.poll() is None
        assert alive and time.monotonic() < deadline, job.text if isinstance(job, Node) else job.communicate()[0]
        time.sleep(0.01)
