"""Gated linear units in PyTorch (Shazeer, arXiv:2002.05202)."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


UNGATED: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
GATED: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""Activations by the type of a feed-forward layer (MLPSection.type)."""


def swiglu_clamped(h: Tensor) -> Tensor:
    """gpt-oss's unit (arXiv:2508.10925): gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up between -7 and 7."""
    gate, up = h.chunk(2, dim=-1)
    gate = gate.clamp(max=CLAMP)
    return gate * torch.sigmoid(CLAMPED_SLOPE * gate) * (up.clamp(-CLAMP, CLAMP) + 1)


CLAMP, CLAMPED_SLOPE = 7.0, 1.702


def feed_forward_unit(h: Tensor, kind: str) -> Tensor:
    """The activation of a type of feed-forward layer: [..., width], gated [..., 2 width] -> [..., width]."""
    if kind == "swiglu_clamped":
        return swiglu_clamped(h)
    return glu(h, GATED[kind]) if kind in GATED else UNGATED[kind](h)


def glu(h: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, gate and up being the two halves of h: [..., 2 width] -> [..., width]."""
    gate, up = h.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def glu_bwd(dy: Tensor, h: Tensor, activation: Activation) -> Tensor:
    """Gradient of h, from that of the result: [..., width] and [..., 2 width] -> like h."""
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        return torch.autograd.grad(glu(leaf, activation), leaf, dy)[0]
