"""BENCHMARKS.md and README's table of speeds are what the rows of benchmarks/results/ generate."""

import json

import pytest
import yaml

from benchmarks import tables
from llmtrain.errors import UserError

LAYOUT = yaml.safe_load(tables.LAYOUT.read_text(encoding="utf-8"))
FILES = sorted(str(path.relative_to(tables.RESULTS).with_suffix("")) for path in tables.RESULTS.rglob("*.json"))


@pytest.mark.parametrize("path", tables.documents(), ids=lambda path: path.name)
def test_a_generated_document_is_up_to_date(path):
    assert path.read_text(encoding="utf-8") == tables.documents()[path], "run python -m benchmarks.tables"


def test_every_figure_has_a_unit_and_its_provenance():
    figures = [figure for name in FILES for figure in tables.figures(name)]
    assert len(figures) > 1000
    assert all(set(figure) == {"what", "figure", "value", "unit", *tables.PROVENANCE} for figure in figures)
    assert [figure for figure in figures if not figure["date"]] == []
    with pytest.raises(UserError, match="ends in its unit"):
        tables.unit("speed")


def test_every_file_of_results_has_a_table():
    assert sorted(one["results"] for section in LAYOUT["sections"] for one in section["tables"]) == FILES


def test_every_field_of_a_cell_is_one_of_the_rows():
    for section in LAYOUT["sections"]:
        for one in section["tables"]:
            rows = tables.rows(one["results"])
            for cell in one.get("columns", {}).values():
                assert any(tables.filled(cell, row) for row in rows), f"{one['results']}: {cell} is empty in every row"


def result(folder, rows, **provenance):
    shared = {"command": "measure", "device": "H200", "commit": "abc1234", "date": "2026-11-27", **provenance}
    (folder / "speed.json").write_text(json.dumps({**shared, "rows": rows}))


def test_rows_that_override_the_provenance_show_theirs(tmp_path):
    result(tmp_path, [{"what": "ours", "step_ms": 10.0}, {"what": "theirs", "step_ms": 20.0, "device": "H100"}])
    layout = {"results": "speed", "of": "a step", "columns": {"": "{what}", "ms": "{step_ms:.1f}[ ({again_ms})]"}}
    assert tables.table(layout, tmp_path) == [
        "```",
        "measure",
        "```",
        "",
        "a step; H200, abc1234, 2026-11-27:",
        "",
        "|  | ms | other device, commit, date |",
        "|---|---|---|",
        "| ours | 10.0 |  |",
        "| theirs | 20.0 | H100 |",
        "",
    ]
    assert len(tables.table({**layout, "rows": "^ours"}, tmp_path)) == 9 + 1
    assert [(figure["what"], figure["unit"], figure["device"]) for figure in tables.figures("speed", tmp_path)] == [
        ("ours", "ms", "H200"),
        ("theirs", "ms", "H100"),
    ]


def test_a_sentence_may_stand_in_place_of_a_table(tmp_path):
    result(tmp_path, [{"what": "ours", "step_ms": 10.0}])
    layout = {"results": "speed", "sentence": "A step takes {speed|ours|step_ms} ms."}
    expected = "A step takes 10.0 ms. (H200, abc1234, 2026-11-27; [rows](benchmarks/results/speed.json))"
    assert tables.sentence(layout, tmp_path) == [expected, ""]


def test_cells_and_sentences_show_exactly_the_figure(tmp_path):
    row = {"what": "ours", "sum_x": 1.5, "dA_error": 2.9e-05, "again_ms": None}
    assert tables.filled("{sum_x:.2f}[, {missing}], {dA_error:.1e}", row) == "1.50, 2.9e-5"
    assert tables.filled("{missing}", row) == ""
    result(tmp_path, [row, {"what": "more", "sum_x": 2}])
    text = "{speed|ours|sum_x|.2f}, {least speed|*|sum_x} to {most speed|*|sum_x}"
    assert tables.with_figures(text, tmp_path) == "1.50, 1.5 to 2"
    with pytest.raises(UserError, match="0 figures"):
        tables.with_figures("{speed|nobody|sum_x}", tmp_path)


def test_check_writes_nothing(monkeypatch, tmp_path, capsys):
    page = tmp_path / "BENCHMARKS.md"
    page.write_text("old\n")
    monkeypatch.setattr(tables, "documents", lambda: {page: "new\n"})
    assert tables.main(["--check"]) == 1
    assert page.read_text() == "old\n" and capsys.readouterr().out == "BENCHMARKS.md is out of date\n"
    assert tables.main([]) == 0
    assert page.read_text() == "new\n" and tables.main(["--check"]) == 0
