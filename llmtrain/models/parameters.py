"""Properties of every parameter of a model: whether it is trained, decayed, kept in fp32, and a matrix."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from llmtrain.models.init import clean_name
from llmtrain.models.layer_part import parts_of
from llmtrain.models.layers import Linear


@dataclass(frozen=True)
class ParameterInfo:
    """The one answer that optimizers, counts, memory, averages and checkpoints go by.

    name: as checkpoints have it. trainable: it has a gradient, and state of an optimizer; a converter (adapt/base.py) freezes
    others by requires_grad. decay: weight decay applies unless optimizer.groups says otherwise: to matrices and convolution
    kernels; not to norms, biases and what a layer's part exempts. fp32: it stays so where all others are bf16. matrix_rows: rows of
    the linear maps that stand in it one above another, of q, k and v, say, which an optimizer of matrices takes one by one, in
    each of its matrices where it has three dimensions; empty where it is no such map, as are tables of tokens (the head's too).
    """

    name: str
    trainable: bool
    decay: bool
    fp32: bool
    matrix_rows: tuple[int, ...] = ()


Parameters = Mapping[nn.Parameter, ParameterInfo]


def parameter_info(model: nn.Module, decay_embeddings: bool = True) -> Parameters:
    """Every parameter of a model in its order, shared ones once, on any device and sharded in any way."""
    fp32, exempt = (
        {part.get_parameter(name) for _, part in parts_of(model) for name in getattr(part, declared)}
        for declared in ("fp32_parameters", "no_decay_parameters")
    )
    rows = {
        weight: module.parts
        for module in model.modules()
        if isinstance(module, Linear) and (weight := module._parameters.get("weight")) is not None
    }
    for _, part in parts_of(model):
        rows |= {part.get_parameter(name): of_each for name, of_each in part.matrix_rows().items()}
    found = {}
    for name, parameter in model.named_parameters():
        name = clean_name(name)
        kept = parameter in exempt or (not decay_embeddings and name.startswith(("embed.", "positions.")))
        decay = parameter.ndim >= 2 and not kept
        found[parameter] = ParameterInfo(
            name, parameter.requires_grad, decay, parameter in fp32, tuple(rows.get(parameter, ()))
        )
    return found


def is_trained(module: nn.Module) -> bool:
    """True if a parameter of the module is."""
    return any(parameter.requires_grad for parameter in module.parameters())
