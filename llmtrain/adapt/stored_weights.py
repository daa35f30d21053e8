"""Weights of linear layers in 8 bits, for inference: int8 or float8 (e4m3), with a scale for each row of a weight, of an output.

A code is the weight over its row's scale, rounded to the nearest; the scale maps the row's largest magnitude to the format's. The
storage is our own, as of 4-bit weights (adapt/nf4.py): torchao's tensors have the same form, but round int8's scales to the
activations' dtype, and its extra would have to be installed for inference.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llmtrain.adapt.nf4 import NF4Linear, StoredLinear, linear_layers, store
from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform, float8_format, float8_refusal
from llmtrain.kernels.weight_only import reference
from llmtrain.logs import log
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.parameters import parameter_info
from llmtrain.schema.adapt import WeightFormat

MAX_ROWS = 64
"""Rows of activations beyond which widening the weights is the smaller part of a product."""


class Codes(NamedTuple):
    """codes: [d_out, d_in], int8 or float8. scales: [d_out], fp32. dtype: of the weight that they stand for."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def encoded(weight: Tensor, kind: torch.dtype) -> Codes:
    """weight: [d_out, d_in], finite. kind: torch.int8 or a float8."""
    wide = weight.detach().float()
    largest = 127.0 if kind == torch.int8 else torch.finfo(kind).max
    # The least normal number: the scale of a row of zeros, and of one whose quotient would be subnormal.
    scales = (wide.abs().amax(1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (wide / scales[:, None]).clamp(-largest, largest)  # a float8 cast beyond its largest number is NaN
    return Codes((codes.round() if kind == torch.int8 else codes).to(kind), scales, weight.dtype)


class EightBitLinear(StoredLinear):
    """A linear layer whose weight is `stored` in 8 bits, for inference. few_rows: computes products of up to
    MAX_ROWS rows."""

    stored: Codes
    few_rows: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    @property
    def weight(self) -> Tensor:
        codes, scales, dtype = self.stored
        return (codes.float() * scales[:, None]).to(dtype)

    def multiply(self, x: Tensor) -> Tensor:
        codes, scales, _ = self.stored
        if self.few_rows is not None and x.shape[:-1].numel() <= MAX_ROWS:
            return self.few_rows(x, codes, scales)
        return reference.weight_only_linear(x, codes, scales)


@torch.no_grad()
def store_in_8_bits(model: HybridLM, kind: WeightFormat, platform: Platform) -> None:
    """Replace the weights of linear layers, one after another, on the device where they are. Embedding, head, experts of a mixture,
    routers and what mixers keep in fp32 stay as they are, as do adapters.

    Raises UserError for weights that are already in fewer bits, or not finite.
    """
    if any(isinstance(module, NF4Linear) for module in model.modules()):
        raise UserError(
            f"--weights {kind}: the model's weights are in 4 bits already (adapt.base: nf4); leave --weights out"
        )
    few_rows = None
    if platform.vendor != "cpu" and (kind == "int8" or float8_refusal(platform) is None):
        from llmtrain.kernels.weight_only.triton import weight_only_linear as few_rows
    info, before, after = parameter_info(model), 0, 0
    rest = sum(one.nbytes for one in model.parameters())
    for linear in list(linear_layers(model)):
        weight = linear.weight
        if info[linear.get_parameter("weight")].fp32:
            continue
        if not bool(weight.isfinite().all()):
            raise UserError(f"--weights {kind}: a weight of shape {list(weight.shape)} is not finite")
        stored = encoded(weight, torch.int8 if kind == "int8" else getattr(torch, float8_format(platform)))
        store(linear, EightBitLinear, stored)
        linear.__dict__["few_rows"] = few_rows
        before, after = before + weight.nbytes, after + stored.nbytes
    rest -= before
    mib = 2**20
    log.info(
        f"weights in {kind}: {before / mib:.1f} MiB of linear layers are {after / mib:.1f}; {rest / mib:.1f} MiB of others stay"
    )
