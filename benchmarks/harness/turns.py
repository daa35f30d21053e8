"""Programs that take turns on the GPUs of a machine, each within its own time; what has ended with status 0 is not run again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GRACE = 10
"""Seconds for a program to end after SIGTERM."""
LEAST = 20
"""Seconds without which no program gets a turn."""
TRAINER = "torch,torchao.float8,composer,streaming,llmtrain.train.run,llmtrain.train.report.summary"
"""Modules of a rank of `llmtrain train`."""
TERMINATED = threading.Event()
"""SIGTERM has come: programs are sessions of their own, which it does not reach."""


@dataclass(frozen=True)
class Program:
    """A command whose status is 0 once its whole result is there; run again, it goes on or begins anew.

    gpus: how many are its own while it has its turn; 0: it uses all of them beside others. seconds: time from its turn on after
    which it is cut off. imports: modules that its ranks import while they wait for their turn; none: it starts with its turn.
    last: it needs the results of the others. out: folder of its output and of the mark that it has ended, if not that of all.
    """

    name: str
    command: list[str]
    gpus: int = 1
    seconds: float = 600
    imports: str = ""
    last: bool = False
    out: Path | None = None


@dataclass
class Running:
    program: Program
    process: subprocess.Popen
    turn: Path
    since: float = 0.0


def bench_train(out: Path, name: str, sweep: dict[str, Any], gpus: int, seconds: float) -> Program:
    """`llmtrain bench train` of a sweep in OUT/NAME, whose prepared text is one for all programs in OUT."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    (out / "data").mkdir(exist_ok=True)
    if not (folder / "data").is_symlink():
        (folder / "data").symlink_to(out / "data")
    (folder / "sweep.yaml").write_text(json.dumps(sweep, indent=1), encoding="utf-8")
    command = [sys.executable, "-m", "llmtrain", "bench", "train", str(folder / "sweep.yaml"), "--out", str(folder)]
    return Program(name, command, gpus, seconds, TRAINER)


def take_turns(
    programs: Sequence[Program], out: Path, gpus: int, seconds: float, after: Callable[[], object], threads: int
) -> int:
    """Run programs until they have their results or so many seconds are over. Returns the exit status: 1 where one has none.

    threads: compiler processes of a rank, if the environment does not say."""
    signal.signal(signal.SIGTERM, lambda *_: TERMINATED.set())
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    failed = run(groups(programs, gpus), out, gpus, time.monotonic() + seconds, after)
    after()
    if failed:
        names = ", ".join(failed)
        print(f"without a result: {names}; their output is in {out}, the same command goes on", file=sys.stderr)
    return int(bool(failed))


def groups(programs: Sequence[Program], gpus: int) -> list[list[Program]]:
    """Programs that follow each other, those together that have GPUs beside each other; what is last, alone at the end."""
    found: list[list[Program]] = []
    for program in programs:
        if found and not program.last and sum(one.gpus for one in found[-1]) + program.gpus <= gpus:
            found[-1].append(program)
        elif not program.last:
            found.append([program])
    return found + [[program] for program in programs if program.last]


def run(
    turns: Sequence[Sequence[Program]], out: Path, gpus: int, deadline: float, after: Callable[[], object]
) -> list[str]:
    """Run the programs that lack their results, those of a turn beside each other on GPUs of their own, and the next turn's ranks
    as far as their imports. Returns the names of programs without a result.

    gpus: of this machine. deadline: of time.monotonic(). after: is called when a turn is over.
    """
    wanted = [[program for program in turn if not marker(out, program).exists()] for turn in turns]
    wanted = [turn for turn in wanted if turn]
    ahead: list[Running] = []
    for number, turn in enumerate(wanted):
        if deadline - time.monotonic() < LEAST or TERMINATED.is_set():
            break
        waiting = {one.program.name for one in ahead}
        current = ahead + [begin(one, out, place) for one, place in placed(turn, gpus) if one.name not in waiting]
        for one in current:
            one.turn.touch()
            one.since = time.monotonic()
            print(f"{one.program.name} …", flush=True)
        following = wanted[number + 1] if number + 1 < len(wanted) else []
        ahead = [begin(one, out, place) for one, place in placed(following, gpus) if one.imports]
        wait(current, out, deadline)
        after()
    end([one.process for one in ahead if one.process.poll() is None])
    return [program.name for turn in wanted for program in turn if not marker(out, program).exists()]


def placed(turn: Sequence[Program], gpus: int) -> list[tuple[Program, str | None]]:
    """Programs with the numbers of their GPUs, of those that this process may use; None: all of them. Those of few GPUs share the
    last ones where all that the programs want is more than there are."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    enough = sum(program.gpus for program in turn) <= len(names)
    found, first = [], 0
    for program in turn:
        own = names[first : first + program.gpus] if enough else names[-program.gpus :]
        found.append((program, ",".join(own) if 0 < program.gpus < len(names) else None))
        first += program.gpus
    return found


def begin(program: Program, out: Path, gpus: str | None) -> Running:
    """Start a program, whose ranks wait for a turn where it names imports. gpus: None: all."""
    out = program.out or out
    turn = out / f"{program.name}.turn"
    turn.unlink(missing_ok=True)
    environment = dict(os.environ)
    if program.imports:
        paths = [str(ROOT / "benchmarks" / "harness" / "turn"), *filter(None, [environment.get("PYTHONPATH")])]
        environment |= {"TURN": str(turn), "TURN_IMPORTS": program.imports, "PYTHONPATH": os.pathsep.join(paths)}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    with (out / f"{program.name}.txt").open("wb") as log:
        process = subprocess.Popen(
            program.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    return Running(program, process, turn)


def wait(running: Sequence[Running], out: Path, deadline: float) -> None:
    """Wait for programs until each has ended or its time is over."""
    left = list(running)
    while left:
        now = time.monotonic()
        late = [one for one in left if TERMINATED.is_set() or now > min(deadline, one.since + one.program.seconds)]
        end([one.process for one in late if one.process.poll() is None])
        for one in list(left):
            status = one.process.poll()
            if status is None:
                continue
            left.remove(one)
            how = "cut off" if one in late and status else f"status {status}"
            print(f"{one.program.name}: {how}, {time.monotonic() - one.since:.0f} s", flush=True)
            if status == 0:
                marker(out, one.program).touch()
        time.sleep(0.1)


def marker(out: Path, program: Program) -> Path:
    return (program.out or out) / f"{program.name}.ended"


def end(processes: Sequence[subprocess.Popen]) -> None:
    """End processes and all that they have started, which may have to end runs of their own first."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
