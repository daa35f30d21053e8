"""Attention's backward pass by stored gradients of scores, run by test_attention_triton.py under TRITON_INTERPRET=1."""

from typing import Any

import pytest
import torch

from llmtrain.kernels.attention import stored_dscores, triton_call
from llmtrain.kernels.attention.triton_launch import StoredLaunch
from llmtrain.kernels.platform import Platform
from tests.support import attention
from tests.support.attention import CASES, Case, assert_agree

HOPPER = Platform("nvidia", "sm90", "", 1 << 36, 132)
LAUNCH: dict[str, Any] = {
    "block_m": 16, "block_n": 32, "num_warps": 4, "num_stages": 1, "rows": 128, "keys": 64, "queries": 256, "from_seq_len": 1,
}  # fmt: skip
CHUNKS = {
    "in one chunk": {},
    "of keys": {"keys": 32},
    "of queries": {"keys": 32, "queries": 48},
    "of one head": {"rows": 32, "keys": 32},
    "square tiles": {"block_m": 32, "keys": 32},
    "wide tiles": {"block_m": 32, "block_n": 16, "keys": 32},
}


@pytest.fixture
def ran(monkeypatch):
    """Calls of the backward pass by stored gradients."""
    found, backward = [], stored_dscores.backward
    monkeypatch.setattr(stored_dscores, "backward", lambda call, *rest: found.append(call) or backward(call, *rest))
    return found


def use(monkeypatch, **changes):
    monkeypatch.setattr(triton_call, "choose_stored", lambda *_: StoredLaunch(**{**LAUNCH, **changes}))
    monkeypatch.setattr(stored_dscores, "fills", lambda *_: True)


@pytest.mark.parametrize("name", ["causal", "full", "gqa"])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_any_chunks_agree_with_the_definition(chunks, name, monkeypatch, ran):
    use(monkeypatch, **CHUNKS[chunks])
    assert_agree(CASES[name], 1, 64)
    assert len(ran) == 1


@pytest.mark.parametrize("name", ["mqa", "alibi", "softcap", "48", "160", "wide keys"])
def test_the_score_is_that_of_the_other_kernels(name, monkeypatch, ran):
    use(monkeypatch, keys=32, queries=32)
    assert_agree(CASES[name], 2, 64)
    assert len(ran) == 1


@pytest.mark.parametrize("chunks", ["in one chunk", "of queries"])
def test_values_of_shared_keys_wider_than_these(chunks, monkeypatch, ran):
    use(monkeypatch, **CHUNKS[chunks])
    assert_agree(Case(16, 4, 2, value_dim=40), 2, 64)
    assert len(ran) == 1


def test_heads_that_do_not_fill_the_last_chunk(monkeypatch, ran):
    use(monkeypatch, rows=64, keys=32)
    assert_agree(Case(n_heads=3, n_kv_heads=3), 1, 64)
    assert len(ran) == 1


def test_tiles_stored_through_descriptors(monkeypatch, ran):
    monkeypatch.setattr(triton_call, "_platform_of", lambda device: HOPPER)
    use(monkeypatch, keys=32, use_tma=True)
    assert_agree(Case(n_heads=4, n_kv_heads=2), 2, 64)
    assert len(ran) == 1


@pytest.mark.parametrize(
    "case, seq_len", [(CASES["window"], 64), (CASES["packed"], 64), (CASES["alibi-full"], 64), (Case(), 61)]
)
def test_what_it_does_not_serve(case, seq_len, monkeypatch, ran):
    use(monkeypatch)
    assert_agree(case, 1, seq_len)
    assert not ran


def test_two_runs_are_equal_bit_by_bit(monkeypatch, ran):
    use(monkeypatch, keys=32, queries=32)
    tensors = attention.inputs(CASES["gqa"], 1, 64, torch.float32)
    runs = [attention.ours(CASES["gqa"], tensors) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0]) and len(ran) == 2


def test_chunks_hold_a_bounded_number_of_scores():
    """As many heads x keys as the launch says, whatever shares keys; with causality few keys, of more heads."""
    launch = StoredLaunch(**{**LAUNCH, "rows": 16384, "keys": 4096})
    assert (
        stored_dscores.shares(launch, 32, 1, 65536, True)
        == stored_dscores.shares(launch, 32, 1, 4096, False)
        == (4, 4096)
    )
    assert stored_dscores.shares(launch, 32, 1, 16384, True) == (8, 2048)
    assert stored_dscores.shares(launch, 32, 1, 4096, True) == (16, 1024)
    assert stored_dscores.shares(launch, 12, 3, 65536, True) == (3, 4096)
    assert stored_dscores.shares(launch, 32, 32, 65536, True) == (32, 512)
    assert stored_dscores.shares(launch, 2, 1, 16384, True) == (2, 2048)
    plan = list(stored_dscores.chunks(160, 64, 96, True))
    assert plan == [
        (slice(0, 64), [slice(0, 96), slice(96, 160)]),
        (slice(64, 128), [slice(64, 160)]),
        (slice(128, 160), [slice(128, 160)]),
    ]
    assert [at for _, seen in stored_dscores.chunks(128, 64, 64, False) for at in seen] == [
        slice(0, 64),
        slice(64, 128),
    ] * 2
