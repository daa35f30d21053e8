"""A model without its adapters, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from llmtrain.adapt.adapters import Adapter, EmbeddingAdapter
from llmtrain.adapt.expert_adapters import ExpertAdapter


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes as the one beneath its adapters, with or without FSDP2; layers are not compiled in it."""
    found = [one for one in model.modules() if isinstance(one, (Adapter, EmbeddingAdapter, ExpertAdapter))]
    units = [one.units for one in found]
    for one in found:
        one.units = [unit._replace(scale=0.0) for unit in one.units]
        if isinstance(one, Adapter):  # DoRA scales rows too
            one.__dict__["forward"] = _unchanged
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for one, kept in zip(found, units, strict=True):
            one.units = kept
            one.__dict__.pop("forward", None)


def _unchanged(x: Tensor, y: Tensor) -> Tensor:
    return y
