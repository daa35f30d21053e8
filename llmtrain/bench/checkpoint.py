"""What saving and resuming cost, beside torch's own distributed checkpoint in the same run.

    [torchrun --nproc-per-node N] -m llmtrain.bench.checkpoint FILE FOLDER [--repeat 3] [a.b=c …]

FILE's model with random weights and AdamW state, sharded over the ranks as in training, is saved into FOLDER: in the
background (how long a step is held up), synchronously, and by torch's dcp.save (both flush every file to the disk; ours
hashes it too), in turn. Then it is loaded from the disk, as far as the kernel forgets its cached pages when told. The
median of each is printed, and every measurement.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial as bind
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint import store
from llmtrain.checkpoint.newest import newest
from llmtrain.checkpoint.rotation import Keep
from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.store import About
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.models.hybrid import HybridLM
from llmtrain.train.distributed import gloo_group, initialize, world_from_environment
from llmtrain.train.optim import build_optimizer
from llmtrain.train.parallel import parallelize


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_intermixed_args(arguments)
    measure(load_config(args.file, args.overrides), args.folder, args.repeat)
    return 0


def measure(config: Config, folder: Path, repeat: int) -> None:
    device = initialize()
    model, optimizer = build(config, device)
    state = store.flat_state(model, optimizer)
    nbytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"{parameters:,} parameters, {nbytes / 1e9:.2f} GB with AdamW's state, {dist.get_world_size()} rank(s), {device}"
    )
    about = About(0, 0, config.model_dump(mode="json"), {}, {})

    ours, theirs = folder / "llmtrain", folder / "torch"
    saver = Saver(ours, model, optimizer, keep=Keep(1), background=True, group=gloo_group(), warn=say)
    with saver:
        tell("buffers of background saves", [timed(saver.prepare)])
        blocked: list[float] = []

        def save_beside() -> None:
            saver.save(about)
            blocked.append(saver.blocked_seconds)
            saver.finish()

        written = [timed(save_beside) for _ in range(repeat)]
        tell("background save: step blocked", blocked)
        tell("background save: until on disk", written, nbytes)

    def save() -> None:
        store.write(ours, state, store.local_tensors(state), about, Keep(1))

    def save_by_torch() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(theirs, ignore_errors=True)
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(dict(state), checkpoint_id=theirs)

    seconds: dict[str, list[float]] = {"synchronous save": [], "torch's dcp.save": []}
    for _ in range(repeat):
        seconds["synchronous save"].append(timed(save))
        seconds["torch's dcp.save"].append(timed(save_by_torch))
    for name, found in seconds.items():
        tell(name, found, nbytes)

    verified, loaded, by_torch = [], [], []
    for _ in range(repeat):
        forget(ours)
        found = newest(ours, verify=True, warn=say)
        assert found is not None
        verified.append(found.seconds)
        forget(ours)
        manifest = found.manifest
        loaded.append(timed(bind(store.load, found.folder, model, optimizer, manifest=manifest, verify=False)))
        forget(theirs)
        by_torch.append(timed(lambda: dcp.load(dict(state), checkpoint_id=theirs)))
    tell("resume: verify every byte", verified, nbytes)
    tell("resume: read and load", loaded, nbytes)
    tell("torch's dcp.load", by_torch, nbytes)


def build(config: Config, device: torch.device) -> tuple[HybridLM, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = HybridLM(config.model)
    parallelize(model, config.train, world_from_environment(), device)
    model.init_weights(config.seed)
    optimizer = build_optimizer(model, config.optimizer)
    store.flat_state(model, optimizer)  # makes the optimizer's state
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].uniform_()
    return model, optimizer


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


def forget(folder: Path) -> None:
    """Asks the kernel to drop its cached pages of a folder's files, so that they are read from the disk."""
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file() and path.name != manifests.NAME:
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
    dist.barrier()


def tell(name: str, seconds: list[float], nbytes: int | None = None) -> None:
    median = statistics.median(seconds)
    rate = f"  {nbytes / median / 1e9:7.2f} GB/s" if nbytes else ""
    say(f"{name:32} {median:8.3f} s{rate}   ({', '.join(f'{value:.3f}' for value in seconds)})")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
