"""Model and hardware FLOPs utilisation from plain figures: sums and divisions, no torch.

MFU (PaLM, arXiv:2204.02311, appendix B) counts the FLOPs the model needs; HFU also counts those spent on recomputing
activations. Convention for a transformer with N parameters, L layers, width d and sequence length T, per token:

    forward   2 N + 4 L d T       (each parameter multiplies and adds once; scores and values cost 2 d T each)
    backward  2 N + 8 L d T       w.r.t. activations (the attention products have no weights, but two inputs)
            + 2 N                 w.r.t. weights, unless they are frozen (LoRA: adapters are too small to count)

Together 6 N + 12 L d T, LLM Foundry's formula; 4 N + 12 L d T with frozen weights.
"""

import math
from dataclasses import dataclass

from llmtrain.errors import UserError


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs per trained token."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def with_recompute(self, fraction: float) -> float:
        """FLOPs the hardware performs when `fraction` of the forward pass runs again in the backward pass (0 to 1)."""
        if not 0 <= fraction <= 1:
            raise UserError(f"the recomputed share of the forward pass lies between 0 and 1, not {fraction}")
        return self.total + fraction * self.forward


def transformer_token_flops(
    params: float, *, n_layers: int = 0, d_attn: int = 0, seq_len: int = 0, frozen: bool = False
) -> TokenFlops:
    """FLOPs per token by the formula above. Without n_layers and d_attn the attention products are left out.

    params: parameters that a token passes through. d_attn: n_heads * head_dim (d_model in most models).
    """
    _require_positive(params=params)
    scores = n_layers * d_attn * seq_len
    weight_gradients = 0 if frozen else 2 * params
    return TokenFlops(forward=2 * params + 4 * scores, backward=2 * params + 8 * scores + weight_gradients)


def mfu(flops_per_token: float, tokens_per_second: float, peak: float, n_devices: int = 1) -> float:
    """Share of the devices' peak that is used, 1.0 being all of it.

    tokens_per_second: over all devices. peak: FLOP/s of one device. HFU is the same with the FLOPs the hardware
    performs. Raises UserError for anything that is not positive and finite.
    """
    _require_positive(
        flops_per_token=flops_per_token, tokens_per_second=tokens_per_second, peak=peak, n_devices=n_devices
    )
    return flops_per_token * tokens_per_second / (peak * n_devices)


def describe_excess(share: float, peak: float, source: str) -> str:
    """The reasons why a utilisation above 1 cannot be right. peak: FLOP/s of one device; source: where it comes from."""
    return (
        f"{share:.1%} is above 100 %, which no device reaches: {peak / 1e12:,.4g} TFLOP/s ({source}) is not the dense peak "
        "of this device in this precision at its present clock, or more FLOPs are counted than are computed"
    )


def tokens_per_second_at(mfu: float, flops_per_token: float, peak: float) -> float:
    """Tokens per second of one device that runs at the given MFU."""
    _require_positive(mfu=mfu, flops_per_token=flops_per_token, peak=peak)
    if mfu > 1:
        raise UserError(f"MFU is a share of the peak, between 0 and 1, not {mfu:g}")
    return mfu * peak / flops_per_token


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name} must be positive and finite, not {value:g}")
