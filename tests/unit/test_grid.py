"""The developers' grid: what is in it, and what becomes of its rows."""

from benchmarks.programs.kernels import attention_choices, grid, grid_cells
from llmtrain.kernels.attention.measured import Cell
from llmtrain.kernels.operation import operation


def line(cell: str, backend: str, ms: float, **more: str) -> dict[str, str]:
    row = {"operation": "attention", "cell": cell, "seq_len": "4096", "backend": backend, "failed": "", "error": "2e-3"}
    row |= {
        "forward_ms": str(ms / 4),
        "backward_ms": str(3 * ms / 4),
        "device": "H200",
        "date": "2026-11-24",
        "commit": "abc",
    }
    return row | more


def test_the_grid_covers_what_models_bring():
    shapes = grid_cells.attention()
    assert len(shapes) == len(set(shapes)) >= 200
    specs = [shape.spec for shape in shapes]
    assert {spec.head_dim for spec in specs} >= set(grid_cells.HEAD_DIMS)
    assert {spec.n_heads // spec.n_kv_heads for spec in specs} >= {1, 2, 4, 8, 16, 32}
    assert {shape.seq_len for shape in shapes} >= {1024, 2048, 4096, 8192, 16384, 32768}
    assert {(s.documents, s.sliding_window is not None) for s in specs} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert any(shape.seq_len % 32 for shape in grid_cells.scans())
    scans = [shape.spec for shape in grid_cells.scans()]
    assert {spec.d_state for spec in scans} == {16, 64, 128, 256} and {spec.head_dim for spec in scans} >= {64, 128}
    assert {spec.n_groups for spec in scans} >= {1, 2, 8}
    assert max(spec.n_heads for spec in scans) == 128 and min(spec.n_heads for spec in scans) <= 16


def test_a_label_states_the_whole_cell():
    for shape in grid_cells.attention():
        label = operation("attention").label(shape)
        row = attention_choices.row(line(label, "flex", 1.0, seq_len=str(shape.seq_len)))
        assert row.cell == Cell.of(shape.spec, shape.seq_len)


def test_every_contender_of_the_grid_can_serve_its_cell():
    for shape in grid_cells.attention():
        names = grid.contenders(shape)
        assert names[0] == "triton" and len(names) > 1


def test_a_failed_row_and_a_wrong_one_become_no_choice():
    lines = [
        line("8 on 8 x 64 plain", "triton", 1.0, error="9e-3"),
        line("8 on 8 x 64 plain", "flex", 2.0),
        line("8 on 8 x 64 plain", "sdpa:flash", 0.5, failed="RuntimeError", forward_ms="", backward_ms="", error=""),
    ]
    assert [row.backend for row in attention_choices.rows(lines)] == ["flex"]


def test_ours_of_an_earlier_commit_stands_only_where_nothing_newer_applies():
    old, other = line("8 on 8 x 64 plain", "triton before", 5.0), line("16 on 8 x 64 plain", "triton", 3.0)
    assert [row.ms for row in attention_choices.rows([old])] == [5.0]
    assert [row.ms for row in attention_choices.rows([old, other])] == [3.0]
