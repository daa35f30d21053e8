"""Linear layers in float8, by torchao: conversion, and the scales that FSDP2's float8 all-gather needs after each step."""

import importlib.util
from typing import Any

import torch
from torch import nn

from llmtrain.adapt.base import Converter
from llmtrain.errors import UserError
from llmtrain.kernels.experts.float8 import Float8Formats, emulated_experts
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.platform import Platform, float8_refusal
from llmtrain.logs import run_log
from llmtrain.models.float8_products import exclude_problems, float8_experts, float8_products
from llmtrain.models.sections.float8 import Float8Config

SAVED_EXPERTS = "llmtrain.float8_experts_forward.default"


class Float8(Converter):
    """Linear layers and experts that float8_products.py names compute in float8; parameters stay what they are.

    shards: ranks over which FSDP2 will shard a weight's rows. Those it cannot share evenly are gathered in bf16.
    """

    def __init__(self, config: Float8Config, shards: int):
        self.config, self.shards = config, shards

    def convert(self, model: nn.Module, platform: Platform) -> None:
        """Raises UserError where torchao is missing, a pattern matches nothing, or the device has no float8 unit."""
        products, experts = float8_products(model, self.config), float8_experts(model, self.config)
        if problems := list(exclude_problems(self.config, {**products, **experts})):
            raise UserError("\n".join(f"{problem.path} = {problem.found}: {problem.message}" for problem in problems))
        if importlib.util.find_spec("torchao") is None:
            raise UserError("train.float8 needs torchao: pip install 'llmtrain[float8]'")
        if not self.config.emulate and (reason := float8_refusal(platform)):
            raise UserError(f"train.float8: {reason}; use train.float8=null (the run may go on without it)")
        if self.config.casts == "triton" and platform.vendor != "nvidia":
            raise UserError("train.float8.casts = triton: these kernels are for NVIDIA's GPUs; use compiled")

        from llmtrain.adapt.float8_linear import Float8Projection, convert_linears

        kind = Float8Projection
        if casts_by_triton(self.config, platform):
            from llmtrain.adapt.float8_product import CastOnceProjection

            kind = CastOnceProjection

        chosen = {name for name, product in products.items() if product.left_out is None}
        of_experts = [one.layer for one in experts.values() if one.left_out is None]
        for layer in of_experts:
            layer.kernel = experts_kernel(layer.kernel.spec, platform, self.config.recipe, self.config.emulate)
        if chosen or of_experts:
            emulated = ", emulated in bf16" if self.config.emulate else ""
            which = f"{len(chosen)} of {len(products)} linear layers"
            which += f" and {len(of_experts)} of {len(experts)} layers of experts" if experts else ""
            run_log.info(f"float8 ({self.config.recipe}{emulated}): {which}; `llmtrain describe` names the others")
        else:
            why = ", ".join(sorted({one.left_out or "" for one in (*products.values(), *experts.values())}))
            run_log.warning(
                f"train.float8 has no effect: every product stays in bf16 ({why}; `llmtrain describe` names them)"
            )
        evenly = {name for name in chosen if products[name].d_out % self.shards == 0} if self.config.gathers else set()
        for names, all_gather in ((chosen - evenly, False), (evenly, True)):
            if names:
                convert_linears(model, names, self.config, all_gather, kind)

    def saved_ops(self) -> set[str]:
        """The largest magnitudes, of which scales are made: a number for a tensor or a row, and a pass over all of it to find."""
        return {"aten.max.default", "aten.amax.default"} | ({SAVED_EXPERTS} if self.config.experts else set())


def experts_kernel(spec: ExpertsSpec, platform: Platform, recipe: str, emulate: bool) -> Any:
    """Experts in float8, with the signature of ReferenceExperts."""
    if emulate:
        return emulated_experts(spec, recipe)
    from llmtrain.kernels.experts.triton_float8 import TritonFloat8Experts

    return TritonFloat8Experts(spec, Float8Formats.of(recipe, platform))


def casts_by_triton(config: Float8Config, platform: Platform) -> bool:
    """True where our kernels round to float8: by name, and with `auto` on the architecture on which they were measured."""
    served = config.recipe == "tensorwise" and not config.emulate and platform.arch == "sm90"
    return config.casts == "triton" or (config.casts == "auto" and served)


def compute_scales_after_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Has each step of the optimizer followed by the scales of all weights that are gathered in float8: one all-reduce, where each
    gather would make one of its own."""
    optimizer.register_step_post_hook(lambda *_: compute_scales(model))


def compute_scales(model: nn.Module) -> None:
    """The scales of all weights that are gathered in float8, as they are now."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
