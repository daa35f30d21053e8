"""The float8 products of a linear layer with one scale for each tensor, by kernels that read a tensor once.

The same numbers as torchao's `matmul_with_hp_or_float8_args`, to whose rounding and scales this keeps. For the operands of two
products PyTorch's compiler computes a tensor again in several kernels there, of which those that transpose are slow; here one
kernel reads it once (train.float8.casts: triton). The price is that an input is kept for the backward pass, in float8, where it
might be computed again. Importing this file needs torchao.
"""

from typing import Any

import torch
from torch import Tensor
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import CastConfig
from torchao.float8.float8_ops import addmm_float8_unwrapped
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig
from torchao.float8.float8_utils import tensor_to_scale

from llmtrain.adapt.float8_linear import Float8Projection
from llmtrain.kernels.float8_cast.triton import float8_cast, float8_transpose


@torch._dynamo.allow_in_graph
class Float8Product(torch.autograd.Function):
    """input [..., d_in] x weight [d_out, d_in] in bf16, or the weight in float8 as FSDP2 gathers it -> [..., d_out]."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, products: LinearMMConfig, config: Float8LinearConfig
    ) -> Tensor:
        x_rows, x_columns, x_scale = _cast(input, config.cast_config_input)
        ctx.save_for_backward(x_columns, x_scale, weight)
        ctx.products, ctx.config = products, config
        w = _float8_weight(weight, products, config.cast_config_weight)
        fast = products.output.use_fast_accum
        out = addmm_float8_unwrapped(x_rows, x_scale, w._data.t(), w._scale, input.dtype, use_fast_accum=fast)
        return out.reshape(*input.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, x_scale, weight = ctx.saved_tensors
        products, config = ctx.products, ctx.config
        [d_output] = gradients
        d_rows, d_columns, d_scale = _cast(d_output, config.cast_config_grad_output)
        w = _float8_weight(weight, products, config.cast_config_weight)
        w_columns = float8_transpose(w._data, after=d_scale)
        dtype, fast = d_output.dtype, products.grad_input.use_fast_accum
        d_input = addmm_float8_unwrapped(d_rows, d_scale, w_columns.t(), w._scale, dtype, use_fast_accum=fast)
        fast = products.grad_weight.use_fast_accum
        d_weight = addmm_float8_unwrapped(d_columns, d_scale, x_columns.t(), x_scale, dtype, use_fast_accum=fast)
        return d_input.reshape(*d_output.shape[:-1], d_input.shape[-1]), d_weight, None, None


class CastOnceProjection(Float8Projection):
    """A linear layer of these products."""

    def forward(self, input: Tensor) -> Tensor:
        output: Any = Float8Product.apply(input, self.weight, self.linear_mm_config, self.config)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def _cast(x: Tensor, config: CastConfig) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., n] as a matrix of n columns in float8, its transpose, and the scale."""
    assert config.target_dtype is not None
    x = x.reshape(-1, x.shape[-1])
    scale = tensor_to_scale(x, config.target_dtype)
    return *float8_cast(x, scale, config.target_dtype), scale


def _float8_weight(weight: Tensor, products: LinearMMConfig, config: CastConfig) -> Any:
    if isinstance(weight, Float8TrainingTensor):
        return weight
    assert config.target_dtype is not None
    return hp_tensor_to_float8_dynamic(weight, config.target_dtype, products, gemm_input_role=GemmInputRole.WEIGHT)
