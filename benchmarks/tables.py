"""BENCHMARKS.md and README's table of speeds, from the rows in results/ and the layout in tables.yaml.

    python -m benchmarks.tables [--check]

results/NAME.json has `device`, `commit`, `date` and `command` of a measurement, null where one was not noted, and `rows`: `what`
was measured, and figures whose names end in their unit (`step_ms`). A row may override the provenance. A cell of the layout is a
template: `{step_ms:.1f}` is a field, and a part in square brackets is left out where a field in it is missing.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from llmtrain.errors import UserError, exit_with

ROOT = Path(__file__).parents[1]
RESULTS, LAYOUT = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "tables.yaml"
BEGIN, END = "<!-- figures: python -m benchmarks.tables -->", "<!-- end of figures -->"
PROVENANCE = ("device", "commit", "date", "command")
UNITS = {
    "accuracy": "share correct", "bits_per_byte": "bits/byte", "count": "", "cpu_s": "CPU-s",
    "documents_per_s": "documents/s", "error": "relative error", "gb_per_s": "GB/s", "gb": "GB", "gib": "GiB",
    "mb_per_cpu_s": "MB per CPU-second", "mb_per_s": "MB/s", "mb": "MB", "mib": "MiB", "million": "10^6",
    "million_tokens_per_s": "10^6 tokens/s", "ms_per_mb": "CPU-ms/MB", "ms": "ms", "nats": "nats", "percent": "%",
    "s": "s", "tb_per_s": "TB/s", "tokens_per_s": "tokens/s", "us": "µs", "x": "×",
}  # fmt: skip
"""Units by the end of a figure's name."""

Row = dict[str, Any]


def unit(field: str) -> str:
    """Unit of a figure by the longest ending in UNITS. Raises UserError where there is none."""
    for ending in sorted(UNITS, key=len, reverse=True):
        if field == ending or field.endswith(f"_{ending}"):
            return UNITS[ending]
    raise UserError(f"{field}: the name of a figure ends in its unit, one of {', '.join(UNITS)}")


def rows(name: str, folder: Path = RESULTS) -> list[Row]:
    """Rows of results/NAME.json, each with the provenance that it shares."""
    file = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return [{**{key: file[key] for key in PROVENANCE}, **row} for row in file["rows"]]


def figures(name: str, folder: Path = RESULTS) -> Iterator[Row]:
    """Every number by itself: what, figure, value, unit, device, commit, date, command."""
    for row in rows(name, folder):
        provenance = {key: row[key] for key in PROVENANCE}
        for field, value in row.items():
            if isinstance(value, int | float):
                yield {"what": row["what"], "figure": field, "value": value, "unit": unit(field), **provenance}


def filled(template: str, row: Row) -> str:
    """The template with the row's fields; empty where a field outside of brackets is missing."""

    def field(found: re.Match[str]) -> str:
        value = row[found[1]]
        text = format(value, found[2] or "") if value is not None else ""
        return re.sub(r"e([+-])0+(?=\d)", r"e\1", text) if isinstance(value, float) else text

    def optional(found: re.Match[str]) -> str:
        return found[1] if all(name in row for name in re.findall(r"\{(\w+)", found[1])) else ""

    template = re.sub(r"\[([^\]]*)\]", optional, template)
    try:
        return re.sub(r"\{(\w+):?([^}]*)\}", field, template)
    except KeyError:
        return ""


def with_figures(text: str, folder: Path = RESULTS) -> str:
    """`{NAME|WHAT|FIELD|FORMAT}` replaced by that figure, `{least NAME|*|FIELD|FORMAT}` and `{most …}` by those of all rows.
    Raises UserError where there is no such figure, or more than one."""

    def figure(found: re.Match[str]) -> str:
        choice, name, what, field, spec = found.groups()
        values = [row[field] for row in rows(name, folder) if field in row and what in ("*", row["what"])]
        if not values or not (choice or len(values) == 1):
            raise UserError(f"{found[0]}: {len(values)} figures")
        text = format(max(values) if choice == "most " else min(values), spec or "")
        return re.sub(r"e([+-])0+(?=\d)", r"e\1", text) if "e" in spec else text

    return re.sub(r"\{(least |most )?([\w/-]+)\|([^|{}]+)\|(\w+)\|?([^}]*)\}", figure, text)


def table(layout: Row, folder: Path = RESULTS) -> list[str]:
    """Markdown lines of one table: its provenance and command, then its rows, or those that `rows` finds in
    `what`. The provenance of rows that override the table's stands in a column."""
    file = json.loads((folder / f"{layout['results']}.json").read_text(encoding="utf-8"))
    found = [row for row in file["rows"] if re.search(layout.get("rows", ""), row["what"])]
    source = ", ".join(file[key] for key in PROVENANCE[:3] if file[key])
    columns = dict(layout["columns"])
    if any(key in row for row in found for key in PROVENANCE):
        columns["other device, commit, date"] = "{other}"
        found = [{**row, "other": ", ".join(row[key] for key in PROVENANCE[:3] if row.get(key))} for row in found]
    lines = ["; ".join(filter(None, [layout.get("of"), source])) + ":", ""]
    if command := layout.get("command", file["command"]):
        lines = ["```", *command.splitlines(), "```", "", *lines]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(filled(cell, row) for cell in columns.values())} |" for row in found]
    return [*lines, "", *([with_figures(layout["note"], folder).strip(), ""] if "note" in layout else [])]


def sentence(layout: Row, folder: Path = RESULTS) -> list[str]:
    """Markdown lines in place of a table: a sentence with figures, and a link to the rows."""
    name = layout["results"]
    file = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    source = ", ".join(file[key] for key in PROVENANCE[:3] if file[key])
    text = with_figures(layout["sentence"], folder).strip()
    return [f"{text} ({source}; [rows](benchmarks/results/{name}.json))", ""]


def benchmarks_page(layout: Row, folder: Path = RESULTS) -> str:
    head = ("# Benchmarks", "<!-- Generated: python -m benchmarks.tables -->", layout["introduction"].strip())
    lines = [line for one in head for line in (one, "")]
    for section in layout["sections"]:
        lines += [f"{'#' * section.get('level', 2)} {section['heading']}", ""]
        lines += [section["text"].strip(), ""] if "text" in section else []
        for one in section.get("tables", ()):
            lines += sentence(one, folder) if "sentence" in one else table(one, folder)
        lines += [
            line for text, picture in section.get("pictures", {}).items() for line in (f"![{text}]({picture})", "")
        ]
    return "\n".join(lines).rstrip() + "\n"


def speed_table(layout: Row, folder: Path = RESULTS) -> str:
    """README's table, whose links are to sections of BENCHMARKS.md."""
    lines = ["| measured | result | table |", "|---|---|---|"]
    for one in layout["speed"]:
        result = with_figures(one["result"], folder)
        heading = next(s["heading"] for s in layout["sections"] if s["heading"] == one["section"])
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        lines.append(f"| {one['measured']} | {result} | [{one['link']}](BENCHMARKS.md#{anchor}) |")
    return "\n".join(lines)


def documents() -> dict[Path, str]:
    """The text of each generated document by its path."""
    layout = yaml.safe_load(LAYOUT.read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return {
        ROOT / "BENCHMARKS.md": benchmarks_page(layout),
        ROOT / "README.md": f"{before}{BEGIN}\n{speed_table(layout)}\n{END}{after}",
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where one is out of date")
    check = parser.parse_args(argv).check
    outdated = {path: text for path, text in documents().items() if path.read_text(encoding="utf-8") != text}
    for path, text in outdated.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.name} {'is out of date' if check else 'written'}")
    return 1 if check and outdated else 0


if __name__ == "__main__":
    exit_with(main)
