"""A user's folder: run.yaml, commands run in it, and what they leave running."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from tests.support.tiny import tiny_settings
from tests.support.warm_command import WarmCommand

LLMTRAIN = [sys.executable, "-m", "llmtrain.cli"]
Process = TypeVar("Process", subprocess.Popen[str], WarmCommand)


class Project:
    """A folder with run.yaml, and the runs it led to."""

    def __init__(self, folder: Path, shards: Path):
        self.folder = folder
        self.shards = shards
        self.run_dir = folder / "run"
        self.write({})

    def write(self, changes: dict[str, Any]) -> None:
        defaults = {"train.duration": "6 steps", "train.microbatch_size": 2, "eval.prompt": "the quick"}
        settings = tiny_settings(self.shards, self.run_dir, defaults | changes)
        (self.folder / "run.yaml").write_text(json.dumps(settings))

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def run(self, *command: str, timeout: float = 600) -> tuple[int, str]:
        """(exit status, everything printed)."""
        with self.running(self.start(list(command))) as process:
            text, _ = process.communicate(timeout=timeout)
        return process.returncode, text

    def llmtrain(self, *arguments: str, timeout: float = 600) -> tuple[int, str]:
        """(exit status, everything printed) of `llmtrain ARGUMENTS` in a process that need not import Composer."""
        with self.running(self.start_warm(*arguments)) as process:
            text, _ = process.communicate(timeout)
        return process.wait(), text

    def start_warm(self, *arguments: str, own_session: bool = False) -> WarmCommand:
        return WarmCommand(self.folder, *arguments, own_session=own_session)

    @contextlib.contextmanager
    def running(self, process: Process) -> Iterator[Process]:
        """A command that ends with this block, and whatever it started."""
        try:
            yield process
        finally:
            stop(process, self.folder)

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())


def seconds_of_children() -> float:
    """Processor seconds of all processes that this one has started and waited for: what else runs does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stop(process: subprocess.Popen | WarmCommand, folder: Path) -> None:
    """Ends a command and whatever it started in its folder: torchrun's ranks are in sessions of their own."""
    for pid in {process.pid, *living(folder)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def living(folder: Path) -> list[int]:
    """Processes that run in a project's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or a zombie
            if (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
    return found


def copy_of(finished: tuple[Project, str], folder: Path) -> Project:
    original, _ = finished
    project = Project(folder, original.shards)
    shutil.copytree(original.run_dir, project.run_dir)
    return project
