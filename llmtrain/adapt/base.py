"""The Converter contract: a change to a model's layers before they are wrapped, compiled and sharded."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from llmtrain.kernels.platform import Platform, cpu
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.adapt import AdaptConfig


class Converter(ABC):
    """A change to a model: layers in another number format, adapters, weights that are frozen (requires_grad).

    Parameters that it adds live beneath the module whose weight they change: `blocks.0.mixer.wo.lora.up.weight` beneath
    `blocks.0.mixer.wo.weight`. They are initialised by their modules' `init_rules`, and decayed, orthogonalised and counted like
    others (models/parameters.py).
    """

    @abstractmethod
    def convert(self, model: HybridLM, platform: Platform) -> None:
        """Change the model in place: on the meta device, after it was divided between tensor-parallel ranks.

        Raises UserError for what it cannot do here.
        """

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """weights: those of one module of the converted model and of what was added beneath it, by name -> those of the model
        without the change that compute the same. On the meta device too."""
        return dict(weights)

    def saved_ops(self) -> set[str]:
        """Operators whose outputs selective checkpointing keeps beside those of the mixers; str() of each."""
        return set()


def adaptations(adapt: AdaptConfig | None) -> list[Converter]:
    """The changes that belong to a model wherever it runs, in order."""
    return [] if adapt is None else [section.load_implementation()(section) for section in adapt.sections()]


def meta_model(config: ModelConfig, adapt: AdaptConfig | None = None) -> HybridLM:
    """The model without memory for its weights. adapt: of the run's config."""
    with torch.device("meta"):
        # A backend changes no count and no name, but one made for a GPU could not be built on this machine.
        return adapted(HybridLM(config.with_backends("reference", lambda block: "reference"), cpu()), adapt)


def adapted(model: HybridLM, adapt: AdaptConfig | None) -> HybridLM:
    """A copy of a model on the meta device with these changes; the model itself where there are none."""
    if adapt is None:
        return model
    model = copy.deepcopy(model)
    for converter in adaptations(adapt):
        converter.convert(model, model.platform)
    return model
