"""The start of a run, from the command to the end of the first step: how long its parts take, and a line at least every
three seconds of what happens.

RUN/start.json holds the parts of the newest start. `llmtrain describe` reads it.
"""

import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from llmtrain.config.output_folder import replace_file
from llmtrain.config.regular_file import read_json
from llmtrain.distributed.processes import LAUNCHER, age
from llmtrain.logs import log

FILE = "start.json"
REPORTED_PHASE = 0.5
"""Seconds from which a part of the start is logged when it ends."""
REPORT_INTERVAL = 3.0
"""Seconds after which a part that lasts is logged again."""
_OTHER = "other: Python, the config, checks"
_LAUNCHER = "launcher, before the ranks begin"


class _Start:
    """parts: seconds of each part that ended, without those inside it. open: names of the parts that go on, the innermost last."""

    def __init__(self, began: float):
        self.began, self.parts = began, dict[str, float]()
        self.open: list[str] = []
        self.inner = [0.0]
        """Seconds of parts inside each open one, and of all."""


_start: _Start | None = None


def _now() -> _Start:
    global _start
    if _start is None:
        own = age(os.getpid())
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        whole = age(int(os.environ[LAUNCHER])) if LAUNCHER in os.environ and not restarted else own
        _start = _Start(time.perf_counter() - whole)
        if whole > own:
            _start.parts[_LAUNCHER] = whole - own
    return _start


@contextlib.contextmanager
def start_phase(what: str) -> Iterator[None]:
    """Context of a part of a start, named by a noun. Rank 0 logs it every REPORT_INTERVAL, and its seconds if they are many."""
    start, began, ended = _now(), time.perf_counter(), threading.Event()
    start.open.append(what)
    start.inner.append(0.0)

    def report() -> None:
        while not ended.wait(REPORT_INTERVAL):
            if start.open[-1:] == [what]:
                log.info(f"start: {what} ...  {time.perf_counter() - began:.0f} s so far")

    main = int(os.environ.get("RANK", 0)) == 0
    if main:
        threading.Thread(target=report, name="start", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        start.open.remove(what)
        seconds, inner = time.perf_counter() - began, start.inner.pop()
        start.inner[-1] += seconds
        start.parts[what] = start.parts.get(what, 0.0) + seconds - inner
    if seconds >= REPORTED_PHASE and main:
        log.info(f"start: {what}  {seconds:.1f} s")


@contextlib.contextmanager
def import_phase(what: str) -> Iterator[None]:
    """`start_phase` of imports, without the search for garbage: it is a tenth of their time, and what they make stays."""
    gc.disable()
    try:
        with start_phase(what):
            yield
    finally:
        gc.freeze()
        gc.enable()


def end_start() -> dict[str, float]:
    """Seconds of the parts of this start, which is over, the longest first. The next one in this process begins now."""
    global _start
    start = _now()
    rest = time.perf_counter() - start.began - sum(start.parts.values())
    _start = _Start(time.perf_counter())
    return dict(sorted([*start.parts.items(), (_OTHER, max(rest, 0.0))], key=lambda part: -part[1]))


def table(parts: dict[str, float]) -> list[str]:
    """Lines of a table of where the time went."""
    rows = [f"start:   {seconds:6.1f} s  {name}" for name, seconds in parts.items() if seconds >= 0.05]
    return [f"start: {sum(parts.values()):.1f} s from the command to the end of the first step", *rows]


def write_start(folder: Path, parts: dict[str, float]) -> None:
    """Write RUN/start.json. Raises OSError."""
    content = {"seconds": sum(parts.values()), "parts": parts, "finished": time.strftime("%Y-%m-%d %H:%M:%S")}
    replace_file(folder / FILE, json.dumps(content, indent=1).encode())


def cost_of_start(run_dir: Path) -> str:
    """A line for `describe`: what the newest start of this run cost, and its longest parts (the first start prepares data, say); or
    else the newest of a run beside it, as an estimate."""
    beside = sorted(run_dir.parent.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (run_dir / FILE, *beside):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found = read_json(path)
            longest = sorted(found["parts"].items(), key=lambda part: -part[1])[:2]
            parts = ", ".join(f"{seconds:.0f} s {name}" for name, seconds in longest)
            text = f"{found['seconds']:.0f} s to the end of the first step ({parts})"
            if path.parent == run_dir:
                return f"{text}, on {found['finished']}"
            return f"an estimate: {text} in {path.parent}"
    return f"not known before a first one, which {run_dir / FILE} will hold"
