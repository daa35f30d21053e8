"""The arithmetic behind MFU, held to published figures."""

import pytest

from llmtrain.flops.mfu import mfu, tokens_per_second_at, transformer_token_flops


def test_full_and_frozen_fine_tuning_of_405b():
    """A public run: 405e9 parameters, 16 x 64 tokens in 30 s on 8 MI300X of 1.3 PFLOP/s: 0.8 %, frozen 0.53 %."""
    tokens_per_second = 16 * 64 / 30
    full = mfu(transformer_token_flops(405e9).total, tokens_per_second, 1.3e15, 8)
    frozen = mfu(transformer_token_flops(405e9, frozen=True).total, tokens_per_second, 1.3e15, 8)
    assert round(full * 100, 1) == 0.8
    assert round(frozen * 100, 2) == 0.53


def test_frozen_weights_save_exactly_the_weight_gradients():
    full = transformer_token_flops(1e9, n_layers=24, d_attn=2048, seq_len=2048)
    frozen = transformer_token_flops(1e9, n_layers=24, d_attn=2048, seq_len=2048, frozen=True)
    assert full.total - frozen.total == 2e9
    assert full.forward == frozen.forward


@pytest.mark.parametrize(
    ("params", "n_layers", "d_model", "tokens_per_second_per_gpu", "published"),
    [(1_315_950_592, 24, 2048, 45_455, 0.4182), (6_658_859_008, 32, 4096, 10_643, 0.4644)],
)
def test_llm_foundrys_published_mfu(params, n_layers, d_model, tokens_per_second_per_gpu, published):
    """LLM Foundry, scripts/train/benchmarking/README.md: MPT-1B and MPT-7B, 8 H100 SXM, sequence 2048."""
    flops = transformer_token_flops(params, n_layers=n_layers, d_attn=d_model, seq_len=2048)
    assert flops.total == 6 * params + 12 * n_layers * d_model * 2048
    # Their 8-GPU throughput divided by 8, against the dense H100 peak; they print two decimals of a percent.
    assert mfu(flops.total, 8 * tokens_per_second_per_gpu, 989.5e12, 8) == pytest.approx(published, abs=2e-4)


def test_full_recomputation_costs_a_third_more():
    """LLM Foundry prints MFU 40.27 and HFU 53.69 for MPT-30B with activation checkpointing."""
    flops = transformer_token_flops(30e9, n_layers=48, d_attn=7168, seq_len=2048)
    assert flops.with_recompute(1.0) / flops.total == pytest.approx(53.69 / 40.27, abs=1e-3)
    assert flops.with_recompute(0.0) == flops.total


def test_throughput_inverts_mfu():
    flops = transformer_token_flops(7e9).total
    assert mfu(flops, tokens_per_second_at(0.5, flops, 989.5e12), 989.5e12) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_figures_must_be_positive_and_finite(bad):
    with pytest.raises(ValueError, match="tokens_per_second must be positive"):
        mfu(6e9, bad, 1e15)
    with pytest.raises(ValueError, match="params must be positive"):
        transformer_token_flops(bad)


def test_shares_stay_between_0_and_1():
    with pytest.raises(ValueError, match="between 0 and 1"):
        tokens_per_second_at(1.5, 6e9, 1e15)
    with pytest.raises(ValueError, match="between 0 and 1"):
        transformer_token_flops(1e9).with_recompute(1.1)
