"""FLOP counts: the sum over modules (models/costs.py), and the two conventions that turn them into MFU."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import parts_of
from llmtrain.models.parameters import parameter_info


def training_flops_per_token(model: HybridLM, seq_len: int) -> dict[str, float]:
    """FLOP of forward and backward per token, by convention.

    `foundry`: LLM Foundry's MFU formula, 6 N + 12 * n_layers * d_attn * T, where N counts every parameter
    (embeddings too, look-ups included) and attention is a full T x T square. For hybrids: N counts a shared
    block once per use, the attention term runs over the layers that attend (d_attn = n_heads * head_dim),
    and every Mamba-2 layer adds its scan, 12 * d_inner * d_state. A frozen parameter counts 4, wherever it is.
    `causal`: the sum over modules of what the mathematics needs: half squares, the same scan, look-ups free. A frozen weight has
    no gradient, 4 instead of 6 per parameter and token; below the first layer with a trained parameter (the embedding is below
    all) nothing has one, which leaves 2 and one forward pass of attention and scan. That layer itself counts in full.

    Both depend on the model and the sequence length alone, never on a backend or a chunk size, and count a sequence as
    one document, also where data.mask_documents hides most of it.
    """
    full, causal = model.flops(seq_len).forward, model.flops(seq_len, causal=True)
    count = count_parameters(model)
    return {
        "foundry": 4 * count.active + 2 * count.trained_active + 3 * (full.attention + full.scan) / seq_len,
        "causal": causal.total / seq_len,
    }


@dataclass(frozen=True)
class ParameterCount:
    """total: each once. active: those a token passes through, which of a shared block count once per use. trained: of either."""

    total: int
    active: int
    trained: int
    trained_active: int


def count_parameters(model: HybridLM) -> ParameterCount:
    """Counts on any device, `meta` too. Tied weights count once."""
    infos = parameter_info(model)
    again = [parameter for shared in model.shared_uses() for parameter in shared.parameters()]
    once = set(model.shared.parameters())
    active = [parameter for parameter in infos if parameter not in once] + again

    unused = {
        part.get_parameter(name): number
        for _, part in parts_of(model)
        for name, number in part.inactive_parameters().items()
    }

    def count(parameters: Iterable[nn.Parameter], used: bool = False, trained: bool = False) -> int:
        counted = (p for p in parameters if not trained or infos[p].trainable)
        return sum(p.numel() - (unused.get(p, 0) if used else 0) for p in counted)

    return ParameterCount(
        count(infos), count(active, used=True), count(infos, trained=True), count(active, used=True, trained=True)
    )
