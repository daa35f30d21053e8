"""The cells that `auto` chooses attention backends by: which applies to which spec, and whose come first."""

from dataclasses import asdict, replace

import pytest

from llmtrain.errors import UserError
from llmtrain.kernels import registry, tuning
from llmtrain.kernels.attention import measured
from llmtrain.kernels.attention.measured import Cell, Row
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import Platform

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)
A100 = Platform("nvidia", "sm80", "NVIDIA A100", 80 << 30)
SPEC = AttentionSpec(32, 8, 128, 128**-0.5, sliding_window=1024)


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """Empty shipped and own tables; returns a function that fills one."""
    shipped, mine = tmp_path / "shipped", tmp_path / "own"
    monkeypatch.setattr(measured, "shipped_file", lambda arch: shipped / f"{arch}.attention.csv")
    monkeypatch.setattr(measured, "own_file", lambda arch: mine / f"{arch}.attention.csv")

    def fill(*rows: tuple[AttentionSpec, int, str, float], own: bool = False) -> None:
        made = [
            Row(**asdict(Cell.of(spec, seq_len)), backend=backend, forward_ms=ms / 4, backward_ms=3 * ms / 4,
                device="H200", date="2026-11-24", commit="abc")
            for spec, seq_len, backend, ms in rows
        ]  # fmt: skip
        measured.save((measured.own_file if own else measured.shipped_file)("sm90"), made)

    return fill


def auto(spec: AttentionSpec, seq_len: int | None = None, where: Platform = H200) -> str:
    rows = registry.measured("attention", "auto", spec, where, seq_len)
    return rows[0].backend if rows else "not measured"


def test_the_fastest_sum_of_forward_and_backward_is_taken(tables):
    tables((SPEC, 4096, "triton", 3.0), (SPEC, 4096, "flex", 2.9), (SPEC, 4096, "varlen", 4.0))
    assert auto(SPEC, 4096) == "flex"


def test_ours_is_taken_by_the_least_lead(tables):
    tables((SPEC, 4096, "triton", 2.04), (SPEC, 4096, "flex", 2.09), (SPEC, 4096, "varlen", 2.05))
    assert auto(SPEC, 4096) == "triton"


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64},
        {"sliding_window": None},
        {"documents": True},
        {"softcap": 30.0},
        {"alibi_max_bias": 8.0},
        {"dtype": "float32"},
        {"lower_right": True},
    ],
)
def test_nothing_is_predicted_of_a_feature_that_was_not_measured_or_a_head_dim_outside_the_measured(tables, changes):
    tables((SPEC, 4096, "triton", 3.0), (SPEC, 4096, "flex", 2.9))
    assert auto(replace(SPEC, **changes), 4096) == "not measured"


@pytest.mark.parametrize(
    "changes",
    [
        {"n_heads": 40, "n_kv_heads": 10},
        {"n_kv_heads": 16},
        {"n_heads": 64, "n_kv_heads": 1},
        {"dtype": "float16"},
        {"scale": 1.0},
        {"sliding_window": 300},
    ],
)
def test_other_heads_windows_and_numbers_as_wide_are_predicted(tables, changes):
    tables((SPEC, 4096, "triton", 3.0), (SPEC, 4096, "flex", 2.0))
    assert auto(replace(SPEC, **changes), 4096) == "flex"
    tables((SPEC, 4096, "triton", 2.0), (SPEC, 4096, "flex", 3.0))
    assert auto(replace(SPEC, **changes), 4096) == "triton"


def test_a_head_dim_between_measured_ones_is_predicted(tables):
    for width in (64, 128):
        spec = replace(SPEC, head_dim=width)
        tables((spec, 4096, "triton", width / 64), (spec, 4096, "flex", width / 32))
    found = [auto(replace(SPEC, head_dim=width), 4096) for width in (56, 96, 144)]
    assert found == ["not measured", "triton", "not measured"]


def test_features_that_no_cell_has_together_are_predicted_from_each(tables):
    plain = replace(SPEC, sliding_window=None)
    capped, biased = replace(plain, softcap=30.0), replace(plain, alibi_max_bias=8.0)
    for spec in (SPEC, plain, capped, biased):
        tables((spec, 4096, "triton", 1.0), (spec, 4096, "flex", 2.0))
    assert auto(replace(capped, alibi_max_bias=8.0), 4096) == auto(replace(capped, sliding_window=1024)) == "triton"
    assert auto(replace(plain, documents=True), 4096) == "not measured"


def test_a_backend_is_not_predicted_without_features_that_all_of_its_cells_have(tables):
    packed, plain = replace(SPEC, documents=True, sliding_window=None), replace(SPEC, sliding_window=None)
    tables((SPEC, 4096, "varlen", 1.0), (packed, 4096, "varlen", 1.0))
    tables((plain, 4096, "sdpa:cudnn", 5.0), (plain, 4096, "triton", 6.0))
    assert [row.backend for row in registry.measured("attention", "auto", plain, H200, 4096)] == [
        "sdpa:cudnn",
        "triton",
    ]


def test_cells_on_both_sides_decide_by_their_distance(tables):
    tables(
        (SPEC, 2048, "triton", 4.0), (SPEC, 2048, "flex", 8.0), (SPEC, 16384, "triton", 9.0), (SPEC, 16384, "flex", 4.5)
    )
    assert [auto(SPEC, seq_len) for seq_len in (1024, 2560, 12000, 32768)] == ["triton", "triton", "flex", "flex"]


def test_a_window_longer_than_the_sequence_counts_as_that_long(tables):
    short, long = replace(SPEC, sliding_window=512), replace(SPEC, sliding_window=4096)
    tables(
        (short, 2048, "triton", 1.0), (short, 2048, "flex", 2.0), (long, 2048, "triton", 9.0), (long, 2048, "flex", 8.0)
    )
    assert auto(replace(SPEC, sliding_window=1 << 20), 2048) == "flex"


def test_the_users_cells_replace_shipped_ones(tables):
    tables(
        (SPEC, 4096, "triton", 3.0), (SPEC, 4096, "flex", 2.0), (SPEC, 8192, "triton", 3.0), (SPEC, 8192, "flex", 2.0)
    )
    tables((SPEC, 4096, "triton", 2.0), (SPEC, 4096, "flex", 3.0), own=True)
    assert [auto(SPEC, seq_len) for seq_len in (4096, 8192)] == ["triton", "flex"]


def test_ours_measured_alone_decides_nothing(tables):
    tables((SPEC, 4096, "triton", 1.0))
    assert auto(SPEC, 4096) == "not measured"
    tables((SPEC, 4096, "sdpa:flash", 0.1))  # cannot serve a window
    assert auto(SPEC, 4096) == "not measured"


def test_an_architecture_does_not_speak_for_another(tables):
    tables((SPEC, 4096, "triton", 1.0), (SPEC, 4096, "flex", 2.0))
    assert auto(SPEC, 4096, A100) == "not measured"


def test_what_is_not_measured_goes_to_the_public_kernel(tables):
    assert registry.resolve("attention", "auto", SPEC, H200, 4096).name == "flex"
    assert registry.resolve("attention", "auto", replace(SPEC, sliding_window=None), H200).name == "sdpa:cudnn"
    assert registry.resolve("attention", "triton", SPEC, H200, 4096).name == "triton"


def test_a_family_means_its_fastest_measured_member(tables):
    plain = replace(SPEC, sliding_window=None)
    tables((plain, 4096, "sdpa:cudnn", 2.0), (plain, 4096, "sdpa:flash", 1.0), (plain, 4096, "triton", 0.5))
    names = [registry.resolve("attention", name, plain, H200, 4096).name for name in ("sdpa", "auto", "sdpa:cudnn")]
    assert names == ["sdpa:flash", "triton", "sdpa:cudnn"]


def test_saving_replaces_a_row_of_the_same_cell_and_backend_and_keeps_the_rest(tables):
    tables((SPEC, 4096, "triton", 3.0), (SPEC, 4096, "flex", 2.0), own=True)
    tables((SPEC, 4096, "flex", 4.0), own=True)
    assert [(row.backend, round(row.ms, 6)) for row in measured.read(measured.own_file("sm90"))] == [
        ("triton", 3.0),
        ("flex", 4.0),
    ]
    assert auto(SPEC, 4096) == "triton"


@pytest.mark.parametrize("text", ["0.75", "-1", "soon", ""])
def test_a_wrong_row_is_named_by_file_and_line(tables, text):
    tables((SPEC, 4096, "flex", 3.0), own=True)
    file = measured.own_file("sm90")
    file.write_text(file.read_text().replace(",0.75,", f",{text},"))
    measured.forget()
    if text == "0.75":
        assert auto(SPEC, 4096) == "flex"
        return
    with pytest.raises(UserError, match=r"sm90.attention.csv, line 2: forward_ms: "):
        auto(SPEC, 4096)


def test_auto_takes_the_fastest_backend_of_every_shipped_cell():
    times: dict[Cell, dict[str, float]] = {}
    for row in measured.read(measured.shipped_file("sm90")):
        times.setdefault(row.cell, {})[row.backend] = row.ms
    compared = {cell: found for cell, found in times.items() if found.keys() - {"triton"} and "triton" in found}
    assert len(compared) > 30
    for cell, found in compared.items():
        chosen = measured.fastest(spec_of(cell), found.keys(), H200, cell.seq_len)[0]
        assert (chosen.backend, chosen.predicted) == (min(found, key=lambda name: found[name]), False), cell.label


def spec_of(cell: Cell) -> AttentionSpec:
    return AttentionSpec(
        cell.n_heads, cell.n_kv_heads, cell.head_dim, 1.0, 8.0 if cell.alibi else None, cell.window,
        30.0 if cell.softcap else None, documents=cell.documents,
    )  # fmt: skip


def test_shipped_cells_name_backends_and_their_provenance():
    backends = {row.backend for row in registry.table("attention", SPEC, None)}
    for file in tuning.FOLDER.glob("*.attention.csv"):
        rows = measured.read(file)
        assert {row.backend for row in rows} <= backends
        assert all(row.device and row.commit and row.date >= "2026" for row in rows)
        assert len({(row.cell, row.backend) for row in rows}) == len(rows)
