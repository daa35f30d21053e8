"""FLOP counts: the sum over modules (models/costs.py), and the two conventions that turn them into MFU."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.models.hybrid import HybridLM


def training_flops_per_token(model: HybridLM, seq_len: int) -> dict[str, float]:
    """FLOP of forward and backward per token, by convention.

    `foundry`: LLM Foundry's MFU formula, 6 N + 12 * n_layers * d_attn * T, where N counts every parameter
    (embeddings too, look-ups included) and attention is a full T x T square. For hybrids: N counts a shared
    block once per use, the attention term runs over the layers that attend (d_attn = n_heads * head_dim),
    and every Mamba-2 layer adds its scan, 12 * d_inner * d_state.
    `causal`: the sum over modules of what the mathematics needs: half squares, the same scan, look-ups free.

    Both depend on the model and the sequence length alone, never on a backend or a chunk size, and count a sequence as
    one document, also where data.mask_documents hides most of it.
    """
    full, causal = model.flops(seq_len), model.flops(seq_len, causal=True)
    return {
        "foundry": 6 * count_parameters(model).active + 3 * (full.attention + full.scan) / seq_len,
        "causal": 3 * causal.total / seq_len,
    }


@dataclass(frozen=True)
class ParameterCount:
    total: int
    active: int
    """Parameters a token passes through: those of a shared block count once per use."""


def count_parameters(model: HybridLM) -> ParameterCount:
    """Counts on any device, `meta` too. Tied weights count once."""
    total, shared_once = (sum(p.numel() for p in module.parameters()) for module in (model, model.shared))
    shared_per_use = sum(p.numel() for shared in model.shared_uses() for p in shared.parameters())
    return ParameterCount(total, total - shared_once + shared_per_use)
