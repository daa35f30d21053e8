"""Our Linear with torchao's float8 products. Importing this file needs torchao."""

import dataclasses
from collections.abc import Collection
from typing import Any

from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from llmtrain.models.init import clean_name
from llmtrain.models.layers import Linear
from llmtrain.models.sections.float8 import Float8Config


class Float8Projection(Float8Linear, Linear):
    """A Linear whose three products (forward, and the gradients of input and weight) are in float8. It keeps the initial
    distribution, the FLOPs and the parts of a Linear."""


def convert_linears(
    model: nn.Module,
    names: Collection[str],
    config: Float8Config,
    all_gather: bool,
    kind: type[Float8Projection] = Float8Projection,
) -> None:
    """Replaces the linear layers of these names by layers of this kind. all_gather: their weights become tensors that FSDP2
    gathers in float8."""
    chosen = {
        id(module): module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and clean_name(name) in names
    }
    parents = [
        (parent, name, chosen[id(child)])
        for parent in model.modules()
        for name, child in parent.named_children()
        if id(child) in chosen
    ]
    recipe = Float8LinearConfig.from_recipe_name(config.recipe)
    recipe = dataclasses.replace(recipe, enable_fsdp_float8_all_gather=all_gather, emulate=config.emulate)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in chosen, config=recipe)
    for parent, name, linear in parents:
        converted: Any = getattr(parent, name)
        converted.__class__ = kind  # torchao's conversion makes no other class than its own
        for name in ("residual", "parts", "names", "whole", "summing"):
            setattr(converted, name, getattr(linear, name))
