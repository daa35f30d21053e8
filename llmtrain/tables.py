"""Tables as text: columns of a terminal, Markdown, CSV."""

import csv
import io
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> Iterator[str]:
    """Lines of columns with two spaces between them. left: numbers of those that are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


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
