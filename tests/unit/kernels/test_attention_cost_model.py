"""Errors of what `auto` takes at shapes outside the measured cells: time of the fastest backend over that of the one taken."""

import csv
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.programs.kernels import attention_choices
from llmtrain.kernels.attention import measured
from llmtrain.kernels.attention.cost_model import CostModel
from llmtrain.kernels.attention.measured import Cell, Row

SHIPPED = measured.read(measured.shipped_file("sm90"))
DRAWN = Path(__file__).parents[3] / "benchmarks" / "results" / "kernels" / "drawn.csv"


def by_cell(rows: Iterable[Row]) -> dict[Cell, dict[str, float]]:
    """Times of cells that have ours beside a public backend."""
    found: dict[Cell, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row.cell, {})[row.backend] = row.ms
    return {cell: times for cell, times in found.items() if "triton" in times and len(times) > 1}


def fit(rows: Iterable[Row]) -> dict[str, CostModel]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.backend, []).append(row)
    return {backend: CostModel(of) for backend, of in found.items()}


def predicted(models: dict[str, CostModel], cell: Cell, backends: Collection[str]) -> dict[str, float]:
    return {name: models[name].time(cell)[0] for name in backends if models[name].applies(cell)}


def shares(models: dict[str, CostModel], cells: dict[Cell, dict[str, float]]) -> list[float]:
    """Least time over that of the backend with the least predicted time, rising."""
    found = []
    for cell, times in cells.items():
        if guess := predicted(models, cell, times):
            found.append(min(times.values()) / times[min(guess, key=lambda name: guess[name])])
    return sorted(found)


def test_each_tenth_of_the_cells_predicted_from_the_others():
    cells, found = by_cell(SHIPPED), []
    ordered = sorted(cells, key=lambda cell: cell.label)
    for tenth in range(10):
        left_out = set(ordered[tenth::10])
        models = fit(row for row in SHIPPED if row.cell not in left_out)
        found += shares(models, {cell: cells[cell] for cell in left_out})
    found.sort()
    assert len(found) >= 298
    assert found[0] > 0.7 and found[8] > 0.98 and sum(found) / len(found) > 0.996


def test_drawn_shapes_that_are_in_no_fit():
    with DRAWN.open(newline="") as lines:
        drawn = by_cell(attention_choices.rows(csv.DictReader(lines)))
    assert not drawn.keys() & by_cell(SHIPPED).keys()
    found = shares(fit(SHIPPED), drawn)
    assert len(found) == len(drawn) == 29
    assert found[0] > 0.69 and found[4] > 0.98 and sum(found) / len(found) > 0.975


@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_a_measured_cell_has_its_own_time(backend):
    model = fit(SHIPPED)[backend]
    for row in model.rows[::7]:
        assert model.time(row.cell) == (row.ms, row, False)


def test_one_cell_scales_with_heads():
    [row] = [row for row in SHIPPED if row.backend == "triton"][:1]
    model = CostModel([row])
    more = replace(row.cell, n_heads=2 * row.n_heads, n_kv_heads=2 * row.n_kv_heads)
    assert model.time(more)[0] == pytest.approx(2 * row.ms, rel=0.15)
