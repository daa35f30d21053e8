"""Pictures by matplotlib, without pyplot, whose state belongs to the main thread. A file appears whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.config.output_folder import OutputError, replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    from matplotlib.figure import Figure  # here: commands that draw nothing answer without it

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path, dpi: int = 120, make_folder: bool = False) -> Path:
    """Write a figure in the format of the file's name. Raises OutputError where it cannot be written."""
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi, format=path.suffix.lower().removeprefix("."))
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.getvalue())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def plain(text: str) -> str:
    """The text for a label, of which matplotlib makes no formula."""
    return text.replace("$", r"\$")
