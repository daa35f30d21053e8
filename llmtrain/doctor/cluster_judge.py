"""Judgement of what the ranks of a cluster found, by the bars of cluster_bars.csv and the limits below."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmtrain.doctor.cluster_node import Report

_SHM = 8 << 30
"""Bytes of /dev/shm on a node with GPUs: NCCL's and the loaders' buffers."""
_MEMLOCK = 32 << 30
"""Bytes that a process may lock on a node with InfiniBand, which registers its buffers."""
_CLOCK = 1.0
"""Seconds by which a node's clock may differ from rank 0's."""
_FULL_NODE = 8
"""GPUs of the nodes for which the bar of an all-reduce is."""
_SLOW_LINK = 0.4
"""Share of the fastest pair of nodes below which a pair is slow."""


@dataclass(frozen=True)
class Bar:
    """Least values of a healthy GPU: TFLOP/s of the product, GB/s of memory, GB/s of an all-reduce in a node of eight."""

    product: float
    memory: float
    node: float


@dataclass(frozen=True)
class Link:
    """An all-reduce among the ranks of one node or of two. nodes: their numbers. gbs: bus bandwidth in GB/s. right: the sum was."""

    nodes: tuple[int, ...]
    ranks: int
    gbs: float
    right: bool = True


@dataclass(frozen=True)
class Problem:
    """A fault in words. host: of the node to leave out, or None where no node can be named. rank: None: the whole node."""

    host: str | None
    text: str
    rank: int | None = None

    def __str__(self) -> str:
        where = [] if self.host is None else [self.host]
        where += [] if self.rank is None else [f"rank {self.rank}"]
        return f"{', '.join(where)}: {self.text}" if where else self.text


@cache
def bars() -> dict[str, Bar]:
    """Bars by the short name of a kind of GPU in flops/peaks.csv. A kind that is not there is reported without one."""
    with Path(__file__).with_name("cluster_bars.csv").open(encoding="utf-8", newline="") as lines:
        return {
            row["short"]: Bar(float(row["product_tflops"]), float(row["memory_gbs"]), float(row["node_gbs"]))
            for row in csv.DictReader(lines)
        }


def problems(reports: Sequence[Report], links: Sequence[Link]) -> list[Problem]:
    """Faults of ranks, of nodes and between them. reports: of all ranks that answered."""
    found = [Problem(one.host, text, one.rank) for one in reports for text in _of_rank(one)]
    nodes = {one.node: one for one in reversed(reports)}
    found += [Problem(one.host, text) for _, one in sorted(nodes.items()) for text in _of_node(one)]
    found += _unequal({one.rank: (one.host, one.versions | {"GPU": one.device}) for one in reports if not one.error})
    for one in nodes.values():
        for node, reasons in one.unreached.items():
            host = nodes[int(node)].host if int(node) in nodes else None
            found += [Problem(host, f"is not reached from {one.host} at {reason}") for reason in reasons]
    return found + _of_links(nodes, links)


def _of_rank(one: Report) -> Iterator[str]:
    if one.error is not None:
        yield one.error
        return
    bar = bars().get(one.kind or "")
    if bar and one.product < bar.product:
        yield f"a matrix product at {one.product:.0f} TFLOP/s, below {bar.product:.0f}"
    if bar and one.bandwidth < bar.memory:
        yield f"memory at {one.bandwidth:,.0f} GB/s, below {bar.memory:,.0f}"
    if not one.repeats:
        yield "two equal matrix products differ"
    if one.wrong_words:
        yield f"{one.wrong_words} words of memory were not read as written"
    if (gpu := one.gpu) is None:
        return
    if gpu.uncorrected:
        yield f"{gpu.uncorrected} memory errors that ECC could not correct"
    if gpu.failed:
        yield "the remapping of a row of memory failed: replace the GPU"
    if gpu.pending:
        yield "a row or page of memory waits to be remapped: reset the GPU"
    if gpu.processes:
        yield f"another process is on the GPU: {', '.join(gpu.processes)}"


def _of_node(one: Report) -> Iterator[str]:
    if one.sees_folder is False:
        yield "does not see what rank 0 writes to the run's folder: put run_dir on a file system that all nodes share"
    if one.error is not None:
        return
    if one.on_gpu and one.shm < _SHM:
        yield f"/dev/shm has {one.shm / 2**30:.2g} GiB, below {_SHM >> 30} (docker: --ipc=host or --shm-size)"
    if one.on_gpu and one.infiniband and 0 <= one.memlock < _MEMLOCK:
        yield f"memlock is {one.memlock / 2**30:.2g} GiB, below {_MEMLOCK >> 30} (ulimit -l unlimited)"
    if abs(one.clock) > _CLOCK:
        yield f"its clock is {abs(one.clock):.1f} s {'ahead of' if one.clock > 0 else 'behind'} rank 0's"


def _unequal(values: dict[int, tuple[str, dict[str, str]]]) -> Iterator[Problem]:
    """Nodes whose versions or GPUs are not those of most ranks. values: host, and value by name, of each rank."""
    seen = set()
    for name in dict.fromkeys(name for _, of in values.values() for name in of):
        usual = Counter(of.get(name, "none") for _, of in values.values()).most_common(1)
        for host, of in values.values():
            mine = of.get(name, "none")
            if mine != usual[0][0] and (host, name, mine) not in seen:
                seen.add((host, name, mine))
                yield Problem(host, f"{name} {mine}, elsewhere {usual[0][0]}")


def _of_links(nodes: dict[int, Report], links: Sequence[Link]) -> list[Problem]:
    found, suspects = [], Counter[int]()
    across = [one for one in links if len(one.nodes) == 2]
    fastest = max((one.gbs for one in across), default=0.0)
    for one in links:
        hosts = " and ".join(nodes[node].host for node in one.nodes)
        bar = bars().get(nodes[one.nodes[0]].kind or "")
        if not one.right:
            found.append(Problem(nodes[one.nodes[0]].host if len(one.nodes) == 1 else None, f"{hosts}: a wrong sum"))
        elif len(one.nodes) == 1 and bar and one.ranks == _FULL_NODE and one.gbs < bar.node:
            found.append(Problem(hosts, f"an all-reduce in the node at {one.gbs:.0f} GB/s, below {bar.node:.0f}"))
        elif len(one.nodes) == 2 and one.gbs < _SLOW_LINK * fastest:
            found.append(
                Problem(None, f"{hosts}: an all-reduce at {one.gbs:.3g} GB/s, the fastest pair has {fastest:.3g}")
            )
            suspects.update(one.nodes)
    # A slow node is slow with both its neighbours, each of which is fast with the other of its own.
    return found + [
        Problem(nodes[node].host, "slow with both its neighbours") for node, count in suspects.items() if count > 1
    ]
