"""What saving and resuming cost, beside torch's own distributed checkpoint in the same run.

    [torchrun --nproc-per-node N] -m benchmarks.checkpoint FILE FOLDER [a.b=c …] [--saves 3] [--repeat 1]

FILE's model takes training steps on random tokens (one microbatch each), sharded as in training; FOLDER is where
checkpoints go. Measured: how long a step is held up by a save in the background, and the steps beside it; a synchronous
save, and torch's dcp.save to a FileSystemWriter with as many threads, in turn (both flush every file to the disk; ours
hashes it too); and a resume, part by part, from the disk as far as the kernel forgets its cached pages when told.
Prints each part's figures when it is done, then a Markdown table, and everything as one line of JSON. Add
train.compile=off: compiling says nothing here.
"""

from __future__ import annotations

import argparse
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

from llmtrain.bench.entry import end_with
from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint import store
from llmtrain.checkpoint.newest import newest
from llmtrain.checkpoint.rotation import Keep
from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.storage import THREADS
from llmtrain.checkpoint.store import About
from llmtrain.distributed.world import gloo_group, initialize, world_from_environment
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config
from llmtrain.train.optim import build_optimizer
from llmtrain.train.parallel import parallelize
from llmtrain.train.precision import compute_dtype

_WARM_UP, _ALONE = 3, 8
"""Steps that are not measured; steps without a save."""


class Training:
    """A sharded model, its optimizer, and steps on random tokens."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        with torch.device("meta"):
            self.model = HybridLM(config.model, config.train.loss, dtype=compute_dtype(config.train.precision))
        parallelize(self.model, config.train, world_from_environment(), device)
        self.optimizer = build_optimizer(self.model, config.optimizer)

    def step(self) -> None:
        shape = (self.config.train.microbatch_size, self.config.data.seq_len)
        ids = torch.randint(self.config.model.vocab_size, shape, device=self.device)
        self.model(ids, ids.roll(-1, 1)).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return store.flat_state(self.model, self.optimizer)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--saves", type=int, default=3, help="in the background")
    parser.add_argument("--seconds", type=float, default=30.0, help="after which no third or later one of them begins")
    parser.add_argument("--repeat", type=int, default=1, help="synchronous saves of each kind")
    args = parser.parse_intermixed_args(arguments)
    config = load_config(args.file, args.overrides)
    device = initialize()
    start = _age()
    torch.manual_seed(config.seed)
    began = time.perf_counter()
    ours, theirs = args.folder / "llmtrain", args.folder / "torch"
    training = Training(config, device)
    training.model.init_weights(config.seed)
    about = About(1, 0, config.model_dump(mode="json"), {}, {})
    found: dict[str, Any] = {"model": config.name, "ranks": dist.get_world_size(), "device": _name(device)}
    found |= _told(_in_background(training, ours, about, args.saves, args.seconds))
    found |= _told(_synchronous(training, ours, theirs, about, args.repeat))
    shutil.rmtree(theirs, ignore_errors=True)
    del training
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found |= _resume(config, device, ours, start)
    found["seconds_in_all"] = time.perf_counter() - began
    if dist.get_rank() == 0:
        print(table(found))
        print(json.dumps({name: _rounded(value) for name, value in found.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _in_background(training: Training, root: Path, about: About, saves: int, seconds: float) -> dict[str, Any]:
    alone = [timed(training.step) for _ in range(_WARM_UP + _ALONE)][_WARM_UP:]
    state = training.state
    nbytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    blocked, written, saving, beside = [], [], [], []
    with Saver(
        root, training.model, training.optimizer, keep=Keep(1), background=True, group=gloo_group(), warn=_say
    ) as saver:
        prepared = timed(saver.prepare)
        first = time.perf_counter()
        for number in range(saves):
            if _any(number > 1 and time.perf_counter() - first > seconds, training.device):
                break

            def save_and_step() -> None:
                training.step()
                if training.device.type == "cuda":
                    torch.cuda.synchronize()  # what the step itself takes is not the save's
                dist.barrier()
                saver.save(about)

            began = time.perf_counter()
            saving.append(timed(save_and_step))
            blocked.append(saver.blocked_seconds)
            while _any(saver.busy, training.device):
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


def _synchronous(training: Training, ours: Path, theirs: Path, about: About, repeat: int) -> dict[str, Any]:
    state = training.state
    nbytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))

    def save() -> None:
        store.write(ours, state, store.local_tensors(state), about, Keep(1))

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
    """start: seconds that this process took to begin, as that of a resumed run would."""
    parts = {"start": start}

    def part(name: str, action: Callable[[], Any]) -> Any:
        answers: list[Any] = []
        parts[name] = timed(lambda: answers.append(action()))
        return answers[0]

    _forget(root)
    found = part("find", lambda: newest(root, verify=False, warn=_say))
    assert found is not None
    part("verify", lambda: store.verify_together(found.folder, found.manifest))
    _forget(root)  # a checkpoint larger than memory, or on a network, is read twice
    training = part("build", lambda: Training(config, device))
    load = {"manifest": found.manifest, "verify": False}
    part("read", lambda: store.load(found.folder, training.model, training.optimizer, **load))
    part("first_step", training.step)
    return {"resume_seconds": sum(parts.values())} | {f"resume_{name}_seconds": took for name, took in parts.items()}


def table(found: dict[str, Any]) -> str:
    """Markdown."""

    def seconds(name: str) -> str:
        value = found[f"{name}_seconds"]
        return "(none)" if value is None else f"{value:.3f} s"

    rows = [
        ("a training step (median, longest)", f"{seconds('step')}, {seconds('longest_step_alone')}"),
        ("step blocked by a background save (median)", seconds("blocked")),
        ("longest step with a save in it", seconds("longest_step_with_save")),
        (
            "steps while it is written (median, longest)",
            f"{seconds('step_while_writing')}, {seconds('longest_step_while_writing')}",
        ),
        ("background save, until on disk", seconds("background_save")),
        ("synchronous save", f"{seconds('save')}, {found['save_gigabytes_per_second']:.2f} GB/s"),
        ("torch's dcp.save", f"{seconds('torch_save')}, {found['torch_save_gigabytes_per_second']:.2f} GB/s"),
        *(
            (f"resume: {name.replace('_', ' ')}", seconds(f"resume_{name}"))
            for name in ("start", "find", "verify", "build", "read", "first_step")
        ),
        ("resume, all of it", seconds("resume")),
    ]
    title = (
        f"{found['model']}: {found['parameters']:,} parameters, {found['gigabytes']:.2f} GB with AdamW's state, "
        f"{found['ranks']} rank(s), {found['device']}"
    )
    return "\n".join([title, "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""])


def timed(action: Callable[[], object]) -> float:
    """Seconds until every rank is done."""
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - began


def _age() -> float:
    """Seconds since this process began: Python, imports, process group."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _any(flag: bool, device: torch.device) -> bool:
    """Whether it is true on any rank."""
    found = torch.tensor([flag], dtype=torch.int32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def _forget(folder: Path) -> None:
    """Asks the kernel to drop its cached pages of a folder's files, so that they are read from the disk."""
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file() and path.name != manifests.NAME:
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
    dist.barrier()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _told(part: dict[str, Any]) -> dict[str, Any]:
    """Figures that are known, for when a time limit ends the rest."""
    _say(json.dumps({name: _rounded(value) for name, value in part.items()}))
    return part


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    end_with(main)
