"""`llmtrain doctor --cluster`: every node and GPU of a job and what is between them, measured before a run needs them.

The ranks exchange what they found through the store at which they meet: a rank that hangs, or never comes, is missing there, and
rank 0 names it. Nothing here waits without a time limit.
"""

import itertools
import json
import os
import re
import subprocess
import time
import uuid
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from llmtrain.distributed.world import World, exit_status_of_rank, host_name, world_from_environment
from llmtrain.doctor import cluster_node, cluster_reach
from llmtrain.doctor.cluster_exchange import Exchange, guarded, within
from llmtrain.doctor.cluster_judge import Link, Problem, bars, problems
from llmtrain.doctor.cluster_node import Report
from llmtrain.doctor.cluster_tools import GpuState
from llmtrain.doctor.report import show
from llmtrain.errors import RunError, UserError, print_error
from llmtrain.kernels import platform
from llmtrain.kernels.platform import Platform
from llmtrain.logs import run_log

_LIMIT = timedelta(minutes=10)
"""Time limit of the group: beyond the preflight's own, since NCCL's ends the process without the name of a rank."""


def pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Neighbours in a ring of nodes, in rounds in which no node is in two pairs."""
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]
    last = [ring.pop()] if nodes % 2 and nodes > 2 else []
    return [one for one in (ring[::2], ring[1::2], last) if one]


def measure_links(store, world: World, here: Platform) -> list[Link]:
    """Links of which this rank is the first. store: a torch.distributed.Store. Every rank calls this. Raises what the backend
    raises, and hangs where a rank does not come."""
    import torch
    import torch.distributed as dist

    own, gpu = not dist.is_initialized(), here.vendor != "cpu"
    if gpu:
        torch.cuda.set_device(world.local_rank)  # of this thread
    if own:
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=_LIMIT,
            device_id=torch.device("cuda", world.local_rank) if gpu else None,
        )
    found = []
    nodes = world.size // world.local_size
    for one_round in [[(node,) for node in range(nodes)], *pairs(nodes)]:
        for members in one_round:
            ranks = [node * world.local_size + rank for node in members for rank in range(world.local_size)]
            if len(ranks) == 1:
                continue
            group = dist.new_group(ranks)  # by all ranks, in the same order
            if world.rank in ranks:
                gbs, right = _all_reduce(group, len(ranks), here)
                if world.rank == ranks[0]:
                    found.append(Link(members, len(ranks), gbs, right))
    if own:
        dist.destroy_process_group()
    return found


def _all_reduce(group, size: int, here: Platform) -> tuple[float, bool]:
    """(bus bandwidth of the fastest of ten in GB/s, whether the sums were right): each rank sends and receives 2 (n-1) / n of the
    bytes."""
    import torch
    import torch.distributed as dist

    gpu = here.vendor != "cpu"
    values = torch.ones((128 << 20) if gpu else (1 << 20), device=here.device_type)
    dist.all_reduce(values, group=group)  # makes the connections
    right, seconds = bool((values == size).all()), []
    values.fill_(0)
    for _ in range(10):
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * (size - 1) / size * values.nbytes / min(seconds) / 1e9, right


PATIENCE = 45.0
"""Seconds after which a rank that has not come is named, and, once all have, one that has not answered."""
_FOLDER_SECONDS = 10.0
"""Time for a file of rank 0 to appear on another node; network file systems cache the names of a folder."""


@dataclass(frozen=True)
class Verdict:
    """The result on rank 0: what was found, and the hosts to leave out."""

    reports: list[Report]
    links: list[Link]
    problems: list[Problem]

    @property
    def exclude(self) -> list[str]:
        return sorted({one.host for one in self.problems if one.host})

    def __str__(self) -> str:
        lines = [f"preflight: {problem}" for problem in self.problems]
        return "\n".join([*lines, *([f"--exclude={','.join(self.exclude)}"] if self.exclude else [])])


def run(folder: Path | None) -> int:
    """Examine the job that this process belongs to, or this machine, and print the result. folder: of the run, or None.
    Returns 1 if something is wrong, on every rank."""
    return exit_status_of_rank(lambda: 1 if examine(world_from_environment(), folder) else 0, print_error)


def before_run(folder: Path) -> None:
    """Examine a job of several nodes before its run. folder: of the run. Raises RunError on every rank if something is wrong."""
    world = world_from_environment()
    if world.size == world.local_size:
        return
    began = time.perf_counter()
    if examine(world, folder):
        raise RunError("train.preflight found faults; `llmtrain doctor --cluster` repeats it")
    if world.is_main:
        run_log.info(f"preflight: no fault on {world.size} ranks ({time.perf_counter() - began:.0f} s)")


def adopt_srun(environment: MutableMapping[str, str]) -> None:
    """Set the variables of a rank from those of a step of srun that runs several tasks without another launcher."""
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", 1)) < 2:
        return
    per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    hosts = _hosts(environment.get("SLURM_STEP_NODELIST", ""))
    if per_node is None or not hosts:
        raise UserError("the tasks of this step of srun cannot be counted; use torchrun (docs/launching.md)")
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=environment["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=environment["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=per_node.group(),
        MASTER_ADDR=environment.get("MASTER_ADDR", hosts[0]),
        MASTER_PORT=environment.get("MASTER_PORT", str(20000 + int(environment["SLURM_JOB_ID"]) % 20000)),
    )


def _hosts(names: str) -> list[str]:
    """Hosts of SLURM's short form, `node[1-3]`; empty where scontrol does not expand it."""
    try:
        found = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split() if found.returncode == 0 else []


def examine(world: World, folder: Path | None, patience: float = PATIENCE) -> str:
    """Faults of the job in words, empty if there are none; rank 0 prints them, after a table. Every rank calls this.

    folder: of a run, which every node must see. Raises RunError where the ranks do not meet.
    """
    if world.size % world.local_size:
        raise UserError(f"{world.size} ranks are not so many nodes of {world.local_size}: all nodes need as many ranks")
    exchange = Exchange(world, patience)
    return guarded(exchange, lambda: _examine(exchange, folder))


def _examine(exchange: Exchange, folder: Path | None) -> str:
    world, here = exchange.world, platform.detect()
    report = Report(world.rank, world.rank // world.local_size, host_name())
    # Before any rank of this node touches its GPU: whoever is there then is not of this job.
    found = cluster_node.states(here) if world.local_rank == 0 else {}
    exchange.put("here", report.host)
    if world.is_main:
        _begin(exchange, folder)
    start = exchange.await_main("start")
    if start["faults"]:
        return start["faults"]
    exchange.renew()
    _measure(exchange, report, here, folder and folder / start["mark"], found)
    links = None
    if exchange.agree(report.error is None, "measured") and world.size > 1:
        if world.local_rank == 0:
            found, report.error = within(exchange, lambda branch: _unreached(branch, report))
            report.unreached = found or {}
        if exchange.agree(report.error is None and not report.unreached, "reached"):
            links, error = within(exchange, lambda branch: measure_links(branch.group_store(), world, here))
            report.error = error and f"an all-reduce: {error}"
    exchange.put("report", json.dumps([asdict(report), [asdict(link) for link in links or []]]))
    if world.is_main:
        _judge(exchange, folder and folder / start["mark"])
    return exchange.await_main("verdict")["faults"]


def _begin(exchange: Exchange, folder: Path | None) -> None:
    """Await all ranks, put a mark into the run's folder, and publish both; on rank 0."""
    hosts, missing = exchange.collect("here")
    faults, mark = "", f".preflight-{uuid.uuid4().hex}"
    if missing:
        verdict = Verdict([], [], _absent(exchange.world, missing, hosts, f"did not come in {exchange.patience:g} s"))
        print(faults := str(verdict), flush=True)
    elif folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / mark).touch()
        except OSError as error:
            print(faults := f"preflight: {folder}: {error.strerror or error}", flush=True)
    exchange.publish("start", {"faults": faults, "mark": mark}, missing)


def _absent(world: World, missing: list[int], hosts: dict[int, str], what: str) -> list[Problem]:
    """A fault for each node with missing ranks. hosts: names by rank, of those that came."""
    names, found = _hosts(os.environ.get("SLURM_STEP_NODELIST", "")), []
    came = {rank // world.local_size: host for rank, host in hosts.items()}
    others = ", ".join(dict.fromkeys(host for rank, host in hosts.items() if rank not in missing)) or "none"
    for node, of in itertools.groupby(missing, lambda rank: rank // world.local_size):
        ranks = list(of)
        host = came.get(node) or (names[node] if node < len(names) else None)
        span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        found.append(Problem(host, f"node {node} ({span} of {world.size}) {what}; the others: {others}"))
    return found


def _measure(
    exchange: Exchange,
    report: Report,
    here: platform.Platform,
    mark: Path | None,
    found: dict[str, GpuState] | str,
) -> None:
    """Fill this rank's report. found: the states of the node's GPUs, of its first rank."""
    world = exchange.world
    if world.local_rank == 0:
        report.clock = exchange.clock_offset()
        text = found if isinstance(found, str) else {key: asdict(state) for key, state in found.items()}
        exchange.put("gpus", json.dumps(text), report.node)
    if mark is not None:
        deadline = time.monotonic() + min(_FOLDER_SECONDS, exchange.patience / 2)
        while not (seen := mark.exists()) and time.monotonic() < deadline:
            time.sleep(0.2)
        report.sees_folder = seen

    def work(branch: Exchange) -> None:
        if here.vendor != "cpu":
            import torch

            torch.cuda.set_device(world.local_rank)
            states = json.loads(branch.get("gpus", report.node))
            known = states if isinstance(states, str) else {key: GpuState(**one) for key, one in states.items()}
            cluster_node.set_gpu(report, known, world.local_rank)
        cluster_node.measure(report, platform.detect())

    _, report.error = within(exchange, work)


def _unreached(exchange: Exchange, report: Report) -> dict[str, list[str]]:
    """Addresses of the neighbours in the ring of nodes that this node does not reach, by node, with reasons."""
    nodes, found = exchange.world.size // exchange.world.local_size, dict[str, list[str]]()
    with cluster_reach.listening(cluster_reach.places(report.on_gpu), f"node {report.node}") as here:
        exchange.put("places", json.dumps([asdict(place) for place in here]), report.node)
        neighbours = {(report.node + step) % nodes for step in (1, -1)} - {report.node}
        for node in neighbours:
            for place in json.loads(exchange.get("places", node)):
                if reason := cluster_reach.unreached(cluster_reach.Place(**place), f"node {node}"):
                    found.setdefault(str(node), []).append(reason)
        exchange.put("tried", "", report.node)
        for node in neighbours:  # they may still be trying
            exchange.get("tried", node)
    return found


def _judge(exchange: Exchange, mark: Path | None) -> None:
    """Collect the reports, print the result, and publish it; on rank 0."""
    answers, missing = exchange.collect("report")
    if mark is not None:
        mark.unlink(missing_ok=True)
    reports, links = list[Report](), list[Link]()
    for _, text in sorted(answers.items()):
        of_rank, of_links = json.loads(text)
        gpu = of_rank.pop("gpu")
        reports.append(Report(**of_rank, gpu=gpu and GpuState(**gpu)))
        links += [Link(**one | {"nodes": tuple(one["nodes"])}) for one in of_links]
    hosts, _ = exchange.collect("here")
    absent = _absent(exchange.world, missing, hosts, "came, and did not answer")
    verdict = Verdict(reports, links, [*problems(reports, links), *absent])
    _show(verdict)
    exchange.publish("verdict", {"faults": str(verdict)}, missing)


def _show(verdict: Verdict) -> None:
    rows = []
    for one in verdict.reports:
        faults = [p.text for p in verdict.problems if p.host == one.host and p.rank in (None, one.rank)]
        kind = one.device + ("" if one.kind in bars() else " (no bar)")
        state = "ECC unknown" if one.tool_error else ""
        if one.gpu is not None:
            state = f"{one.gpu.uncorrected} uncorrected, {one.gpu.remapped} remapped".replace("None", "?")
        speeds = f"{one.product:.3g} TFLOP/s", f"{one.bandwidth:,.0f} GB/s", f"{one.tested / 2**30:.3g} GiB tested"
        limits = f"shm {one.shm / 2**30:.2g} GiB", f"memlock {_size(one.memlock)}", f"clock {one.clock:+.3f} s"
        rank = f"rank {one.rank}", f"node {one.node}", one.host, kind
        rows.append((*rank, *speeds, state, *limits, f"FAIL: {'; '.join(faults)}" if faults else "pass"))
    names = ("", "", "host", "device", "product", "memory", "pattern", "ECC", "", "", "", "state")
    if rows:
        show("preflight", names, rows)
    for link in verdict.links:
        where = f"node {link.nodes[0]}" if len(link.nodes) == 1 else f"nodes {link.nodes[0]} and {link.nodes[1]}"
        print(f"  all-reduce, {where}, {link.ranks} ranks: {link.gbs:.3g} GB/s")
    for reason in dict.fromkeys(f"{one.host}: {one.tool_error}" for one in verdict.reports if one.tool_error):
        print(f"  errors, remaps and processes of GPUs are not known: {reason}")
    print(str(verdict) or "preflight: no fault", flush=True)


def _size(count: int) -> str:
    return "unlimited" if count < 0 else f"{count / 2**30:.2g} GiB"
