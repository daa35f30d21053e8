"""Routers: the experts that each token meets, and the weights of their outputs. See RouterSection for the definitions."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.models.init import InitScale, Rule, constant, normal
from llmtrain.models.sections.experts import RouterSection

_SMALLEST_SUM = 1e-20


class Routing(NamedTuple):
    """chosen: [T, top_k], experts of each token; weights: [T, top_k] of their outputs; scores: [T, n_experts] of all experts, a
    distribution of each token. In the dtype of the logits."""

    chosen: Tensor
    weights: Tensor
    scores: Tensor


class Router(nn.Module):
    """The map from a token to a logit of each expert. Apart, so that it can stay fp32. Read as attributes; there is no forward."""

    def __init__(self, n_experts: int, d_model: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, d_model))
        self.bias = nn.Parameter(torch.empty(n_experts)) if bias else None

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        rules = {"weight": normal(scale.of(self.weight.shape[1]))}
        return rules if self.bias is None else rules | {"bias": constant(0.0)}

    def logits(self, tokens: Tensor, jitter: float) -> Tensor:
        """[T, d_model] -> [T, n_experts], in the router's dtype."""
        x = tokens.to(self.weight.dtype)
        if jitter:
            x = x * torch.empty_like(x).uniform_(1 - jitter, 1 + jitter)
        return F.linear(x, self.weight, self.bias)


def route(section: RouterSection, top_k: int, logits: Tensor, choice_bias: Tensor | None = None) -> Routing:
    """The experts of each token. logits: [T, n_experts]. choice_bias: [n_experts]."""
    if section.type == "sigmoid":
        scores = logits.sigmoid()
        distribution = scores / (scores.sum(-1, keepdim=True) + _SMALLEST_SUM)
    else:
        scores = distribution = logits.softmax(dim=-1)
    ranked = logits if section.type == "top_k_softmax" else scores
    chosen = _choose(section, ranked.detach(), top_k, choice_bias)
    if section.type == "top_k_softmax":
        weights = logits.gather(1, chosen).softmax(dim=-1)
    else:
        weights = scores.gather(1, chosen)
        if section.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return Routing(chosen, weights if section.scale == 1 else weights * section.scale, distribution)


def _choose(section: RouterSection, ranked: Tensor, top_k: int, choice_bias: Tensor | None) -> Tensor:
    """The top_k of each token [T, n_experts] -> [T, top_k], within the best groups."""
    ranked = ranked if choice_bias is None else ranked + choice_bias
    if section.groups > 1:
        grouped = ranked.unflatten(-1, (section.groups, -1))
        of_groups = grouped.topk(2 if section.group_score == "two_best" else 1, dim=-1).values.sum(-1)
        best = of_groups.topk(section.top_groups, dim=-1).indices
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        ranked = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)
    return ranked.topk(top_k, dim=-1).indices
