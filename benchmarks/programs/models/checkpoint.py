"""Cost of saving and resuming, beside torch's own distributed checkpoint in the same run.

    [torchrun --nproc-per-node N] -m benchmarks checkpoint FILE FOLDER [a.b=c …] [--saves 3] [--repeat 1]

FILE's model takes training steps on random tokens (one microbatch each), sharded as in training; FOLDER is where
checkpoints go. Measured: how long a step is held up by a save in the background, and the steps beside it; a synchronous
save, and torch's dcp.save to a FileSystemWriter with as many threads, in turn (both flush every file to the disk; ours
hashes it too); and a resume, part by part, from the disk as far as the kernel drops its cached pages on request.
Prints each part's figures when it is done, in case a time limit ends the rest. Add train.compile=off: compiling does not
matter here.
"""

import gc
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.models import clock
from benchmarks.harness.ranks import Training
from benchmarks.harness.report import Report
from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.collective import newest_checkpoint, verify_in_shares
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.storage import THREADS
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.save_load import RunState
from llmtrain.checkpoint.saver import Saver
from llmtrain.distributed.processes import age
from llmtrain.distributed.world import gloo_group, initialize
from llmtrain.errors import UserError
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

_WARM_UP, _ALONE = 3, 8
"""Steps that are not measured; steps without a save."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True, out=True)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--saves", type=positive, default=3, help="in the background")
    parser.add_argument("--seconds", type=number, default=30.0, help="after which no third or later one of them begins")
    parser.add_argument("--repeat", type=positive, default=1, help="synchronous saves of each kind")
    args = parser.parse(argv)
    config = load_config(args.file, args.overrides)
    if not isinstance(config.train.microbatch_size, int):
        raise UserError("benchmarks checkpoint: name a number for train.microbatch_size")
    initialize()
    report = Report(args.out if dist.get_rank() == 0 else None, quiet=dist.get_rank() > 0)
    measure(config, args.folder, report, saves=args.saves, seconds=args.seconds, repeat=args.repeat)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(config: Config, folder: Path, report: Report, *, saves: int, seconds: float, repeat: int) -> None:
    """Rows of all parts, the same on every rank."""
    start = age(os.getpid())  # of Python, imports and the process group
    torch.manual_seed(config.seed)
    ours, theirs = folder / "llmtrain", folder / "torch"
    training = Training(config)
    run = RunState(1, 0, config.model_dump(mode="json"), {}, {})
    _in_background(training, config, ours, run, report, saves, seconds)
    _synchronous(training, ours, theirs, run, report, repeat)
    shutil.rmtree(theirs, ignore_errors=True)
    del training
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _resume(config, ours, start, report)


def _step(training: Training, config: Config) -> Callable[[], object]:
    """A step of one microbatch of random tokens."""
    ids = torch.randint(config.model.vocab_size, (int(config.train.microbatch_size), config.data.seq_len))
    part = training.own(ids, ids.roll(-1, 1))
    return lambda: training.step(part)


def _state(training: Training) -> dict[str, Any]:
    return save_load.flat_state(training.model, training.optimizer)


def _gigabytes(state: dict[str, Any]) -> float:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor)) / 1e9


def _in_background(
    training: Training, config: Config, root: Path, run: RunState, report: Report, saves: int, seconds: float
) -> None:
    step = _step(training, config)
    alone = [timed(step) for _ in range(_WARM_UP + _ALONE)][_WARM_UP:]
    report.add("a training step, median", time_s=statistics.median(alone), state_gb=_gigabytes(_state(training)))
    report.add("a training step, longest", time_s=max(alone))
    blocked, written, saving, beside = [], [], [], []
    options = {"retention": Retention(1), "background": True, "group": gloo_group(), "warn": _print_rank_0}
    with Saver(root, training.model, training.optimizer, **options) as saver:
        report.add("pinned buffers, before training", time_s=timed(saver.prepare))
        first = time.perf_counter()
        for count in range(saves):
            if _any_rank(count > 1 and time.perf_counter() - first > seconds, training.device):
                break

            def save_and_step() -> None:
                step()
                if training.device.type == "cuda":
                    torch.cuda.synchronize()  # what the step itself takes is not the save's
                dist.barrier()
                saver.save(run)

            began = time.perf_counter()
            saving.append(timed(save_and_step))
            blocked.append(saver.blocked_seconds)
            while _any_rank(saver.busy, training.device):
                beside.append(timed(step))
            saver.finish()
            written.append(time.perf_counter() - began)
    report.add("step blocked by a background save, median", time_s=statistics.median(blocked))
    report.add("longest step with a save in it", time_s=max(saving))
    if beside:
        report.add("step while it is written, median", time_s=statistics.median(beside))
        report.add("step while it is written, longest", time_s=max(beside))
    report.add("background save, until on disk", time_s=statistics.median(written))


def _synchronous(training: Training, ours: Path, theirs: Path, run: RunState, report: Report, repeat: int) -> None:
    state = _state(training)

    def save() -> None:
        save_load.write(ours, state, save_load.local_tensors(state), run, Retention(1))

    def save_by_torch() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(dict(state), storage_writer=FileSystemWriter(theirs, thread_count=THREADS, sync_files=True))

    kinds = {"synchronous save, flushed and hashed": save, "torch's `dcp.save`, same run": save_by_torch}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeat):
        if dist.get_rank() == 0:
            shutil.rmtree(ours, ignore_errors=True)  # both write into an empty folder
            shutil.rmtree(theirs, ignore_errors=True)
        for name, action in kinds.items():
            seconds[name].append(timed(action))
    for name, values in seconds.items():
        report.add(name, time_s=statistics.median(values), gb_per_s=_gigabytes(state) / statistics.median(values))


def _resume(config: Config, root: Path, start: float, report: Report) -> None:
    """Measure a resume. start: seconds that this process took to start, as a resumed run would."""
    parts = {"start of the process": start}

    def part(name: str, action: Callable[[], Any]) -> Any:
        results: list[Any] = []
        parts[name] = timed(lambda: results.append(action()))
        return results[0]

    _drop_cached_pages(root)
    found = part("find", lambda: newest_checkpoint(root, verify=False, warn=_print_rank_0))
    assert found is not None
    part("verify", lambda: verify_in_shares(found.folder, found.require()))
    _drop_cached_pages(root)  # a checkpoint larger than memory, or on a network, is read twice
    training = part("build", lambda: Training(config))
    load = {"manifest": found.manifest, "verify": False}
    part("read", lambda: save_load.load(found.folder, training.model, training.optimizer, **load))
    part("first step", _step(training, config))
    report.add("resume to the first step's end", time_s=sum(parts.values()))
    for name, took in parts.items():
        report.add(f"… {name}", time_s=took)


def timed(action: Callable[[], object]) -> float:
    """Run an action. Returns the seconds until every rank has finished it."""
    dist.barrier()
    began = clock()
    action()
    clock()
    dist.barrier()
    return time.perf_counter() - began


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


def _print_rank_0(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
