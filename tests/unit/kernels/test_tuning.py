"""Tuning tables: which row is chosen, and what is said of a bad one."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llmtrain.kernels import refusals, registry, tuning, tuning_table
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.triton_launch import KERNELS, Launch
from llmtrain.kernels.attention.triton_select import choose
from llmtrain.kernels.options import decode, encode
from llmtrain.kernels.platform import Platform, shared_limit
from llmtrain.kernels.ssd import triton_launch as ssd_launch
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.kernels.ssd.triton import default_launch
from llmtrain.kernels.tuning_table import Row, Table

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)
LAUNCH = Launch(64, 64, 4, 2)
MEASURED = {"device": "NVIDIA H200", "date": "2026-11-21", "commit": "abc1234", "ms": 0.5, "tflops": 400.0}


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Neither this machine's own rows nor what another test has read."""
    monkeypatch.delenv("LLMTRAIN_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    tuning.forget()
    yield
    tuning.forget()


def a_row(head_dim: int, block_m: int = 64, **more) -> Row:
    fields = {"dtype": "bfloat16", "shared": 1000, "provenance": "compiled only", **more}
    return Row("attention.forward", shape=(head_dim,), launch=replace(LAUNCH, block_m=block_m), **fields)


@pytest.fixture
def shipped(monkeypatch):
    """shipped(rows): the table of every architecture holds these."""

    def hold(*rows: Row) -> None:
        monkeypatch.setattr(tuning, "read_shipped", lambda arch: Table(arch=arch, l2_budget=1, rows=rows))
        tuning._select.cache_clear()

    monkeypatch.setattr(tuning, "forget", lambda: (tuning._select.cache_clear(), tuning.own_rows.cache_clear()))
    return hold


def chosen(head_dim: int, where: Platform = H200, dtype: str = "bfloat16", **more) -> int:
    return tuning.select("attention.forward", dtype, {"head_dim": head_dim}, where, **more).launch.block_m


def test_the_exact_row_then_the_next_larger_never_a_smaller_one(shipped):
    shipped(a_row(64, 1), a_row(96, 2), a_row(128, 3))
    assert [chosen(d) for d in (32, 64, 80, 96, 104, 128)] == [1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match=r"no row of sm90's tuning table serves attention.forward .* head_dim 160"):
        chosen(160)


def test_a_row_that_does_not_fit_in_this_device_is_passed_over(shipped):
    small = Platform("nvidia", "sm89", "L40S", 48 << 30)
    shipped(a_row(64, 1, shared=150_000), a_row(128, 2, shared=90_000))
    assert chosen(64, Platform("nvidia", "sm80", "A100", 1)) == 1
    assert chosen(64, small) == 2
    shipped(a_row(64, 1, shared=150_000))
    with pytest.raises(ValueError, match=r"101376 bytes of shared memory.*bench tune"):
        chosen(64, small)


def test_a_variant_serves_itself_alone_and_what_has_none_serves_all(shipped):
    shipped(a_row(64, 1), a_row(64, 2, variant="alibi"), a_row(128, 3, variant="window"))
    assert [chosen(64, variant=v) for v in (None, "plain", "alibi", "window")] == [1, 1, 2, 1]
    assert chosen(128, variant="window") == 3
    with pytest.raises(ValueError, match="no row"):
        chosen(128, variant="alibi")


def test_the_nearest_length_wins_within_a_shape(shipped):
    shipped(a_row(64, 1, seq_len=2048), a_row(64, 2, seq_len=8192), a_row(64, 3), a_row(128, 4, seq_len=4096))
    assert [chosen(64, seq_len=t) for t in (2048, 2500, 8192, 16384, 65536, 256)] == [1, 1, 2, 2, 3, 3]
    assert chosen(64) == 3


def test_numbers_as_wide_share_rows_but_their_own_come_first(shipped):
    shipped(a_row(64, 1), a_row(64, 2, dtype="float32"))
    assert [chosen(64, dtype=d) for d in ("bfloat16", "float16", "float32")] == [1, 1, 2]
    shipped(a_row(64, 1), a_row(64, 2, dtype="float16"))
    assert [chosen(64, dtype=d) for d in ("bfloat16", "float16")] == [1, 2]


@pytest.mark.parametrize("named", [True, False])
def test_rows_of_ones_own_win_at_their_shape(shipped, monkeypatch, tmp_path, named):
    file = tmp_path / ("mine.yaml" if named else "config/llmtrain/tuning/sm90.yaml")
    shipped(a_row(64, 1, seq_len=4096), a_row(128, 2))
    assert chosen(64, seq_len=4096) == 1
    if named:
        monkeypatch.setenv("LLMTRAIN_TUNING", str(file))
    tuning_table.save(file, "sm90", [a_row(64, 16), a_row(256, 32)])
    tuning.forget()
    assert [chosen(d, seq_len=4096) for d in (64, 128, 256)] == [16, 2, 32]


def test_a_named_file_must_exist_and_be_of_this_architecture(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMTRAIN_TUNING", str(tmp_path / "none.yaml"))
    with pytest.raises(ValueError, match=r"LLMTRAIN_TUNING names .*none.yaml, which does not exist"):
        chosen(64)
    tuning_table.save(tmp_path / "none.yaml", "gfx942", [a_row(64)])
    with pytest.raises(ValueError, match=r"none.yaml holds rows for gfx942, where rows for sm90 are needed"):
        chosen(64)
    assert tuning.named_arch() == "gfx942"


def test_a_named_file_that_a_command_makes_need_not_exist_before_it(monkeypatch, tmp_path):
    named = tmp_path / "none.yaml"
    monkeypatch.setenv("LLMTRAIN_TUNING", str(named))
    assert tuning.named_arch() is None
    missing = rf"does not exist: unset it, or make the file by `llmtrain bench tune --out {named}`"
    shipped = tuning.read_shipped("sm90").rows
    with tuning.to_be_made(tmp_path / "folder" / ".." / "none.yaml"):
        assert tuning.select("attention.forward", "bfloat16", {"head_dim": 64}, H200) in shipped
    with tuning.to_be_made(tmp_path / "another.yaml"), pytest.raises(ValueError, match=missing):
        chosen(64)
    with pytest.raises(ValueError, match=missing):
        chosen(64)


def test_an_empty_name_of_a_file_is_none(monkeypatch):
    monkeypatch.setenv("LLMTRAIN_TUNING", "")
    assert tuning.named_arch() is None and chosen(64)


@pytest.mark.parametrize(
    "vendor, arch, expected",
    [
        ("nvidia", "sm80", "sm80"),
        ("nvidia", "sm86", "sm80"),
        ("nvidia", "sm100", "sm100"),
        ("nvidia", "sm103", "sm100"),
        ("nvidia", "sm120", "sm80"),
        ("amd", "gfx90a", "gfx90a"),
        ("amd", "gfx940", "gfx90a"),
        ("amd", "gfx950", "gfx950"),
    ],
)
def test_an_architecture_without_a_table_takes_the_nearest_older(vendor, arch, expected):
    assert tuning.nearest(Platform(vendor, arch, "", 1)) == expected


@pytest.mark.parametrize("vendor, arch", [("nvidia", "sm75"), ("amd", "gfx908"), ("amd", "gfx1100"), ("amd", "native")])
def test_where_no_table_serves_the_backend_refuses(vendor, arch):
    reason = refusals.refuse_triton("bfloat16", Platform(vendor, arch, "", 1))
    assert reason is not None
    assert arch in reason and "use reference" in reason


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_shipped_tables_serve_every_size(arch, dtype):
    where = Platform("amd" if arch.startswith("gfx") else "nvidia", arch, "", 1)
    for head_dim in range(8, 257, 8):
        for kernel in KERNELS:
            row = tuning.select(f"attention.{kernel}", dtype, {"head_dim": head_dim}, where)
            assert 0 < row.shared <= (shared_limit(arch) or 0)
            assert row.launch == choose(kernel, head_dim, dtype, where)
    for head_dim in (16, 64, 128):
        # A state of 256 in float32 does not fit in AMD's shared memory: the backend refuses it.
        for d_state in (16, 64, 128) if arch.startswith("gfx") and dtype == "float32" else (16, 64, 128, 256):
            assert default_launch(SSDSpec(8, head_dim, d_state, 1, 256, dtype=dtype), where)
    around = {"conv1d.forward": range(1, 5), "conv1d.backward": range(1, 5), "rotary": range(2, 257, 2)}
    around |= {f"gated_norm.{part}": range(1, 8193, 37) for part in ("forward", "backward")}
    around |= {f"norm.{part}": range(1, 8193, 37) for part in ("forward", "backward")}
    for kernel, sizes in around.items():
        (name,) = tuning.KERNELS[kernel].shape
        assert all(tuning.select(kernel, dtype, {name: size}, where) for size in (*sizes, max(sizes)))


@pytest.mark.parametrize("arch", ["sm86", "sm89", "sm120"])
def test_where_nothing_fits_the_backend_refuses_at_construction(arch):
    """GPUs with 99 KB of shared memory, which take sm80's rows as far as those fit."""
    where = Platform("nvidia", arch, "", 1)
    assert registry.refusal("attention", "triton", AttentionSpec(4, 4, 64, 0.1), where) is None
    assert choose("forward", 64, "bfloat16", where) == choose(
        "forward", 64, "bfloat16", Platform("nvidia", "sm80", "", 1)
    )
    for dtype in ("bfloat16", "float32"):
        for head_dim in range(8, 257, 8):
            reason = registry.refusal("attention", "triton", AttentionSpec(4, 4, head_dim, 0.1, dtype=dtype), where)
            if reason is None:
                for kernel in KERNELS:
                    row = tuning.select(f"attention.{kernel}", dtype, {"head_dim": head_dim}, where)
                    assert row.shared <= 101_376
            else:
                assert "101376 bytes of shared memory" in reason


def test_selection_is_cached():
    tuning._select.cache_clear()
    for _ in range(5):
        chosen(64)
    assert tuning._select.cache_info().misses == 1


def test_a_table_survives_being_written(tmp_path):
    for arch in itertools.chain(*tuning.TABLES.values()):
        table = tuning.read_shipped(arch)
        tuning_table.save(tmp_path / arch, arch, list(table.rows), table.l2_budget)
        assert tuning_table.load(tmp_path / arch, arch) == table


def test_writing_replaces_the_row_of_the_same_key_and_keeps_the_rest_and_the_comment(tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text("# why\narch: sm90\nrows: []\n", encoding="utf-8")
    tuning_table.save(file, "sm90", [a_row(64, 16), a_row(64, 32, seq_len=8), a_row(32, 64)])
    tuning_table.save(file, "sm90", [a_row(64, 128, provenance=MEASURED)])
    rows = tuning_table.load(file, "sm90", own=True).rows
    assert [(r.shape[0], r.seq_len, r.launch.block_m) for r in rows] == [(32, None, 64), (64, None, 128), (64, 8, 32)]
    assert rows[1].provenance == MEASURED
    assert file.read_text(encoding="utf-8").startswith("# why\narch: sm90\n")


GOOD = {
    "kernel": "attention.forward",
    "dtype": "bfloat16",
    "shape": {"head_dim": 64},
    "launch": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2},
    "shared": 1,
    "provenance": "compiled only",
}


def refusal_of(file: Path, text: str) -> str:
    """The error of a table of this text."""
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        tuning_table.load(file, "sm90")
    return str(caught.value)


def refusal_of_rows(file: Path, *rows: dict) -> str:
    return refusal_of(file, yaml.safe_dump({"arch": "sm90", "l2_budget": 1, "rows": [*rows]}))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"kernel": "attention.backward"}, "no kernel 'attention.backward'; there is attention.forward"),
        ({"dtype": "bf16"}, "dtype must be one of bfloat16"),
        ({"dtype": {"a": 1}}, "dtype must be one of bfloat16"),
        ({"kernel": {"a": 1}}, "no kernel '{'a': 1}'; there is attention.forward"),
        ({"shape": {"d_state": 64}}, "shape must have head_dim"),
        ({"shape": {"head_dim": "64"}}, "head_dim must be a positive integer, not '64'"),
        ({"launch": {**GOOD["launch"], "waprs": 4}}, "Launch has no 'waprs'; it has block_m"),
        (
            {"launch": {**GOOD["launch"], "warps": 4}},
            "Launch has no 'warps' ('warps' is now called 'num_warps'); it has",
        ),
        ({"launch": {"block_m": 64}}, "launch: 'block_n' is missing"),
        ({"launch": {**GOOD["launch"], "num_warps": 0}}, "launch: num_warps must be a positive integer, not 0"),
        (
            {"launch": {**GOOD["launch"], "num_warps": 3}},
            "(attention.forward): launch: num_warps must be a power of two from 1 to 32, not 3",
        ),
        ({"launch": {**GOOD["launch"], "num_warps": 64}}, "num_warps must be a power of two from 1 to 32, not 64"),
        ({"launch": {**GOOD["launch"], "use_tma": 1}}, "use_tma must be a bool, not 1"),
        ({"launch": 3}, "expected the fields of a Launch, not 3"),
        ({"provenance": "guessed"}, "provenance must be 'compiled only' or `measured:` with device"),
        ({"provenance": {"measured": {**MEASURED, "gbps": 3.0}}}, "tflops or gbps"),
        ({"provenance": {"measured": {**MEASURED, "ms": "fast"}}}, "ms must be a positive number, not 'fast'"),
        ({"seqlen": 3}, "unknown field 'seqlen'"),
        ({"seq_len": -3}, "seq_len must be a positive integer"),
        ({"shared": None}, "shared must be a positive integer"),
        ({"kernel": "ssd", "shape": {"head_dim": 64, "d_state": 64}}, "Launch has no"),
        ({}, "a second row for attention.forward bfloat16 head_dim=64"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_number(tmp_path, change, words):
    message = refusal_of_rows(tmp_path / "t", GOOD, {**GOOD, **change})
    assert message.startswith(f"{tmp_path / 't'}: row 2") and words in message


SSD = {"kernel": "ssd", "shape": {"head_dim": 64, "d_state": 64}}
CONV = {"kernel": "conv1d.forward", "shape": {"width": 4}}
TILE = {"block_channels": 64, "parallel_runs": 2, "run_tokens": 8, "step_tokens": 4, "num_warps": 4}
ROWS = {"block_columns": 64, "max_tiles": 1, "num_warps": 4}
STORED = {**GOOD["launch"], "rows": 1024, "keys": 1024, "queries": 1024, "from_seq_len": 1}
POWER = "num_warps must be a power of two from 1 to 32, not 3"


def a_scan(**changes) -> dict:
    """The fields of a scan's row. changes: by path, such as state_passing__tile."""
    (row, *_) = (row for row in tuning.read_shipped("sm90").rows if row.kernel == "ssd" and row.shape == (64, 64))
    launch = encode(row.launch)
    for path, value in changes.items():
        *outer, name = path.split("__")
        inside = launch
        for one in outer:
            inside = inside.setdefault(one, {})
        inside[name] = value
    return {**SSD, "launch": launch}


@pytest.mark.parametrize(
    "change, words",
    [
        (
            a_scan(chunk_size=64, state_passing__tile=128),
            "state_passing: tile is a part of a chunk, and 128 is above chunk_size, 64",
        ),
        (a_scan(state_passing_bwd__tile=64), "state_passing_bwd: tile is of state_passing alone; leave it out"),
        (a_scan(state_passing__tile=48), "state_passing: tile: expected a power of two from 16 on, not 48"),
        (
            a_scan(state_passing__block_dstate=8),
            "state_passing: block_dstate: expected a power of two from 16 on, not 8",
        ),
        (a_scan(state_passing_bwd__block_headdim=48), "block_headdim: expected a power of two from 16 on, not 48"),
        (a_scan(chunk_size=96), "chunk_size: expected a power of two from 16 on, not 96"),
        (a_scan(chunk_size_bwd=8), "chunk_size_bwd: expected a power of two from 16 on, not 8"),
        (
            a_scan(chunk_size_bwd=16, intra_chunk_halves_bwd={"programs_per_sm": 2, "num_stages": 1}),
            "intra_chunk_halves_bwd takes halves of chunks: chunk_size_bwd must be at least 32",
        ),
        (a_scan(inter_chunk_bwd__dstate_blocks=3), "dstate_blocks: expected a power of two, not 3"),
        (a_scan(inter_chunk_bwd__dstate_blocks=8), "dstate_blocks 8 leaves a program less than 16 of d_state 64"),
        (a_scan(input_precision="tf32"), "input_precision must be one of ieee, tf32x3, not 'tf32'"),
        ({"launch": {**GOOD["launch"], "block_m": 48}}, "block_m: expected a power of two from 16 on, not 48"),
        ({"launch": {**GOOD["launch"], "block_n": 8}}, "block_n: expected a power of two from 16 on, not 8"),
        ({"launch": {**GOOD["launch"], "part": 24}}, "part: expected a power of two from 16 on, not 24"),
        ({"launch": {**GOOD["launch"], "dv_block_m": 64}}, "dv_block_m is that of dv's own launch: it goes with split"),
        (
            {"kernel": "attention.dq", "launch": {**GOOD["launch"], "cudnn": True}},
            "cudnn is for attention.forward on NVIDIA's GPUs, not for attention.dq on sm90",
        ),
        (
            {"kernel": "attention.dscores", "launch": {**STORED, "queries": 1000}},
            "queries must be a multiple of block_m and block_n, and 1000 is none of 64",
        ),
        ({**CONV, "launch": {**TILE, "step_tokens": 2}}, "step_tokens must be at least width - 1, 3, not 2"),
        ({**CONV, "launch": {**TILE, "block_channels": 48}}, "block_channels: expected a power of two, not 48"),
        ({**CONV, "launch": {**TILE, "parallel_runs": 3}}, "parallel_runs: expected a power of two, not 3"),
        (
            {"kernel": "norm.forward", "shape": {"dim": 64}, "launch": {**ROWS, "prefetch": True}},
            "prefetch is for norm.backward alone",
        ),
        (
            {"kernel": "gated_norm.backward", "shape": {"group_size": 64}, "launch": {**ROWS, "block_rows": 3}},
            "block_rows: expected a power of two, not 3",
        ),
        (
            {"kernel": "rotary", "launch": {"block_tokens": 24, "block_heads": 4, "num_warps": 2}},
            "block_tokens: expected a power of two, not 24",
        ),
        *(
            ({"kernel": kernel, "shape": shape, "launch": {**launch, "num_warps": 3}}, POWER)
            for kernel, shape, launch in (
                ("conv1d.forward", {"width": 4}, TILE),
                ("norm.backward", {"dim": 64}, ROWS),
                ("gated_norm.forward", {"group_size": 64}, ROWS),
                ("rotary", {"head_dim": 64}, {"block_tokens": 16, "block_heads": 4}),
            )
        ),
        (
            a_scan(chunk_scan__options={"num_warps": 12}),
            "chunk_scan: num_warps must be a power of two from 1 to 32, not 12",
        ),
    ],
)
def test_rejects_parameters_by_which_a_kernel_would_compute_wrongly(tmp_path, change, words):
    row = {**GOOD, **change}
    message = refusal_of_rows(tmp_path / "t", row)
    assert message.startswith(f"{tmp_path / 't'}: row 1 ({row['kernel']}): launch: ") and words in message


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path):
    rows = [{**GOOD, "dtype": "bf16", "seq_len": 0}, GOOD, {**GOOD, "launch": {"block_m": 0, "warps": 4}}]
    message = refusal_of_rows(tmp_path / "t", *rows)
    found = [line.partition(" (")[0] for line in message.splitlines()]
    assert found == [f"{tmp_path / 't'}: row {n}" for n in (1, 1, 3, 3, 3, 3)]
    assert "'num_warps' is missing" not in message  # its old name is there, and reported


def test_rejects_old_names_of_a_scans_parameters_with_the_new_ones(tmp_path):
    """Nested ones too: a user's row from before the names changed."""
    old = {
        "chunk": 64,
        "walk": {"columns": 64, "stages": 3, "options": {"num_warps": 4}, "described": True, "share": 2},
    }
    with pytest.raises(ValueError) as caught:
        decode(ssd_launch.Launch, old, "launch")
    assert "'walk' is now called 'sequential_scan'" in str(caught.value)
    with pytest.raises(ValueError) as caught:
        decode(ssd_launch.Launch, {"sequential_scan": old["walk"]}, "launch")
    for name, now in {"columns": "block_headdim", "described": "use_tma", "share": "programs_per_sm"}.items():
        assert f"launch: sequential_scan: SequentialScanLaunch has no '{name}' ('{name}' is now called '{now}')" in str(
            caught.value
        )


@pytest.mark.parametrize(
    "text, words",
    [
        ("rows: [", "cannot read the tuning table"),
        ("- 1", "has the keys arch, l2_budget, rows"),
        ("arch: sm90\nl2_budget: 1\nrows: []\nl2: 3", "unknown key 'l2'"),
        ("arch: sm90\nrows: []", "'l2_budget' must be a positive integer, not None"),
        ("arch: sm90\nl2_budget: 0\nrows: []", "'l2_budget' must be a positive integer, not 0"),
        ("arch: sm90\nrows:\n- kernel: [\n  dtype: x\n", ": line 5, column 1: did not find expected ',' or ']' while"),
        ("arch: é\nrows: \x07", ": line 2: YAML does not allow the character '\\x07'"),
        ("arch: 2026-99-99", ": month must be in 1..12"),
    ],
)
def test_rejects_what_is_no_table_in_one_line_with_its_place(tmp_path, text, words):
    message, file = refusal_of(tmp_path / "t", text), tmp_path / "t"
    assert message.startswith((f"{file}: ", f"cannot read the tuning table {file}: "))
    assert words in message and "\n" not in message


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 1}]\n" for i in range(9))
CHAIN = "".join(f"- &a{i} [{f'*a{i - 1}' if i else 1}]\n" for i in range(2000))


@pytest.mark.parametrize(
    "text, words",
    [
        ("rows: " + "[" * 300_000, "line 1, column 38: more than 32 mappings and lists inside one another"),
        (
            "rows: " + "[" * 300_000 + "]" * 300_000,
            "line 1, column 38: more than 32 mappings and lists inside one another",
        ),
        ("{a: " * 300_000, "line 1, column 129: more than 32 mappings and lists inside one another"),
        (BOMB, "more than 200,000 values, aliases (*) included"),
        (CHAIN, "more than 32 mappings and lists inside one another, aliases (*) included"),
        ("a: &a [*a]\n", "line 1, column 8: an alias (*) to a value that contains it"),
        ("rows: [" + "1," * 200_000 + "]", "more than 200,000 values, aliases (*) included"),
        ("# " + "x" * (4 << 20), "longer than 4,194,304 bytes"),
    ],
    ids=str.split("brackets closed-brackets braces aliases-of-aliases chain-of-aliases alias-of-itself values bytes"),
)
def test_rejects_a_file_that_would_exhaust_the_stack_or_memory(tmp_path, text, words):
    message = refusal_of(tmp_path / "t", text)
    assert message.startswith(f"cannot read the tuning table {tmp_path / 't'}: ") and words in message
    assert len(message) < 300


def test_reads_anchors_and_aliases(tmp_path):
    (tmp_path / "t").write_text("arch: sm90\nrows:\n- kernel: attention.forward\n  dtype: bfloat16\n  shape: &s {head_dim: 64}\n"
        "  launch: &l {block_m: 64, block_n: 64, num_warps: 4, num_stages: 2}\n  shared: 1\n  provenance: compiled only\n"
        "- {kernel: attention.dq, dtype: bfloat16, shape: *s, launch: *l, shared: 1, provenance: compiled only}\n")  # fmt: skip
    first, second = tuning_table.load(tmp_path / "t", "sm90", own=True).rows
    assert first.launch == second.launch == Launch(64, 64, 4, 2)
