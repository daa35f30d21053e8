"""A feed-forward layer of experts, of which each token meets a few."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from llmtrain.kernels import registry
from llmtrain.kernels.platform import Platform, detect
from llmtrain.models.attached_loss import AttachedLosses, add_in_backward, attach_loss, attach_pooled
from llmtrain.models.context import BlockContext
from llmtrain.models.costs import Flops, Work
from llmtrain.models.feed_forward.base import FeedForward
from llmtrain.models.feed_forward.dense import MLP
from llmtrain.models.feed_forward.exchange import ExpertRanks, Travel, eager
from llmtrain.models.feed_forward.routers import Router, RouterMLP, Routing, route, taken
from llmtrain.models.init import InitScale, Rule, constant, normal
from llmtrain.models.layers import Linear
from llmtrain.models.passing import passed_on
from llmtrain.models.sections.experts import ExpertsSection
from llmtrain.models.slices import shard_parameter
from llmtrain.models.tensor_parallel import TensorRanks

_LOGGED_LOADS = 64
"""Most experts of a layer whose loads are logged one by one."""


class ExpertWeights(nn.Module):
    """The matrices of all experts, one above another as published checkpoints have them: w_in [n_experts, d_in, d], gate above up,
    and w_out [n_experts, d, d_ff]. A call computes with them, so that FSDP2 can gather them for it alone.

    parts: rows of the maps that stand in each expert's matrix, by parameter (as Linear.parts).
    """

    ranks: ExpertRanks | None = None

    def __init__(self, section: ExpertsSection, d: int):
        super().__init__()
        n, d_in = section.n_experts, section.spec(d).d_in
        self.w_in = nn.Parameter(torch.empty(n, d_in, d))
        self.w_out = nn.Parameter(torch.empty(n, d, section.d_ff))
        self.b_in = nn.Parameter(torch.empty(n, d_in)) if section.bias else None
        self.b_out = nn.Parameter(torch.empty(n, d)) if section.bias else None
        self.parts = {"w_in": (section.d_ff,) * (d_in // section.d_ff), "w_out": (d,)}

    def split(self, ranks: ExpertRanks) -> None:
        """Keep this rank's experts."""
        self.ranks = ranks
        for name, parameter in list(self.named_parameters()):
            shard_parameter(self, name, ranks.slices(len(parameter)))

    def forward(self, kernel: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """kernel: see kernels/experts/reference.py, as are its inputs."""
        held = (self.matrix("w_in"), self.matrix("w_out"), self.b_in, self.b_out)
        if self.ranks is not None:
            held = tuple(one if one is None else _ScaledGradient.apply(one, self.ranks.share) for one in held)
        return kernel(x, chosen, weights, *held)

    def matrix(self, name: str) -> Tensor:
        """w_in or w_out, as it is computed with."""
        return self.get_parameter(name)

    def is_trained(self, name: str) -> bool:
        """True if the gradient of a matrix is computed."""
        return self.get_parameter(name).requires_grad

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        rules = {
            "w_in": normal(scale.of(self.w_in.shape[2])),
            "w_out": normal(scale.of(self.w_out.shape[2], residual=True)),
        }
        return rules if self.b_in is None else rules | {"b_in": constant(0.0), "b_out": constant(0.0)}


class Experts(FeedForward):
    """The sum of the chosen experts' outputs by the router's weights, and of an MLP that every token meets."""

    choice_bias: Tensor
    load: Tensor
    dropped: Tensor

    def __init__(self, section: ExpertsSection, d_model: int, platform: Platform | None, dtype: torch.dtype):
        super().__init__(section, d_model, platform, dtype)
        self.section, width = section, section.latent or d_model
        kernel = section.kernel(d_model, str(dtype).removeprefix("torch."))
        self.platform, self.spec = platform or detect(), kernel.spec
        self.backend = registry.resolve(kernel.operation, kernel.backend, kernel.spec, self.platform)
        self.kernel = self.backend.build(kernel.spec, self.platform)
        self.expert_ranks: ExpertRanks | None = None
        choices, of_router = section.choices, section.router
        self.router = (
            Router(choices, d_model, of_router.bias)
            if of_router.mlp is None
            else RouterMLP(choices, d_model, of_router.mlp)
        )
        self.latent_in = None if section.latent is None else Linear(d_model, width)
        self.experts = ExpertWeights(section, width)
        self.latent_out = None if section.latent is None else Linear(width, d_model, residual=True)
        self.shared = None if section.shared is None else MLP(section.shared, d_model, platform, dtype)
        self.shared_gate = Linear(d_model, 1) if section.shared_gate else None
        if section.router.choice_bias:
            self.register_buffer("choice_bias", torch.zeros(choices))
        self.register_buffer("load", torch.zeros(choices), persistent=False)
        if section.capacity is not None:
            self.register_buffer("dropped", torch.zeros(()), persistent=False)
        pooled = section.balance.weight > 0 and section.balance.over == "model"
        self.pooling = choices if pooled else None

    @property
    def fp32_parameters(self) -> Collection[str]:
        return [f"router.{name}" for name, _ in self.router.named_parameters()]

    @property
    def no_decay_parameters(self) -> Collection[str]:
        return ("experts.b_in", "experts.b_out") if self.section.bias else ()

    @property
    def losses(self) -> Collection[str]:
        weights = {"balance": self.section.balance.weight, "router_z": self.section.z_loss}
        return [name for name, weight in weights.items() if weight > 0]

    @property
    def outputs(self) -> Collection[str]:
        return ("latent_out",) if self.shared_gate is not None else ("latent_out", "shared.w_out")

    def split(self, ranks: TensorRanks) -> None:
        """Divide the MLP beside the experts. Router and experts read this rank's own tokens, of which expert-parallel ranks have
        different ones (`split_experts`)."""
        self.ranks = ranks
        if self.shared is not None:
            self.shared.split(ranks)

    def split_experts(self, ranks: ExpertRanks) -> None:
        self.expert_ranks = ranks
        self.experts.split(ranks)
        # Of one row that comes: its expert here.
        spec = replace(self.spec, n_experts=self.section.n_experts // ranks.size, top_k=1)
        self.kernel = self.backend.build(spec, self.platform)

    def split_modules(self) -> Sequence[nn.Module]:
        return (self.experts,)

    def fixed_ops(self) -> set[str]:
        """The choice of experts, and how many rows come from where: rows that are sent again shall be those that were sent."""
        return {"aten.topk.default", "llmtrain.exchange_counts.default"}

    def forward(self, x: Tensor, context: BlockContext, *carried: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        tokens, router = x.flatten(0, -2), self.section.router
        trained = torch.is_grad_enabled() and context.losses is not None
        jitter = router.jitter if self.training and torch.is_grad_enabled() else 0.0
        logits, state = self.router.logits(tokens, jitter, *(one.flatten(0, -2) for one in carried))
        routing = route(router, self.section.top_k, logits, self.choice_bias if router.choice_bias else None)
        chosen, weights = routing.met(router, self.section.n_experts)
        kept = None
        if self.section.capacity is not None and self.training:
            kept = taken(chosen, self.section.n_experts, self.section.capacity)
            weights = weights * kept
        z = tokens if self.latent_in is None else self.latent_in(tokens)
        if self.expert_ranks is None:
            y, beside = self.experts(self.kernel, z, chosen, weights), self._beside(x)
        else:
            travel = self.expert_ranks.begin(z, chosen, self.section.n_experts)
            beside = self._beside(x)  # meanwhile
            y = self._exchanged(travel, weights)
        y = y if self.latent_out is None else self.latent_out(y)
        y = y if beside is None else y + beside
        y = (self._attach(y, logits, routing, kept, context.losses) if trained else y).view_as(x)
        return y if state is None else (y, state.view(*x.shape[:-1], -1))

    def _beside(self, x: Tensor) -> Tensor | None:
        """The output [T, d_model] of the MLP that every token meets."""
        if self.shared is None:
            return None
        beside = self.shared(x).flatten(0, -2)
        return beside if self.shared_gate is None else self.shared_gate(x.flatten(0, -2)).sigmoid() * beside

    @eager
    def _exchanged(self, travel: Travel, weights: Tensor) -> Tensor:
        """The experts' outputs for this rank's tokens, once the rows of all ranks are where their experts are."""
        rows = travel.arrive()
        experts, n = travel.experts, len(rows)
        if not n:  # gradients are zeros, not none: FSDP2 reduces those of all ranks together
            rows, experts = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), experts.new_zeros(1)
        y = self.experts(self.kernel, rows, experts[:, None], weights.new_ones(len(rows), 1))
        return travel.send_back(y[:n], weights)

    def _attach(
        self, y: Tensor, logits: Tensor, routing: Routing, kept: Tensor | None, losses: AttachedLosses | None
    ) -> Tensor:
        """y, with the losses of the layer and its counts of tokens."""
        assert losses is not None
        section, chosen = self.section, routing.chosen.flatten()
        load = torch.zeros_like(self.load).scatter_add_(0, chosen, torch.ones_like(chosen, dtype=self.load.dtype))
        y = add_in_backward(y, self.load, load)
        if kept is not None:
            y = add_in_backward(y, self.dropped, (~kept).sum().to(self.dropped.dtype))
        if section.z_loss:
            y = attach_loss(y, section.z_loss * logits.logsumexp(-1).square().mean(), losses, "router_z")
        if not section.balance.weight:
            return y
        every = section.balance.tokens == "step"
        load = _over_ranks(load + self.load) if every else losses.over_sharers(load)
        share, factor = load / load.sum(), section.balance.weight * section.choices
        mean = routing.scores.mean(0)
        if self.pooling is None:
            return attach_loss(y, factor * (share * mean).sum(), losses, "balance")
        layers = len(losses.counts)
        assert self.counts is not None
        with torch.no_grad():
            self.counts.copy_(share * section.top_k / layers)
        return attach_pooled(y, factor / layers * mean, losses, "balance")

    def after_step(self) -> None:
        if rate := self.section.router.bias_rate:
            self.choice_bias += rate * (self.load.mean() - self.load).sign()

    def metrics(self) -> dict[str, Tensor]:
        """Experts' shares of the step's tokens, the largest and the smallest over the mean, and their entropy over that of a
        balanced load; and with `capacity` the share that was dropped."""
        share, n = self.load / self.load.sum(), self.section.choices
        entropy = torch.special.entr(share).sum() / torch.log(torch.tensor(float(max(n, 2))))
        found = {"load_max": share.max() * n, "load_min": share.min() * n, "load_entropy": entropy}
        if self.section.capacity is not None:
            found["dropped"] = self.dropped / self.load.sum()
        return found | ({f"load_{i}": one for i, one in enumerate(share)} if n <= _LOGGED_LOADS else {})

    def matrix_rows(self) -> dict[str, tuple[int, ...]]:
        return {f"experts.{name}": rows for name, rows in self.experts.parts.items()}

    def inactive_parameters(self) -> dict[str, int]:
        left = self.section.n_experts - self.section.top_k
        return {f"experts.{name}": left * weight[0].numel() for name, weight in self.experts.named_parameters()}

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        experts, share = self.experts, self.section.n_experts
        total = Flops()
        for weight, part, trained in (
            (experts.w_in, self.section.top_k, experts.is_trained("w_in")),
            (experts.w_out, self.section.top_k, experts.is_trained("w_out")),
            *((weight, share, weight.requires_grad) for weight in self.router.matrices()),
        ):
            work = Work(projection=2 * seq_len * weight.numel() * part // share)
            total += Flops.with_weight(work, trained)
        for linear in (self.latent_in, self.latent_out, self.shared, self.shared_gate):
            total += Flops() if linear is None else linear.flops(seq_len)
        return total


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return passed_on(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d * ctx.factor, None


def _over_ranks(load: Tensor) -> Tensor:
    """The sum over all ranks, whose tokens all differ."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return load
    assert dist.group.WORLD is not None
    return collectives.all_reduce(load, "sum", dist.group.WORLD)
