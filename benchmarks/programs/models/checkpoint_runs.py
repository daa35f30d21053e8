"""Measuring saves and resumes of one model, for benchmarks/checkpoint.py."""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from benchmarks.harness.report import device_name, rounded
from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.collective import newest_checkpoint, verify_in_shares
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.storage import THREADS
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.save_load import RunState
from llmtrain.checkpoint.saver import Saver
from llmtrain.distributed.world import gloo_group, initialize, world_from_environment
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.train.optim import build_optimizer
from llmtrain.train.parallel import parallelize

_WARM_UP, _ALONE = 3, 8
"""Steps that are not measured; steps without a save."""


class Training:
    """A sharded model, its optimizer, and steps on random tokens."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        with torch.device("meta"):
            self.model = HybridLM(config.model, dtype=getattr(torch, config.train.dtype))
        self.causal_lm = CausalLM(self.model, config.train.loss)
        parallelize(self.causal_lm, config.train, world_from_environment(), device)
        self.optimizer = build_optimizer(self.model, config.optimizer)

    def step(self) -> None:
        size = self.config.train.microbatch_size
        assert isinstance(size, int), "name a number for train.microbatch_size"
        shape = (size, self.config.data.seq_len)
        ids = torch.randint(self.config.model.vocab_size, shape, device=self.device)
        self.causal_lm.loss(ids, ids.roll(-1, 1)).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return save_load.flat_state(self.model, self.optimizer)


def measure(config: Config, folder: Path, *, saves: int, seconds: float, repeat: int) -> dict[str, Any]:
    """Figures of all parts, the same on every rank. Each part is printed when it is done, in case a time limit ends the rest."""
    device = initialize()
    start = _process_age()
    torch.manual_seed(config.seed)
    began = time.perf_counter()
    ours, theirs = folder / "llmtrain", folder / "torch"
    training = Training(config, device)
    training.model.init_weights(config.seed)
    run = RunState(1, 0, config.model_dump(mode="json"), {}, {})
    figures: dict[str, Any] = {"model": config.name, "ranks": dist.get_world_size(), "device": device_name()}
    figures |= _printed(_in_background(training, ours, run, saves, seconds))
    figures |= _printed(_synchronous(training, ours, theirs, run, repeat))
    shutil.rmtree(theirs, ignore_errors=True)
    del training
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    figures |= _resume(config, device, ours, start)
    return figures | {"seconds_in_all": time.perf_counter() - began}


def _in_background(training: Training, root: Path, run: RunState, saves: int, seconds: float) -> dict[str, Any]:
    alone = [timed(training.step) for _ in range(_WARM_UP + _ALONE)][_WARM_UP:]
    state = training.state
    nbytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    blocked, written, saving, beside = [], [], [], []
    with Saver(
        root,
        training.model,
        training.optimizer,
        retention=Retention(1),
        background=True,
        group=gloo_group(),
        warn=_print_rank_0,
    ) as saver:
        prepared = timed(saver.prepare)
        first = time.perf_counter()
        for number in range(saves):
            if _any_rank(number > 1 and time.perf_counter() - first > seconds, training.device):
                break

            def save_and_step() -> None:
                training.step()
                if training.device.type == "cuda":
                    torch.cuda.synchronize()  # what the step itself takes is not the save's
                dist.barrier()
                saver.save(run)

            began = time.perf_counter()
            saving.append(timed(save_and_step))
            blocked.append(saver.blocked_seconds)
            while _any_rank(saver.busy, training.device):
                beside.append(timed(training.step))
            saver.finish()
            written.append(time.perf_counter() - began)
    return {
        "parameters": parameters,
        "gigabytes": nbytes / 1e9,
        "step_seconds": statistics.median(alone),
        "longest_step_alone_seconds": max(alone),
        "buffers_seconds": prepared,
        "blocked_seconds": statistics.median(blocked),
        "blocked_seconds_all": blocked,
        "longest_step_with_save_seconds": max(saving),
        "step_while_writing_seconds": statistics.median(beside) if beside else None,
        "longest_step_while_writing_seconds": max(beside) if beside else None,
        "background_save_seconds": statistics.median(written),
    }


def _synchronous(training: Training, ours: Path, theirs: Path, run: RunState, repeat: int) -> dict[str, Any]:
    state = training.state
    nbytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))

    def save() -> None:
        save_load.write(ours, state, save_load.local_tensors(state), run, Retention(1))

    def save_by_torch() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(dict(state), storage_writer=FileSystemWriter(theirs, thread_count=THREADS, sync_files=True))

    seconds: dict[str, list[float]] = {"save": [], "torch_save": []}
    for _ in range(repeat):
        if dist.get_rank() == 0:
            shutil.rmtree(ours, ignore_errors=True)  # both write into an empty folder
            shutil.rmtree(theirs, ignore_errors=True)
        seconds["save"].append(timed(save))
        seconds["torch_save"].append(timed(save_by_torch))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {f"{name}_seconds": value for name, value in medians.items()} | {
        f"{name}_gigabytes_per_second": nbytes / value / 1e9 for name, value in medians.items()
    }


def _resume(config: Config, device: torch.device, root: Path, start: float) -> dict[str, Any]:
    """Measure a resume. start: seconds that this process took to start, as a resumed run would."""
    parts = {"start": start}

    def part(name: str, action: Callable[[], Any]) -> Any:
        results: list[Any] = []
        parts[name] = timed(lambda: results.append(action()))
        return results[0]

    _drop_cached_pages(root)
    found = part("find", lambda: newest_checkpoint(root, verify=False, warn=_print_rank_0))
    assert found is not None
    part("verify", lambda: verify_in_shares(found.folder, found.require()))
    _drop_cached_pages(root)  # a checkpoint larger than memory, or on a network, is read twice
    training = part("build", lambda: Training(config, device))
    load = {"manifest": found.manifest, "verify": False}
    part("read", lambda: save_load.load(found.folder, training.model, training.optimizer, **load))
    part("first_step", training.step)
    return {"resume_seconds": sum(parts.values())} | {f"resume_{name}_seconds": took for name, took in parts.items()}


def timed(action: Callable[[], object]) -> float:
    """Run an action. Returns the seconds until every rank has finished it."""
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - began


def _process_age() -> float:
    """Seconds since this process began: Python, imports, process group."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Return True if `flag` is true on any rank."""
    found = torch.tensor([flag], dtype=torch.int32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def _drop_cached_pages(folder: Path) -> None:
    """Ask the kernel to drop its cached pages of a folder's files, so that they are read from the disk."""
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file() and path.name != manifests.NAME:
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
    dist.barrier()


def _printed(part: dict[str, Any]) -> dict[str, Any]:
    _print_rank_0(json.dumps(rounded(part)))
    return part


def _print_rank_0(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
