"""Judgement of reports of a cluster."""

from dataclasses import replace

import pytest

from llmtrain.doctor.cluster import Verdict, pairs
from llmtrain.doctor.cluster_judge import Link, bars, problems
from llmtrain.doctor.cluster_node import Report
from llmtrain.doctor.cluster_tools import GpuState
from llmtrain.flops.peaks import device_by_short_name

VERSIONS = {"torch": "2.11.0", "driver": "580"}
HEALTHY = Report(
    *(0, 0, "a", "NVIDIA H200", "h200", True),
    product=650,
    bandwidth=4000,
    gpu=GpuState(0, 0),
    shm=16 << 30,
    infiniband=True,
    versions=VERSIONS,
)


def two(**changes) -> list[Report]:
    return [HEALTHY, replace(HEALTHY, rank=1, node=1, host="b", **changes)]


def test_healthy_nodes_pass():
    assert problems(two(), [Link((0, 1), 2, 40.0)]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"product": 300}, "b, rank 1: a matrix product at 300 TFLOP/s, below 500"),
        ({"product": float("nan"), "error": "no answer in 50 s"}, "b, rank 1: no answer in 50 s"),
        ({"bandwidth": 900}, "b, rank 1: memory at 900 GB/s, below 2,900"),
        ({"repeats": False}, "b, rank 1: two equal matrix products differ"),
        ({"wrong_words": 3}, "b, rank 1: 3 words of memory were not read as written"),
        ({"gpu": GpuState(2, 0)}, "b, rank 1: 2 memory errors that ECC could not correct"),
        ({"gpu": GpuState(0, 1, pending=True)}, "b, rank 1: a row or page of memory waits"),
        ({"gpu": GpuState(0, 1, failed=True)}, "b, rank 1: the remapping of a row of memory failed"),
        ({"gpu": GpuState(processes=("7 python",))}, "b, rank 1: another process is on the GPU: 7 python"),
        ({"shm": 64 << 20}, "b: /dev/shm has 0.062 GiB, below 8"),
        ({"memlock": 8 << 20}, "b: memlock is 0.0078 GiB, below 32"),
        ({"clock": -7.25}, "b: its clock is 7.2 s behind rank 0's"),
        ({"sees_folder": False}, "b: does not see what rank 0 writes to the run's folder"),
        ({"versions": VERSIONS | {"driver": "570"}}, "b: driver 570, elsewhere 580"),
        ({"versions": {"torch": "2.11.0"}}, "b: driver none, elsewhere 580"),
        ({"device": "NVIDIA A100-SXM4-80GB"}, "b: GPU NVIDIA A100-SXM4-80GB, elsewhere NVIDIA H200"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_a_fault_names_its_node_and_leaves_it_out(changes, said):
    [found] = problems(two(**changes), [])
    assert str(found).startswith(said)
    assert str(Verdict([], [], [found])).endswith("\n--exclude=b")


@pytest.mark.parametrize("changes", [{"product": 1, "kind": None}, {"memlock": 1, "infiniband": False}, {"clock": 0.9}])
def test_what_has_no_bar_passes(changes):
    assert problems(two(**changes), []) == []


def test_a_cpu_has_no_bars():
    cpu = Report(0, 0, "a", "x86_64", product=0.01, bandwidth=1, infiniband=True, memlock=1)
    assert problems([cpu], []) == []


def test_bars_are_of_known_kinds_and_below_their_peaks():
    peaks = {kind: device_by_short_name(kind).peak("bf16") or 0 for kind in bars()}
    assert all(bar.product < peaks[kind] / 1e12 for kind, bar in bars().items())


@pytest.mark.parametrize(("ranks", "gbs", "fine"), [(8, 100.0, False), (8, 300.0, True), (2, 100.0, True)])
def test_the_bar_of_an_all_reduce_is_for_whole_nodes(ranks, gbs, fine):
    found = [str(one) for one in problems([HEALTHY], [Link((0,), ranks, gbs)])]
    assert found == ([] if fine else ["a: an all-reduce in the node at 100 GB/s, below 180"])


def test_a_wrong_sum_names_a_node_alone():
    assert [one.host for one in problems(two(), [Link((1,), 2, 300.0, right=False)])] == ["b"]
    assert [one.host for one in problems(two(), [Link((0, 1), 2, 300.0, right=False)])] == [None]


def test_a_node_that_is_slow_with_both_neighbours_is_left_out_and_they_are_not():
    reports = [replace(HEALTHY, rank=node, node=node, host="abcd"[node]) for node in range(4)]
    links = [Link((a, b), 2, 5.0 if 2 in (a, b) else 40.0) for one in pairs(4) for a, b in one]
    found = problems(reports, links)
    assert str(found[0]) == "c and d: an all-reduce at 5 GB/s, the fastest pair has 40"
    assert Verdict(reports, links, found).exclude == ["c"]


@pytest.mark.parametrize("nodes", range(1, 9))
def test_rounds_of_pairs_hold_no_node_twice_and_every_neighbour(nodes):
    rounds = pairs(nodes)
    assert all(len({node for pair in one for node in pair}) == 2 * len(one) for one in rounds)
    ring = {frozenset((node, (node + 1) % nodes)) for node in range(nodes)} if nodes > 1 else set()
    found = [frozenset(pair) for one in rounds for pair in one]
    assert set(found) == ring
    assert len(found) == len(ring)
