"""Mixed precision as FSDP2 does it: fp32 master weights, bf16 copies for computation, fp32 reduction.

No autocast: Composer would stack it on top of FSDP2's casts. Composer gets fp32, which switches autocast off.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from llmtrain.models.mixers.base import fp32_parameters

Precision = Literal["fp32", "amp_bf16"]


def compute_dtype(precision: Precision) -> torch.dtype:
    return torch.float32 if precision == "fp32" else torch.bfloat16


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    # A layer's inputs follow from the parameters. Casting them would also cast what a layer gets in fp32, wherever FSDP2
    # finds tensors (in tuples, dicts and dataclasses): rotary tables, ALiBi's slopes, the states of a cache.
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def fp32_modules(model: nn.Module) -> list[nn.Module]:
    """Modules whose parameters stay fp32 under amp_bf16, by what the mixers declare (such as Mamba-2's A_log)."""
    names = fp32_parameters(model)
    modules = [model.get_submodule(path) for path in dict.fromkeys(name.rpartition(".")[0] for name in names)]
    for module in modules:
        others = {id(p) for p in module.parameters()} - {id(p) for p in names.values()}
        assert not others, (
            f"{type(module).__name__} holds fp32 parameters beside others; they need a module of their own"
        )
    return modules
