"""Routers: the experts that each token meets, and the weights of their outputs. See RouterSection for the definitions."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.models.init import InitScale, Rule, constant, normal
from llmtrain.models.sections.experts import RouterMLPSection, RouterSection

_SMALLEST_SUM = 1e-20


class Routing(NamedTuple):
    """chosen: [T, top_k], experts of each token; weights: [T, top_k] of their outputs; scores: [T, n] of all choices, a
    distribution of each token. In the dtype of the logits. The choices are the experts and, where the router has `skip`, none."""

    chosen: Tensor
    weights: Tensor
    scores: Tensor

    def met(self, section: RouterSection, n_experts: int) -> tuple[Tensor, Tensor]:
        """(chosen, weights) with an expert for each token. One that chose none meets an expert with weight 0: which one goes by
        its place, so that no expert has more of those than another."""
        if not section.skip:
            return self.chosen, self.weights
        none = self.chosen == n_experts
        places = torch.arange(len(self.chosen), device=none.device)[:, None] % n_experts
        return torch.where(none, places, self.chosen), self.weights.masked_fill(none, 0.0)


def taken(chosen: Tensor, n_experts: int, capacity: float) -> Tensor:
    """True for choices [T, top_k] that their experts take: of each expert the first ceil(capacity * T * top_k / n_experts), all
    tokens' first choices before their second ones. Nothing waits for the host."""
    experts = chosen.t().flatten()
    order = experts.argsort(stable=True)
    counts = torch.zeros(n_experts, dtype=torch.long, device=chosen.device).scatter_add_(
        0, experts, torch.ones_like(experts)
    )
    first = counts.cumsum(0) - counts
    places = torch.arange(len(experts), device=chosen.device)
    of_expert = torch.empty_like(places).scatter_(0, order, places - first[experts[order]])
    return (of_expert < math.ceil(capacity * len(experts) / n_experts)).view(chosen.shape[::-1]).t()


class Router(nn.Module):
    """The map from a token to a logit of each choice. Apart, so that it can stay fp32. Read as attributes; there is no forward."""

    def __init__(self, n_experts: int, d_model: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, d_model))
        self.bias = nn.Parameter(torch.empty(n_experts)) if bias else None

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        rules = {"weight": normal(scale.of(self.weight.shape[1]))}
        return rules if self.bias is None else rules | {"bias": constant(0.0)}

    def logits(self, tokens: Tensor, jitter: float, *previous: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T, d_model] -> [T, n_experts], in the router's dtype, and the state to hand on, where there is one."""
        return F.linear(_jittered(tokens.to(self.weight.dtype), jitter), self.weight, self.bias), None

    def matrices(self) -> list[nn.Parameter]:
        """Matrices by which a token's channels are multiplied."""
        return [self.weight]


class RouterMLP(nn.Module):
    """Router with a state, which later layers read. See RouterMLPSection."""

    down: nn.Parameter
    down_bias: nn.Parameter
    previous_scale: nn.Parameter
    norm: nn.Parameter
    w_1: nn.Parameter
    bias_1: nn.Parameter
    w_2: nn.Parameter
    bias_2: nn.Parameter
    out: nn.Parameter

    def __init__(self, choices: int, d_model: int, section: RouterMLPSection):
        super().__init__()
        width, self.eps = section.width, section.eps
        shapes = {"down": (width, d_model), "w_1": (width, width), "w_2": (width, width), "out": (choices, width)}
        shapes |= dict.fromkeys(("down_bias", "norm", "bias_1", "bias_2"), (width,))
        if section.previous:
            shapes["previous_scale"] = (width,)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        weights = {
            name: normal(scale.of(weight.shape[1])) for name, weight in self.named_parameters() if weight.ndim == 2
        }
        ones = {name: constant(1.0) for name in ("norm", "previous_scale") if hasattr(self, name)}
        return weights | ones | {name: constant(0.0) for name in ("down_bias", "bias_1", "bias_2")}

    def logits(self, tokens: Tensor, jitter: float, *previous: Tensor) -> tuple[Tensor, Tensor | None]:
        """tokens: [T, d_model]; previous: of the layer before, [T, width] -> logits [T, choices] in the router's dtype, and the
        state [T, width] in that of the tokens."""
        state = F.linear(_jittered(tokens.to(self.down.dtype), jitter), self.down, self.down_bias)
        for one in previous:
            state = state + one.to(state.dtype) * self.previous_scale
        h = F.rms_norm(state, state.shape[-1:], self.norm, self.eps)
        h = F.gelu(F.linear(h, self.w_1, self.bias_1))
        h = F.gelu(F.linear(h, self.w_2, self.bias_2))
        return F.linear(h, self.out), state.to(tokens.dtype)

    def matrices(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.ndim == 2]


def _jittered(x: Tensor, jitter: float) -> Tensor:
    return x * torch.empty_like(x).uniform_(1 - jitter, 1 + jitter) if jitter else x


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
