"""The Converter contract: a change to a model's layers before they are wrapped, compiled and sharded."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from llmtrain.adapt.nf4 import quantise
from llmtrain.config.report import nearest
from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform, cpu
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.parameters import parameter_info
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

    def begin(self, model: HybridLM) -> None:  # noqa: B027 (most have nothing to set)
        """Set what was added by weights that were loaded beneath it, in a run that begins. Every rank calls it."""

    def finish(self, model: HybridLM, device: torch.device) -> None:  # noqa: B027
        """Change weights that were loaded, after every load, before the first forward pass. device: of the model."""

    def module_of(self, name: str) -> str | None:
        """The module of the model without the change to whose weights a parameter that it added belongs; None: the one above it."""
        return None

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """weights: those of one module of the converted model and of what was added beneath it, by name -> those of the model
        without the change that compute the same. On the meta device too. After `convert`, of that model.

        Raises UserError where there are none.
        """
        return dict(weights)

    def merged_config(self, config: ModelConfig) -> ModelConfig:
        """config: of the model without the change -> of the one whose weights `merged` has. After `convert`."""
        return config

    def saved_ops(self) -> set[str]:
        """Operators whose outputs selective checkpointing keeps beside those of the mixers; str() of each."""
        return set()


def adaptations(adapt: AdaptConfig | None) -> list[Converter]:
    """The changes that belong to a model wherever it runs, in order."""
    if adapt is None:
        return []
    changes: list[Converter] = [section.load_implementation()(section) for section in adapt.sections()]
    if adapt.train is not None:
        changes.append(TrainedWeights(adapt.train, alone=not changes))
    return [*changes, FrozenWeights(adapt.base)]


def converters_of(config: ModelConfig, adapt: AdaptConfig | None) -> list[Converter]:
    """The changes of `adaptations`, after they were made to a model: for `merged`."""
    made, model = adaptations(adapt), meta_model(config)
    for converter in made:
        converter.convert(model, model.platform)
    return made


def meta_model(config: ModelConfig, adapt: AdaptConfig | None = None, dtype: torch.dtype | None = None) -> HybridLM:
    """The model without memory for its weights. adapt: of the run's config. dtype: of activations, default fp32."""
    with torch.device("meta"):
        # A backend changes no count and no name, but one made for a GPU could not be built on this machine.
        return adapted(HybridLM(config.with_backends("reference", lambda block: "reference"), cpu(), dtype), adapt)


class TrainedWeights(Converter):
    """The model's own weights that adapt.train names are trained; alone: no others are."""

    def __init__(self, patterns: Sequence[str], alone: bool):
        self.patterns, self.alone = patterns, alone

    def convert(self, model: HybridLM, platform: Platform) -> None:
        if self.alone:
            model.requires_grad_(False)
        infos, problems = parameter_info(model), list[str]()
        for pattern in self.patterns:
            found = [parameter for parameter, info in infos.items() if fnmatchcase(info.name, pattern)]
            for parameter in found:
                parameter.requires_grad_(True)
            if not found:
                names = [info.name for info in infos.values()]
                parts = {f"*.{part}.*": None for name in names for part in name.split(".")[:-1] if not part.isdigit()}
                near = nearest(pattern, [*parts, *names])
                near = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(parts)}"
                problems.append(f"adapt.train: {pattern} matches no weight; {near}")
        if problems:
            raise UserError("\n".join(problems))


class FrozenWeights(Converter):
    """Frozen weights in the format in which layers compute, which need no more digits than the products read; or those of linear
    layers in 4 bits (adapt/nf4.py)."""

    def __init__(self, base: Literal["bf16", "nf4"]):
        self.base = base

    def finish(self, model: HybridLM, device: torch.device) -> None:
        if self.base == "nf4":
            quantise(model, device)

    def convert(self, model: HybridLM, platform: Platform) -> None:
        for parameter, info in parameter_info(model).items():
            if not info.trainable and not info.fp32:
                parameter.data = parameter.data.to(model.dtype)


def adapted(model: HybridLM, adapt: AdaptConfig | None) -> HybridLM:
    """A copy of a model on the meta device with these changes; the model itself where there are none."""
    if adapt is None:
        return model
    model = copy.deepcopy(model)
    for converter in adaptations(adapt):
        converter.convert(model, model.platform)
    return model
