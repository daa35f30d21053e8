"""One rank, from the config to its exit status, with one error message for the whole run."""

import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from llmtrain.config.held_folder import hold_folder, make_folder, release_folder
from llmtrain.distributed.processes import LAUNCHER
from llmtrain.distributed.run_lock import RunLock, release_all
from llmtrain.distributed.world import World, exit_status_of_rank, initialize, launch_id, world_from_environment
from llmtrain.errors import (
    Preempted,
    RunError,
    UserError,
    is_expected,
    print_error,
    unwritable_output,
    without_credentials,
)
from llmtrain.kernels.platform import build_vendor, detect
from llmtrain.logs import copied_to, file_log, run_log
from llmtrain.schema.config import Config
from llmtrain.start import import_phase, start_phase
from llmtrain.train.compile_ahead import await_compiled, begin_compiling
from llmtrain.train.composer_import import import_composer
from llmtrain.train.environment import apply_environment
from llmtrain.train.faults.early_sigterm import handlers_kept
from llmtrain.train.machine import refuse_what_is_missing
from llmtrain.train.resume import (
    check_resumption,
    download_initial_weights,
    download_newest_checkpoint,
    refuse_used_remote,
    restarts_in_place,
)

_SECONDS_FOR_THE_LAUNCHER = 3.0
_SECONDS_FOR_THE_REPORTING_RANK = 30.0


def run_rank(
    load: Callable[[int], Config],
    file: str,
    overrides: Sequence[str],
    fresh: bool,
    lock: RunLock | None = None,
    preflight: Callable[[str, Path], None] | None = None,
) -> int:
    """Prepare the data, train, and report the result (rank 0). Returns the exit status, or ends a rank of several.

    load: reads and checks the config for so many ranks. file, overrides: as the user gave them, for the report.
    lock: of the run's folder, if this process holds it already. preflight: called before the ranks meet; raises what is wrong.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # a fault in C code (SIGSEGV, SIGBUS) would end the process without a word
    world = world_from_environment()
    folder: Path | None = None

    def run() -> int:
        nonlocal folder, lock
        config = load(world.size)
        if LAUNCHER not in os.environ and world.local_rank == 0:
            begin_compiling(config, world.size, world.local_size)
        with import_phase("import of PyTorch"):
            importlib.import_module("torch")
        environment = apply_environment(config.train.environment, build_vendor(), config.run_dir)
        for line in environment:
            run_log.info(line)
        if preflight is not None:
            preflight(config.train.preflight, Path(config.run_dir))
        lock = lock or _hold(config, world)
        folder = Path(config.run_dir)
        with start_phase("preparation of data, checks and downloads"):
            verified = _prepare(config, world, lock, fresh)
        with copied_to(folder / "logs" / "rank0.txt") if world.is_main else contextlib.nullcontext():
            for line in environment:
                file_log.info(line)  # the terminal has had them
            try:
                status = _train(config, verified, file, overrides)
                unwritable_output()  # the log has it all
                return status
            except BaseException as error:
                file_log.error(f"{type(error).__name__}: {error}")  # the terminal gets it from `_report`
                raise

    try:
        return exit_status_of_rank(run, lambda error: _report(error, folder, world))
    finally:
        release_all()
        release_folder()


def _hold(config: Config, world: World) -> RunLock | None:
    """Hold the run's folder, on rank 0. Raises RunHeldError on every rank if another run does. Every rank calls this."""
    if LAUNCHER in os.environ:  # which holds it for its ranks
        return None
    lock, error = None, None
    if world.is_main:
        try:
            lock = RunLock(config.run_dir)
        except (UserError, RunError) as caught:
            error = caught
    if world.size > 1:
        import torch.distributed as dist

        _refuse_missing_gpus(world)
        initialize()
        answers = [error]
        dist.broadcast_object_list(answers, src=0)
        [error] = answers
    if error is not None:
        raise error
    return lock


def _prepare(config: Config, world: World, lock: RunLock | None, fresh: bool) -> str | None:
    """Everything that comes before the first step of `train`. Returns save_id of a checkpoint here that is verified already."""
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if fresh and first_start:
        refuse_used_remote(config)
    verified = None
    if not fresh:
        launch = launch_id() if world.size > 1 else None
        verified = download_newest_checkpoint(config, launch, progress=sys.stderr.isatty())
        check_resumption(config)
    with start_phase("opening of the GPU's driver"):  # which may wait for other processes, or clear up behind them
        _refuse_missing_gpus(world)
        here = detect()
    refuse_what_is_missing(config.model, config.train, config.data.mask_documents, here)
    download_initial_weights(config, fresh)
    _prepare_data(config, world)
    if fresh and lock and first_start:
        move_aside(lock)  # the other ranks look for a checkpoint only once this one has joined them
    return verified


def _refuse_missing_gpus(world: World) -> None:
    import torch

    available = torch.cuda.device_count()
    if available and world.local_size > available:
        raise UserError(
            f"{world.local_size} processes on this machine, but it has {available} GPU(s); use --nproc {available}"
        )


def _prepare_data(config: Config, world: World) -> None:
    if config.data.prepare is not None:
        from llmtrain.data.partitions.prepared_folder import is_prepared

        if restarts_in_place() and is_prepared(config.data.prepare):
            return  # the sources, which may be many files, were compared when the run began
        from llmtrain.data.prepare_streams import prepare_all

        # Every rank calls this; the first to take the lock works, the others wait and find the shards.
        prepared = prepare_all(config.data.prepare, progress=world.local_rank == 0)
        run_log.info(prepared.summary())


def move_aside(lock: RunLock) -> None:
    """Rename the folder of an earlier run, rather than delete it, and hold a new one."""
    if any(path != lock.path for path in lock.folder.iterdir()):
        aside = lock.folder.with_name(f"{lock.folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        lock.move_aside(aside)
        run_log.info(f"--fresh: the earlier run is now in {aside}")


def _train(config: Config, verified: str | None, file: str, overrides: Sequence[str]) -> int:
    silence_warnings()
    world = world_from_environment()
    _open_gpu(world.local_rank)
    await_compiled(config, world.size, world.local_size)
    process_group = _begin_process_group()
    with handlers_kept(), import_phase("imports of Composer, StreamingDataset and what they need"):
        import_composer()
        from llmtrain.train.report.summary import report
        from llmtrain.train.run import train
    with start_phase("process group"):
        process_group.result()

    began = time.perf_counter()
    hold_folder(Path(config.run_dir))
    with _memory_explained(config):
        outcome = train(config, verified)
    try:
        report(config, outcome, file=file, overrides=overrides, seconds=time.perf_counter() - began)
    except Exception as error:  # the run is complete all the same
        file_log.warning(traceback.format_exc())
        run_log.warning(f"WARNING: training is complete, but not its report: {type(error).__name__}: {error}")
    outcome.uploads.finish()
    return 0


def _open_gpu(device: int) -> None:
    """Begin CUDA's or HIP's context, which takes a second or more, beside the imports. Where it fails, so does its first use.
    Then hash Triton's library of 400 MB, as the key of each kernel has it: half a second, which Triton remembers."""
    import torch

    def begin() -> None:
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=torch.device("cuda", device))
        with contextlib.suppress(ImportError):
            importlib.import_module("triton.runtime.cache").triton_key()

    if torch.cuda.is_available():
        threading.Thread(target=begin, name="GPU", daemon=True).start()


def _begin_process_group() -> Future[None]:
    """Have the ranks meet beside the imports: NCCL's first connections take a second. The result is there once they have."""
    met = Future[None]()

    def meet() -> None:
        try:
            initialize()
            met.set_result(None)
        except BaseException as error:
            met.set_exception(error)

    threading.Thread(target=meet, name="process group", daemon=True).start()
    return met


@contextlib.contextmanager
def _memory_explained(config: Config) -> Iterator[None]:
    """Raises RunError, with what took the memory and what would fit, where a GPU's memory is not enough."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:  # CUDA's and HIP's
        from llmtrain.train.faults.out_of_memory import explain
        from llmtrain.train.graphs.cuda_graphs import graph_memory

        available = torch.cuda.mem_get_info()[1]
        world = world_from_environment()
        text = explain(error, config, world.size, available, world.local_size, graph_memory())
        raise RunError(text) from error


def silence_warnings() -> None:
    """Filter warnings of Composer and its libraries that every start would print, and no user can act on.

    Nothing is filtered with LLMTRAIN_VERBOSE=1.
    """
    if os.environ.get("LLMTRAIN_VERBOSE"):
        return
    warnings.filterwarnings("ignore", module=r"(composer|streaming|torchmetrics|google|pydantic|torch_optimizer)\b.*")
    # The Trainer is given an evaluation interval also when there is no validation data.
    warnings.filterwarnings("ignore", message=r"Specifying `eval_interval")
    # Invalid escapes in torchao, which Composer imports.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logging.getLogger("composer").setLevel(logging.ERROR)
    logging.getLogger("streaming").setLevel(logging.ERROR)
    # Python's resource tracker, a process of its own, warns of StreamingDataset's segments after a failed run;
    # the next run removes them.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")


def _report(error: BaseException, folder: Path | None, world: World) -> None:
    """Print an error of this rank, unless another rank reports it. The traceback of a fault goes to RUN/errors."""
    if isinstance(error, KeyboardInterrupt):
        if world.is_main:
            print_error(error)
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends what waits below
    if isinstance(error, Preempted):  # every rank raises it, at the same step
        if world.is_main:
            print_error(error)
        return
    if not is_expected(error) and _lost_a_peer(error):
        time.sleep(_SECONDS_FOR_THE_LAUNCHER)
    if not _is_first_to_fail(folder, world):
        # Were this rank to end first, the launcher would stop the one that reports, perhaps before it has.
        time.sleep(_SECONDS_FOR_THE_REPORTING_RANK)
        return
    if is_expected(error):
        print_error(error)
        return
    where = f"rank {world.rank} of {world.size} failed" if world.size > 1 else "training failed"
    trace = _write_trace(folder, world, error)
    print(f"\n{where}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"full traceback: {trace}" if trace else traceback.format_exc(), file=sys.stderr, flush=True)


def _is_first_to_fail(folder: Path | None, world: World) -> bool:
    """True for one rank of the run: the others fail because it did, or with it."""
    if world.size == 1:
        return True
    if folder is None:  # the config could not be read, by any rank
        return world.is_main
    marker = folder / "errors" / f"first-{launch_id()}"
    try:
        make_folder(marker.parent)
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True  # a full or read-only disk must not hide the error
    return True


def _lost_a_peer(error: BaseException) -> bool:
    """True for a collective that failed because another rank is gone. That rank, or the launcher, reports the cause; this
    rank does so only if it is not stopped meanwhile."""
    from torch.distributed import DistBackendError, DistNetworkError

    return isinstance(error, (DistBackendError, DistNetworkError)) or "/gloo/transport/" in str(error)


def _write_trace(folder: Path | None, world: World, error: BaseException) -> Path | None:
    if folder is None:
        return None
    path = folder / "errors" / f"rank{world.rank}.txt"
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        path.write_text(without_credentials("".join(traceback.format_exception(error))))
        return path
    return None
