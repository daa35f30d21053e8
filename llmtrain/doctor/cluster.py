"""`llmtrain doctor --cluster`: every node and GPU of a job and what is between them, measured before a run needs them.

The ranks exchange what they found through the store at which they meet: a rank that hangs, or never comes, is missing there, and
rank 0 names it. Nothing here waits without a time limit.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Collection, MutableMapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from llmtrain.distributed.world import (
    LISTENER,
    World,
    exit_status_of_rank,
    launched_by_a_launcher,
    world_from_environment,
)
from llmtrain.doctor import cluster_node
from llmtrain.doctor.cluster_judge import Link, Problem, bars, problems
from llmtrain.doctor.cluster_links import measure_links
from llmtrain.doctor.cluster_node import Report
from llmtrain.doctor.cluster_tools import GpuState
from llmtrain.doctor.report import show
from llmtrain.errors import RunError, UserError, print_error
from llmtrain.kernels import platform
from llmtrain.logs import run_log
from llmtrain.schema.config import Config

PATIENCE = 50.0
"""Seconds after which a rank that has not come, or not answered, is named."""
_FOLDER_SECONDS = 10.0
"""Time for a file of rank 0 to appear on another node; network file systems cache the names of a folder."""
_ACKNOWLEDGE = 5.0
"""Seconds that rank 0 waits for the others to have read its verdict."""
_numbers = itertools.count()


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


def before_run(config: Config) -> None:
    """Examine a job of several nodes before its run. Raises RunError on every rank if something is wrong."""
    world = world_from_environment()
    if world.size == world.local_size:
        return
    began = time.perf_counter()
    if examine(world, Path(config.run_dir)):
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
    here = platform.detect()
    report = Report(world.rank, world.rank // world.local_size, cluster_node.host_name())
    # Before any rank of this node touches its GPU: whoever is there then is not of this job.
    found = cluster_node.states(here) if world.local_rank == 0 else {}
    exchange.put("here", report.host)
    if world.is_main:
        _begin(exchange, folder)
    start = exchange.await_main("start", patience + 15)
    if start["faults"]:
        return start["faults"]
    _measure(exchange, report, here, folder and folder / start["mark"], found)
    links: list[Link] = []
    if exchange.agree(report.error is None, "measured") and world.size > 1:
        links, error = _within(patience, lambda: measure_links(exchange.group_store(), world, here))
        report.error = error and f"an all-reduce: {error}"
    exchange.put("report", json.dumps([asdict(report), [asdict(link) for link in links or []]]))
    if world.is_main:
        _judge(exchange, folder and folder / start["mark"])
    return exchange.await_main("verdict", patience + 30)["faults"]


def _begin(exchange: "Exchange", folder: Path | None) -> None:
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
    for node, of in itertools.groupby(missing, lambda rank: rank // world.local_size):
        ranks = list(of)
        host = came.get(node) or (names[node] if node < len(names) else None)
        span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        others = ", ".join(dict.fromkeys(came.values())) or "none"
        found.append(Problem(host, f"node {node} ({span} of {world.size}) {what}; those that came: {others}"))
    return found


def _measure(
    exchange: "Exchange",
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
        exchange.put("gpus", json.dumps(text), number=report.node)
    if mark is not None:
        deadline = time.monotonic() + min(_FOLDER_SECONDS, exchange.patience)
        while not (seen := mark.exists()) and time.monotonic() < deadline:
            time.sleep(0.2)
        report.sees_folder = seen

    def work() -> None:
        if here.vendor != "cpu":
            import torch

            torch.cuda.set_device(world.local_rank)
            states = json.loads(exchange.get("gpus", report.node))
            known = states if isinstance(states, str) else {key: GpuState(**one) for key, one in states.items()}
            cluster_node.set_gpu(report, known, world.local_rank)
        cluster_node.measure(report, platform.detect())

    _, report.error = _within(exchange.patience, work)


def _judge(exchange: "Exchange", mark: Path | None) -> None:
    """Collect the reports, print the result, and publish it; on rank 0."""
    answers, missing = exchange.collect("report", 5.0)
    if mark is not None:
        mark.unlink(missing_ok=True)
    reports, links = list[Report](), list[Link]()
    for _, text in sorted(answers.items()):
        of_rank, of_links = json.loads(text)
        gpu = of_rank.pop("gpu")
        reports.append(Report(**of_rank, gpu=gpu and GpuState(**gpu)))
        links += [Link(**one | {"nodes": tuple(one["nodes"])}) for one in of_links]
    hosts = {one.rank: one.host for one in reports}
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


def _within(seconds: float, work: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None), or (None, why there is none): `work` in a thread that is left behind when it hangs."""
    answer: list[tuple[Any, str | None]] = []

    def call() -> None:
        try:
            answer.append((work(), None))
        except Exception as error:  # whatever a GPU or network does wrong is what is looked for
            answer.append((None, f"{type(error).__name__}: {error}".splitlines()[0][:300]))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else (None, f"no answer in {seconds:g} s")


@functools.cache
def _meet(world: World, patience: float):
    """The store of the job, a torch.distributed.Store: torchrun's, or one that rank 0 opens at MASTER_PORT. It stays open, since
    the run's own group finds it there. Raises RunError where rank 0 cannot be reached."""
    import torch.distributed as dist

    if not launched_by_a_launcher():
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=patience)
    if not opens:
        _await_listener(address, port, patience)
    handle = os.environ.pop(LISTENER, None) if opens else None
    try:
        return dist.TCPStore(
            address,
            port,
            world.size,
            opens,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=handle is None,  # the run's own store is then the same
            master_listen_fd=None if handle is None else int(handle),
        )
    except (RuntimeError, ValueError) as error:
        raise _unreached(address, port, patience, error) from None


def _await_listener(address: str, port: int, patience: float) -> None:
    """Wait until somebody listens there. PyTorch's store would try for twice its time limit and longer. Raises RunError."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.1)).close()
        except OSError as error:  # also of an unknown name
            if time.monotonic() > deadline:
                raise _unreached(address, port, patience, error) from None
        time.sleep(min(0.2, patience))


def _unreached(address: str, port: int, patience: float, error: Exception) -> RunError:
    return RunError(
        f"preflight: rank {os.environ['RANK']} on {cluster_node.host_name()} does not reach rank 0 at {address}:{port} in "
        f"{patience:g} s ({str(error).splitlines()[0][:200]}): that node is not there, or MASTER_ADDR is wrong"
    )


class Exchange:
    """Messages of one examination among the ranks, through their store."""

    def __init__(self, world: World, patience: float):
        import torch.distributed as dist

        self.world, self.patience = world, patience
        prefix = f"preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_numbers)}"
        self._store = dist.PrefixStore(prefix, _meet(world, patience))

    def group_store(self):
        """A store for the process group of the all-reduces."""
        import torch.distributed as dist

        return dist.PrefixStore("group", self._store)

    def put(self, what: str, text: str, number: int | None = None) -> None:
        self._store.set(f"{what}/{self.world.rank if number is None else number}", text)

    def get(self, what: str, number: int, seconds: float | None = None) -> str:
        """A message, once it is there. Raises RuntimeError after so many seconds (default: patience)."""
        self._store.wait([f"{what}/{number}"], timedelta(seconds=self.patience if seconds is None else seconds))
        return self._store.get(f"{what}/{number}").decode()

    def collect(self, what: str, more: float = 0.0) -> tuple[dict[int, str], list[int]]:
        """(messages by rank, ranks without one after the patience and so many more seconds)."""
        deadline = time.monotonic() + self.patience + more
        found, missing = {}, []
        for rank in range(self.world.size):
            try:
                found[rank] = self.get(what, rank, max(deadline - time.monotonic(), 0.01))
            except RuntimeError:
                missing.append(rank)
        return found, missing

    def publish(self, what: str, message: dict[str, Any], absent: Collection[int] = ()) -> None:
        """Answer all ranks, on rank 0, and wait until those that are there have read it: the store ends with this process."""
        self.put(what, json.dumps(message))
        deadline = time.monotonic() + min(_ACKNOWLEDGE, self.patience)
        for rank in set(range(1, self.world.size)).difference(absent):
            with contextlib.suppress(RuntimeError):
                self.get(f"read/{what}", rank, max(deadline - time.monotonic(), 0.01))

    def await_main(self, what: str, seconds: float) -> dict[str, Any]:
        """The message of rank 0. Raises RunError if there is none."""
        try:
            text = self.get(what, 0, seconds)
            self.put(f"read/{what}", "")
        except RuntimeError:
            raise RunError(f"preflight: rank 0 at {os.environ.get('MASTER_ADDR')} stopped answering") from None
        return json.loads(text)

    def agree(self, fine: bool, what: str) -> bool:
        """True if it is fine on every rank."""
        self.put(what, "fine" if fine else "")
        if self.world.is_main:
            answers, missing = self.collect(what, 5.0)
            self.publish(f"all {what}", {"fine": not missing and all(answers.values())}, missing)
        return self.await_main(f"all {what}", self.patience + 30)["fine"]

    def clock_offset(self) -> float:
        """Seconds by which this node's clock is ahead of rank 0's, which answers every node's first rank in turn."""
        nodes, here, offset = self.world.size // self.world.local_size, self.world.rank // self.world.local_size, 0.0
        if not self.world.is_main:
            with contextlib.suppress(RuntimeError):  # rank 0 ended: `await_main` reports it
                self.get("turn", here)
                asked = wall_clock()
                self.put("ask", "", number=here)
                main = float(self.get("clock", here))
                offset = (asked + wall_clock()) / 2 - main
            return offset
        for node in range(1, nodes):
            self.put("turn", "", number=node)
            with contextlib.suppress(RuntimeError):  # a node that is gone is missing in what is collected
                self.get("ask", node, min(self.patience, 5.0))
                self.put("clock", repr(wall_clock()), number=node)
        return offset


def wall_clock() -> float:
    return time.time()
