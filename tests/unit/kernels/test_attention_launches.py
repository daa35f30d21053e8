"""Which row of the tuning tables launches an attention kernel."""

from dataclasses import replace

import pytest
import torch

from llmtrain.kernels import tuning, tuning_table
from llmtrain.kernels.attention import triton_call as attention
from llmtrain.kernels.attention.triton_launch import Launch
from llmtrain.kernels.attention.triton_select import choose, pairs_in_flight, takes_any_length
from llmtrain.kernels.attention.triton_tiles import parts_of
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.tuning_table import Row

A100 = Platform("nvidia", "sm80", "", 1 << 36, 108)
HOPPER = Platform("nvidia", "sm90", "", 1 << 36, 132)


def call(seq_len: int = 4096, head_dim: int = 128, **features) -> attention.Call:
    q = torch.empty(1, seq_len, 2, head_dim, device="meta", dtype=torch.bfloat16)
    for name in ("slopes", "starts"):
        if features.pop(name, False):
            features[name] = torch.empty((1, seq_len) if name == "starts" else (2,), device="meta", dtype=torch.int32)
    return attention.Call(q, q, q, 0.1, platform=HOPPER, **features)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Rows of one's own, which come first: (block_m, variant, length) of the forward at head_dim 128."""

    def write(*wanted: tuple[int, str | None, int | None]) -> None:
        made = [
            Row("attention.forward", "bfloat16", (128,), Launch(m, 64, 4, 2), 1, "compiled only", length, variant)
            for m, variant, length in wanted
        ]
        tuning_table.save(tmp_path / "own.yaml", "sm90", made)
        monkeypatch.setenv("LLMTRAIN_TUNING", str(tmp_path / "own.yaml"))
        tuning.forget()

    yield write
    tuning.forget()


def block_m(variant: str | None, seq_len: int = 4096) -> int:
    return choose("forward", 128, "bfloat16", HOPPER, seq_len, variant).block_m


@pytest.mark.parametrize(
    "features, name",
    [
        ({}, "plain"),
        ({"window": 100}, "window"),
        ({"window": 4096}, "plain"),  # hides nothing
        ({"starts": True, "window": 100}, "documents+window"),
        ({"softcap": 30.0, "window": 100, "slopes": True, "starts": True}, "alibi+documents+softcap+window"),
        ({"causal": False}, "plain"),  # the loop of plain attention, without its masks
        ({"causal": False, "window": 100}, "mixed"),
    ],
)
def test_a_variant_is_named_after_what_it_adds_to_plain_attention(features, name):
    assert call(**features).variant == name


def test_several_features_take_their_own_row_or_else_that_for_mixed(rows):
    rows((16, None, None), (32, "mixed", None), (64, "documents+window", None), (128, "window", None))
    assert block_m("documents+window") == 64
    assert block_m("softcap+window") == block_m("mixed") == 32
    assert block_m("window") == 128
    assert block_m("alibi") == block_m(None) == 16


def test_documents_with_a_window_take_the_row_for_documents(rows):
    rows((16, None, None), (32, "mixed", None), (64, "documents", None), (128, "window", None))
    assert block_m("documents+window") == 64


def test_values_of_another_width_than_keys_take_their_own_row_or_else_that_of_their_variant(rows):
    rows((16, None, None), (32, "plain", None), (64, "plain, values 64", None), (128, "window", None))
    q = torch.empty(1, 4096, 2, 128, device="meta", dtype=torch.bfloat16)

    def chosen(width: int, **features) -> int:
        made = attention.Call(q, q, q[..., :width], 0.1, platform=HOPPER, **features)
        return made._choose_launch("forward", made.k, made.v)[0].block_m

    assert (chosen(64), chosen(96), chosen(128)) == (64, 32, 32)
    assert chosen(64, window=100) == 128


OWN = ((96, 16, "window"), (128, 32, "window"), (128, 64, "window, grouped"), (128, 256, "plain"))


def test_dkdv_of_grouped_heads_has_rows_of_its_own(monkeypatch, tmp_path):
    made = [
        Row("attention.dkdv", "bfloat16", (size,), Launch(m, 64, 4, 2), 1, "compiled only", None, variant)
        for size, m, variant in OWN
    ]
    tuning_table.save(tmp_path / "own.yaml", "sm90", made)
    monkeypatch.setenv("LLMTRAIN_TUNING", str(tmp_path / "own.yaml"))
    tuning.forget()

    def chosen(head_dim: int, grouped: bool, variant: str = "window") -> int:
        return choose("dkdv", head_dim, "bfloat16", HOPPER, 4096, variant, grouped).block_m

    assert (chosen(128, False), chosen(128, True)) == (32, 64)
    assert chosen(96, True) == 16  # the nearest head_dim comes first
    assert chosen(128, True, "plain") == 256  # one's own, though there is a shipped row for `plain, grouped`
    monkeypatch.undo()
    tuning.forget()


def test_the_length_of_a_row_for_windows_is_how_far_back_a_query_sees(rows):
    rows((16, None, None), (64, "window", 1024), (128, "window", 8192))
    assert call(16384, window=1500).row("forward").block_m == 64
    assert call(16384, window=6000).row("forward").block_m == 128


@pytest.mark.parametrize("features, general", [({"window": 100}, 16), ({"window": 100, "softcap": 9.0}, 32)])
def test_a_sequence_that_is_not_in_whole_tiles_takes_a_row_that_serves_all(features, general, rows):
    """Loaded by pointers, as these rows say."""
    rows((16, None, None), (32, "mixed", None), (64, "window", None), (128, "softcap+window", None))
    for seq_len, wanted in ((4096, call(**features).row("forward").block_m), (4095, general)):
        made = call(seq_len, **features)
        assert made._choose_launch("forward", made.k, made.v)[0].block_m == wanted


def test_tma_loads_parts_of_one_width_padded_or_not():
    def fits(head_dim: int, part: int | None, seq_len: int = 4096) -> bool:
        made = call(seq_len, head_dim)
        return made._fits_tma(replace(Launch(64, 64, 4, 2), use_tma=True, part=part), made.k, made.v)

    assert fits(128, None) and fits(96, 32) and fits(96, 128) and fits(224, 256) and fits(96, 128, 4095)
    assert not fits(96, None)


def test_a_head_of_one_tile_is_not_padded_to_a_wider_part():
    assert parts_of(32, 64) == (32,) and parts_of(48, 64) == (64,) and parts_of(128, 64) == (64, 64)


@pytest.mark.parametrize("head_dim, variant, wanted", [
    (48, "alibi", True), (64, "plain", True), (128, "window", True), (80, "plain", False), (160, "documents", False),
])  # fmt: skip
def test_sequences_of_any_length_where_tma_loads_all_tiles(head_dim, variant, wanted):
    assert takes_any_length(head_dim, "bfloat16", HOPPER, 4095, variant, True, None) == wanted
    assert not takes_any_length(head_dim, "bfloat16", A100, 4095, variant, True, None)


@pytest.mark.parametrize(
    "mib, tiles, pairs, group, wanted",
    [
        (4, 128, 64, 4, 32),  # what 32 MiB of the L2 cache hold
        (64, 512, 8, 1, 1),
        (1, 1, 6, 2, 6),
        (16, 64, 16, 1, 4),  # two programs for each of 132 multiprocessors, where 32 MiB hold two pairs of 64
        (12, 64, 30, 1, 5),  # rounds of four would leave one of two
        (12, 64, 71, 1, 5),  # no rounds of one size
    ],
)
def test_pairs_run_side_by_side_in_rounds_that_fill_the_device(mib, tiles, pairs, group, wanted):
    assert pairs_in_flight(HOPPER, mib << 20, tiles, pairs, group) == wanted
