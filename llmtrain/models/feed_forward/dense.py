"""The dense feed-forward layer: two matrices, or three with a gate."""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmtrain.kernels.glu.reference import ACTIVATIONS, GATED, UNGATED
from llmtrain.kernels.platform import Platform
from llmtrain.models.context import BlockContext
from llmtrain.models.costs import Flops
from llmtrain.models.feed_forward.base import FeedForward
from llmtrain.models.init import InitScale, Rule, constant
from llmtrain.models.layers import NO_CHANGES, Change, Linear, multiplied, product
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.tensor_parallel import Part, TensorRanks


class MLP(FeedForward):
    """w_out(act(w_in x)), or gated: w_out(act(gate) * up), gate and up being the two halves of w_in x.

    See MLPSection.type, and Shazeer, arXiv:2002.05202. residual: as Linear's; not so in a shared block, whose published class
    has gate and up in one.
    """

    outputs = ("w_out",)

    @property
    def fp32_parameters(self) -> Collection[str]:
        return () if self.xielu is None else ("xielu.alpha_p", "xielu.alpha_n")

    def __init__(
        self,
        section: MLPSection,
        d_model: int,
        platform: Platform | None = None,
        dtype: torch.dtype = torch.bfloat16,
        residual: bool = True,
    ):
        super().__init__(section, d_model, platform, dtype)
        self.gated = section.gated
        self.xielu = XIELU() if section.type == "xielu" else None
        if self.xielu is not None:
            self.activation = self.xielu.activate
        else:
            self.activation = ACTIVATIONS[GATED[section.type]] if section.gated else UNGATED[section.type]
        self.glu = gated_unit(section.type, platform)
        self.activation_multiplier, self.out_multiplier = section.activation_multiplier, section.out_multiplier
        self.parts = [section.d_ff] * (2 if section.gated else 1)  # gate and up
        self.d_in = sum(self.parts)
        names = ("gate", "up") if section.gated else ()
        self.w_in = Linear(d_model, self.d_in, section.bias, parts=self.parts, names=names, whole=not residual)
        self.w_out = Linear(section.d_ff, d_model, section.bias, residual=residual)

    def split(self, ranks: TensorRanks) -> None:
        """Compute with this rank's channels."""
        self.ranks = ranks
        self.w_in.split_output(ranks, [Part(width) for width in self.parts])
        self.w_out.split_input(ranks, Part(self.parts[0]))

    def forward(
        self, x: Tensor, context: BlockContext | None = None, changes: Mapping[str, Change] = NO_CHANGES
    ) -> Tensor:
        """changes: to the linear layers, by name, where this is one use of a shared layer.

        With tokens_at_once, parts of x that are computed again in the backward pass.
        """
        at_once = self.tokens_at_once
        if at_once is None or x.shape[1] <= at_once or not torch.is_grad_enabled():
            return self._compute(x, changes)
        again = partial(checkpoint, self._compute, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([cast("Tensor", again(part, changes)) for part in x.split(at_once, dim=1)], dim=1)

    def _compute(self, x: Tensor, changes: Mapping[str, Change]) -> Tensor:
        x = x if self.ranks is None else self.ranks.enter(x)
        h = self._activate(product(self.w_in, x, changes.get("w_in")))
        return multiplied(product(self.w_out, h, changes.get("w_out")), self.out_multiplier)

    def _activate(self, h: Tensor) -> Tensor:
        """[..., d_in] -> [..., d_ff]."""
        if self.glu is not None and self.activation_multiplier == 1 and torch.is_grad_enabled():
            return self.glu(h)
        gate, up = h.chunk(2, dim=-1) if self.gated else (h, None)
        h = self.activation(multiplied(gate, self.activation_multiplier))
        return h if up is None else h * up

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return self.w_in.flops(seq_len) + self.w_out.flops(seq_len)


class XIELU(nn.Module):
    """xIELU (arXiv:2411.13010): beta x + softplus(alpha_p) x^2 above 0, and below beta x + (beta + softplus(alpha_n)) *
    (e^min(x, eps) - 1 - x). Its two numbers stay fp32: read as attributes; there is no forward."""

    beta, eps = 0.5, -1e-6

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        """Both factors are 0.8 at first."""
        starts = {"alpha_p": 0.8, "alpha_n": 0.8 - self.beta}
        return {name: constant(math.log(math.expm1(start))) for name, start in starts.items()}

    def activate(self, x: Tensor) -> Tensor:
        """[..., d_ff] -> like x, computed in fp32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        above, below = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        curved = torch.where(wide > 0, above * wide * wide, (torch.expm1(wide.clamp(max=self.eps)) - wide) * below)
        return (curved + self.beta * wide).to(x.dtype)


def gated_unit(kind: str, platform: Platform | None) -> Callable[[Tensor], Tensor] | None:
    """act(gate) * up with our kernel for its gradient, by MLPSection.type; None where there is none: without gates, and where the
    kernel was not tried."""
    if kind not in GATED or platform is None or platform.vendor != "nvidia":
        return None
    from llmtrain.kernels.glu.triton import glu  # needs Triton

    return partial(glu, activation=GATED[kind])
