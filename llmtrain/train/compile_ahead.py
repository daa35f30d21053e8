"""Compilation of a run's Triton kernels beside the rest of its start, before the first step needs them. No torch here.

One process of each machine (compile_process.py) finds the kernels by a pass over tensors without memory and compiles each in a
process of its own, into Triton's cache. A rank waits for a kernel that is being compiled, and then reads it there.

CACHE/llmtrain/KEY.log: what that process reports, locked as long as it or one of its children runs. CACHE/llmtrain/KEY.json: the
kernels that it compiled, in Triton's cache. While all of these are there, nothing is begun. KEY: a hash of all that the kernels
depend on.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.config.regular_file import open_regular, read_json, read_text
from llmtrain.kernels.platform import gpus_here
from llmtrain.kernels.tuning import own_file
from llmtrain.logs import log
from llmtrain.schema.config import Config
from llmtrain.start import start_phase

HOW = "LLMTRAIN_COMPILE_AHEAD"
"""Environment variable. off: the first step compiles its kernels, one after the other, to compare with."""
BEGUN, COMPILED, FAILED, FOUND_ALL = "begun", "compiled", "failed", "found all"
"""First words of the log's lines: a kernel (`kernel_name`) being compiled; compiled, and its place in Triton's cache; not compiled;
no further kernel is begun."""
_LONGEST = 300.0
"""Seconds after which a rank compiles a kernel itself."""
_POLL = 0.01
_IRRELEVANT = ("duration", "profile", "peak_tflops", "nonfinite", "spike", "max_skipped_steps", "preflight")

_begun: list[subprocess.Popen] = []
"""Kept, or Python would warn of a process that nobody waited for."""


def begin_compiling(config: Config, ranks: int, local_ranks: int) -> None:
    """Begin to compile the kernels of a run, unless they are in Triton's cache or are being compiled. Once on each machine.

    ranks, local_ranks: of the run, and of this machine.
    """
    place = _place(config, ranks, local_ranks)
    if place is None or _is_cached(place):
        return
    try:
        handle = os.open(place.with_suffix(".log"), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmtrain.train.compile_process"],
            stdin=subprocess.PIPE,
            stdout=handle,
            stderr=handle,
            start_new_session=True,  # Ctrl-C is for the run
        )
        assert process.stdin is not None
        with process.stdin as request:
            request.write(pickle.dumps((os.getpid(), config, ranks, local_ranks, place)))
        _begun.append(process)
    except OSError as error:  # another process compiles the same; a file system without locks
        log.debug(f"kernels are not compiled ahead: {error}")
    finally:
        os.close(handle)


def await_compiled(config: Config, ranks: int, local_ranks: int) -> None:
    """Have this rank wait for kernels that are being compiled, each when it is needed, instead of compiling them too."""
    place = _place(config, ranks, local_ranks)
    if place is None or not _is_locked(place.with_suffix(".log")):
        return
    from llmtrain.kernels import launch

    launch.COMPILE[:] = [Awaited(place.with_suffix(".log"))]


class Awaited:
    """launch.COMPILE of a rank. log: KEY.log. waited: seconds, of all kernels."""

    def __init__(self, log: Path):
        self.log, self.over, self.waited = log, False, 0.0

    def __call__(self, name: str, compile_kernel: Callable[[], Any]) -> Any:
        if not self.over and not self._is_ready(kernel_name(name)):
            with start_phase("wait for kernels that are being compiled"):
                began = time.monotonic()
                while not self._is_ready(kernel_name(name)):
                    self.over = time.monotonic() - began > _LONGEST
                    time.sleep(_POLL)
                self.waited += time.monotonic() - began
        return compile_kernel()

    def _is_ready(self, name: str) -> bool:
        """The kernel is compiled, or nobody compiles it."""
        self.over = self.over or not _is_locked(self.log)
        try:
            words = [line.split() for line in read_text(self.log, "replace").splitlines()]
        except OSError:  # the cache is being removed
            self.over = True
            return True
        begun = [BEGUN, name] in words
        ended = any(line[:2] in ([COMPILED, name], [FAILED, name]) for line in words)
        return self.over or ended or (not begun and FOUND_ALL.split() in words)


def kernel_name(text: str) -> str:
    """A short name of a kernel with the kinds of its arguments, the same in all processes."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def write_compiled(place: Path) -> None:
    """Write KEY.json from KEY.log, if nothing failed."""
    lines = [line.split() for line in place.with_suffix(".log").read_text().splitlines()]
    if not any(line[:1] == [FAILED] for line in lines):
        compiled = sorted(line[2] for line in lines if line[:1] == [COMPILED])
        place.with_suffix(".json").write_text(json.dumps(compiled))


def _is_cached(place: Path) -> bool:
    try:
        kernels = read_json(place.with_suffix(".json"))
        return all((place.parent.parent / folder).is_dir() for folder in kernels)
    except (OSError, ValueError, TypeError):
        return False


def _is_locked(file: Path) -> bool:
    try:
        with open_regular(file) as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _place(config: Config, ranks: int, local_ranks: int) -> Path | None:
    """CACHE/llmtrain/KEY. None where kernels are not compiled ahead: without a GPU, and where ranks share layers, whose kernels
    depend on messages between them."""
    parallel = config.train.parallel
    shared = parallel.context * parallel.tensor * parallel.pipeline * parallel.expert > 1
    gpus = gpus_here()
    cache = _triton_cache() if gpus and os.environ.get(HOW) != "off" and not shared else None
    return cache and cache / "llmtrain" / _key(config, ranks, local_ranks, gpus)


def _triton_cache() -> Path | None:
    """The folder of Triton's cache, which is made. All processes of the run get it by the environment: Inductor, which runs first,
    would otherwise name one of its own for each GPU. None where there can be none."""
    named = os.environ.get("TRITON_CACHE_DIR")
    cache = Path(named or Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache")
    try:
        (cache / "llmtrain").mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(cache / "llmtrain", os.W_OK):
        return None
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    return cache


def _key(config: Config, ranks: int, local_ranks: int, gpus: list[str]) -> str:
    train = config.train.model_dump(mode="json", exclude=set(_IRRELEVANT))
    package = Path(__file__).parents[1]
    sources = [path for folder in ("kernels", "models", "adapt") for path in (package / folder).rglob("*.[py][ya]*")]
    tuning = Path(os.environ.get("LLMTRAIN_TUNING") or own_file("").parent)
    what: dict[str, Any] = {
        "model": config.model.model_dump(mode="json"),
        "train": train,
        "adapt": config.adapt and config.adapt.model_dump(mode="json"),
        "objective": config.objective.model_dump(mode="json"),
        "data": [config.data.seq_len, config.data.mask_documents],
        "ranks": [ranks, local_ranks],
        "gpus": gpus,
        "versions": [importlib.metadata.version(name) for name in ("torch", "triton")],
        "environment": sorted(
            (name, value)
            for name, value in os.environ.items()
            if name.startswith(("TRITON_", "LLMTRAIN_LAUNCH")) and name not in config.train.environment.variables
        ),
        "sources": sorted(
            _stamp(path) for path in [*sources, *([tuning] if tuning.is_file() else tuning.glob("*.yaml"))]
        ),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


def _stamp(file: Path) -> list[Any]:
    with contextlib.suppress(OSError):
        found = file.stat()
        return [str(file), found.st_size, found.st_mtime_ns]
    return [str(file)]
