"""Work on a terminal: numbers of bytes, and the progress bars of commands."""

from typing import Any, Self


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes with three digits and a decimal unit: 13.3 GB."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


class Bar:
    """A progress bar on standard error, of `total` steps, with the time left; silent when not `shown`. total: None: no task yet."""

    def __init__(self, shown: bool, total: int | None, *columns: Any, **options: Any) -> None:
        # rich is imported here: `llmtrain check` needs format_bytes, and answers in half a second without it.
        from rich.console import Console
        from rich.progress import Progress, TimeRemainingColumn

        self.shown = shown
        console = Console(stderr=True)
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown, **options)
        if total is not None:
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.shown:  # a bar that is disabled would end with an empty line
            self._bar.stop()

    def stage(self, name: str) -> None:
        self._bar.update(self._task, description=name)

    def advance(self, steps: int = 1) -> None:
        self._bar.advance(self._task, steps)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, highlight=False, soft_wrap=True) if self.shown else print(line)


class CountBar(Bar):
    """Steps done of `total`, each of which takes long. title: in front; may show the stage, `{task.description}`."""

    def __init__(self, shown: bool, total: int, title: str, unit: str = "") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), *[TextColumn(unit)] * bool(unit))
        super().__init__(shown, total, *columns, speed_estimate_period=120)


class ByteBar(Bar):
    """Bytes done of `total`, which may be an estimate."""

    def __init__(self, shown: bool, total: int, title: str = "prepare") -> None:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

        text = TextColumn(f"{title}: {{task.description:<10}}")
        super().__init__(shown, total, text, BarColumn(), DownloadColumn(), TransferSpeedColumn())

    def advance(self, steps: int = 1) -> None:
        super().advance(steps)
        task = self._bar.tasks[0]
        self._bar.update(self._task, total=max(task.total or 0, task.completed))
