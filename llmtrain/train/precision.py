"""Mixed precision as FSDP2 does it: fp32 master weights, bf16 copies for computation, fp32 reduction.

No autocast: Composer would stack it on top of FSDP2's casts. Composer is told fp32, which switches autocast off.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from llmtrain.models.mixers.mamba2 import SSMParameters

Precision = Literal["fp32", "amp_bf16"]


def compute_dtype(precision: Precision) -> torch.dtype:
    return torch.float32 if precision == "fp32" else torch.bfloat16


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    # A layer's inputs follow from the parameters. Casting them would also cast what a layer is told in fp32, wherever FSDP2
    # finds tensors (in tuples, dicts and dataclasses): rotary tables, ALiBi's slopes, the states of a cache.
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def fp32_modules(model: nn.Module) -> list[nn.Module]:
    """Modules whose parameters stay fp32 under amp_bf16: Mamba-2's A_log, D and dt_bias."""
    return [module for module in model.modules() if isinstance(module, SSMParameters)]
