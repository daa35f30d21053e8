"""Bytes on a terminal: a number of them, and the progress bar of commands that work through them."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes with three digits and a decimal unit: 13.3 GB."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


class ByteBar:
    """Bytes done of `total`, on standard error; silent when not `shown`. `total` may be an estimate."""

    def __init__(self, shown: bool, total: int, title: str = "prepare") -> None:
        self._bar = Progress(
            TextColumn(f"{title}: {{task.description:<10}}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._bar.add_task("", total=total)
        self._done = 0

    def __enter__(self) -> ByteBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        self._bar.update(self._task, description=name)

    def advance(self, size: int) -> None:
        self._done += size
        total = self._bar.tasks[0].total or 0
        self._bar.update(self._task, completed=self._done, total=max(total, self._done))
