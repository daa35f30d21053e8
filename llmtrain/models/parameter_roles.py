"""Roles of parameters for an optimizer: matrices that are linear maps, and what weight decay applies to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn

from llmtrain.models.init import clean_name
from llmtrain.models.layer_part import no_decay_parameters
from llmtrain.models.layers import Linear

Matrices = Mapping[nn.Parameter, tuple[int, ...]]
"""Weights of linear layers, with the rows of the maps that stand in each one above another: of q, k and v, say."""


def matrices(model: nn.Module) -> Matrices:
    """All weights of linear layers, except those that are tables of tokens (the head's): see Linear.parts."""
    linears = (module for module in model.modules() if isinstance(module, Linear))
    return {cast("nn.Parameter", linear.weight): linear.parts for linear in linears if linear.parts}


def decayed_parameters(model: nn.Module, embeddings: bool = True) -> dict[str, bool]:
    """Every parameter's name, and whether weight decay applies: to matrices and convolution kernels yes; to norms, biases and
    what layers exempt no. embeddings: decay embeddings too."""
    exempt = no_decay_parameters(model)
    found = {}
    for name, parameter in model.named_parameters():
        kept = not embeddings and name.startswith(("embed.", "positions."))
        found[clean_name(name)] = parameter.ndim >= 2 and name not in exempt and not kept
    return found
