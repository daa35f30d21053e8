"""One rank, from the command line to its exit status, with one readable error for the whole run."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from llmtrain.distributed.world import World, launch_id, world_from_environment
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config
from llmtrain.train.resume import bring_initial_weights, bring_newest_checkpoint, check_resumption, refuse_used_remote

_SECONDS_FOR_THE_LAUNCHER = 3.0
_SECONDS_FOR_THE_RANK_THAT_SPEAKS = 30.0


def run_rank(args: argparse.Namespace) -> int:
    """Prepares the data, trains, and (on rank 0) reports. Returns the exit status; never raises."""
    world = world_from_environment()
    folder = None
    try:
        config = load_config(args.file, args.overrides, world_size=world.size, check_data=True, fresh=args.fresh)
        folder = Path(config.run_dir)
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if args.fresh and first_start:
            refuse_used_remote(config)
        verified = None
        if not args.fresh:
            verified = bring_newest_checkpoint(
                config, launch_id() if world.size > 1 else None, progress=sys.stderr.isatty()
            )
            check_resumption(config)
        bring_initial_weights(config, args.fresh)
        _refuse_missing_gpus(world)
        _prepare_data(config, world)
        if args.fresh and world.is_main and first_start:
            set_aside(folder)  # the other ranks look for a checkpoint only once this one has joined them
        return _train(config, args, verified)
    except KeyboardInterrupt:
        return _leave(130)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends what waits below
        if type(error).__name__ == "Preempted":
            if world.is_main:
                print(error, file=sys.stderr, flush=True)
            return _leave(128 + signal.SIGTERM)
        if isinstance(error, ValueError) and _raised_by_us(error):
            if _speaks(folder, world):
                print(error, file=sys.stderr, flush=True)
            # A disk that is full is no mistake in the config.
            return _leave(1 if type(error).__name__ == "SaveError" else 2)
        if _lost_a_peer(error):
            time.sleep(_SECONDS_FOR_THE_LAUNCHER)
        if _speaks(folder, world):
            where = f"rank {world.rank} of {world.size} failed" if world.size > 1 else "training failed"
            trace = _write_trace(folder, world, error)
            print(f"\n{where}: {type(error).__name__}: {error}", file=sys.stderr)
            print(f"full traceback: {trace}" if trace else traceback.format_exc(), file=sys.stderr, flush=True)
        return _leave(1)


def _train(config: Config, args: argparse.Namespace, verified: str | None) -> int:
    if not os.environ.get("LLMTRAIN_VERBOSE"):
        from llmtrain.train.composer_fixes import quiet

        quiet()
    from llmtrain.train.report import report
    from llmtrain.train.run import train

    began = time.perf_counter()
    outcome = train(config, verified)
    report(config, outcome, file=args.file, overrides=args.overrides, seconds=time.perf_counter() - began)
    outcome.uploads.finish()
    return 0


def _refuse_missing_gpus(world: World) -> None:
    import torch

    available = torch.cuda.device_count()
    if available and world.local_size > available:
        raise ValueError(
            f"{world.local_size} processes on this machine, but it has {available} GPU(s); use --nproc {available}"
        )


def _prepare_data(config: Config, world: World) -> None:
    if config.data.prepare is not None:
        from llmtrain.data.prepare import prepare

        # Every rank asks; the first to take the lock works, the others wait and find the shards.
        prepared = prepare(config.data.prepare, progress=world.local_rank == 0)
        if world.is_main:
            print(prepared.summary(), flush=True)


def set_aside(folder: Path) -> None:
    """Moves an earlier run's files away rather than delete them. Nothing is lost."""
    if folder.exists():
        aside = folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.rename(aside)
        print(f"--fresh: the earlier run is now in {aside}", flush=True)


def _speaks(folder: Path | None, world: World) -> bool:
    """Whether this rank tells the story. One that does not waits to be stopped: were it the first to leave, the launcher
    would stop the rank that speaks, perhaps before its first word."""
    first = _first_to_fail(folder, world)
    if not first:
        time.sleep(_SECONDS_FOR_THE_RANK_THAT_SPEAKS)
    return first


def _first_to_fail(folder: Path | None, world: World) -> bool:
    """True for one rank of the run: the first that fails tells the story, the others only fail with it."""
    if world.size == 1:
        return True
    if folder is None:  # the config could not be read: all ranks fail alike
        return world.is_main
    marker = folder / "errors" / f"first-{launch_id()}"
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True  # a full or read-only disk must not silence the error
    return True


def _lost_a_peer(error: BaseException) -> bool:
    """A collective that failed because another rank is gone. That rank, or the launcher that missed it, tells why: this
    one speaks only if it is not stopped meanwhile."""
    return type(error).__name__ in ("DistBackendError", "DistNetworkError") or "/gloo/transport/" in str(error)


def _raised_by_us(error: BaseException) -> bool:
    """A ValueError of this package is addressed to the user and is the whole story; a library's is a failure to look into."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).is_relative_to(Path(__file__).parents[1])


def _write_trace(folder: Path | None, world: World, error: BaseException) -> Path | None:
    if folder is None:
        return None
    path = folder / "errors" / f"rank{world.rank}.txt"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
        return path
    return None


def _leave(status: int) -> int:
    """In a group of ranks, ends at once: a normal exit would wait for collectives that will never complete."""
    if world_from_environment().size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
