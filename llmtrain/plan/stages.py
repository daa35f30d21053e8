"""Stages of a pipeline (train.parallel.pipeline): consecutive layers of about the same work each, by counted FLOPs.

Where the borders lie changes no result and no checkpoint.
"""

from collections.abc import Sequence

from llmtrain.models.config import LayerRange
from llmtrain.models.hybrid import HybridLM


def stage_spans(model: HybridLM, seq_len: int, stages: int, virtual: int = 1) -> list[list[LayerRange]]:
    """Layers of each stage of a whole model: `virtual` spans, of all `stages` * virtual ones every stages-th, whose most expensive
    one costs the least that it can."""
    spans = divided([sum(cost) for cost in layer_costs(model, seq_len)], stages * virtual)
    return [spans[stage::stages] for stage in range(stages)]


def untrained(model: HybridLM, spans_of: Sequence[Sequence[LayerRange]]) -> list[int]:
    """Stages of a converted model that hold no trained parameter."""
    parts = (model.stage(*spans) for spans in spans_of)
    return [stage for stage, part in enumerate(parts) if not any(p.requires_grad for p in part.parameters())]


def layer_costs(model: HybridLM, seq_len: int, chunked_loss: bool = True) -> list[tuple[int, int]]:
    """FLOP of training on one sequence, in the forward and in the backward pass, by layer; the last layer's with those of the head.

    chunked_loss: the head's gradients are computed in the forward pass (models/loss.py).
    """
    layers = [block.flops(seq_len, causal=True) for block in model.layer_blocks()]
    costs = [(flops.forward.total, flops.total - flops.forward.total) for flops in layers]
    whole = model.flops(seq_len, causal=True)
    head = whole.total - sum(flops.total for flops in layers)
    first = head if chunked_loss else whole.forward.total - sum(flops.forward.total for flops in layers)
    costs[-1] = (costs[-1][0] + first, costs[-1][1] + head - first)
    return costs


def divided(costs: Sequence[int], parts: int) -> list[LayerRange]:
    """Runs of consecutive entries, none of them empty, whose largest sum is the least; of several such ways the one with the
    earliest borders. At most as many parts as entries."""
    assert 1 <= parts <= len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: (largest sum, borders) of the first n entries in so many parts as the loop has reached.
    best: dict[int, tuple[int, list[int]]] = {n: (sums[n], [n]) for n in range(1, len(costs) + 1)}
    for count in range(2, parts + 1):
        best = {
            n: min((max(best[m][0], sums[n] - sums[m]), [*best[m][1], n]) for m in range(count - 1, n))
            for n in range(count, len(costs) + 1)
        }
    borders = best[len(costs)][1]
    return list(zip([0, *borders[:-1]], borders, strict=True))
