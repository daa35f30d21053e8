"""Files that appear whole, and tables in Markdown and CSV."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llmtrain.config.output_folder import replace_file


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically."""
    replace_file(path, content)
    return path


def write_text(path: Path, text: str) -> Path:
    return write_file(path, text.encode(errors="backslashreplace"))


def file_name(text: str) -> str:
    """The text, with `_` for what does not belong in a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> list[str]:
    """Lines of a table. numbers: all columns but the first are aligned to the right."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in escaped]
    rule = "| ---: " if numbers else "| --- "
    return [lines[0], "| --- " + rule * (len(heads) - 1) + "|", *lines[1:]]


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
