"""Low-rank adapters (Hu et al., arXiv:2106.09685) as an example of a Converter: what `adapt.lora` may look like.

`install()` makes `adapt: {lora: {...}}` a section of the YAML, which a package would do by a field of AdaptConfig.
"""

import functools
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, cast

from pydantic import Field
from pydantic.fields import FieldInfo
from torch import Tensor

from llmtrain.adapt.base import Converter
from llmtrain.config.base import PositiveFloat, Width
from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform
from llmtrain.models.costs import Flops
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.init import InitScale, Rule, clean_name, constant, uniform
from llmtrain.models.layers import Linear
from llmtrain.schema.adapt import AdaptationSection, AdaptConfig
from llmtrain.schema.config import Config

DOWN, UP = "lora_down", "lora_up"


class LoraConfig(AdaptationSection):
    """W + alpha / rank * B A beside linear layers, whose W is frozen as everything else."""

    implementation: ClassVar[str] = "tests.support.lora:Lora"

    rank: Width = 4
    alpha: PositiveFloat = 8.0
    targets: list[str] = Field(default=["*.wqkv", "*.in_proj"], min_length=1)
    """Names of linear layers, as patterns."""


class Down(Linear):
    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        bound = 1 / math.sqrt(self.in_features)
        return {"weight": uniform(-bound, bound)}


class Up(Linear):
    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": constant(0.0)}


class Lora(Converter):
    def __init__(self, config: LoraConfig):
        self.config = config
        self.scale = config.alpha / config.rank

    def convert(self, model: HybridLM, platform: Platform) -> None:
        if model.ranks is not None:
            raise UserError("adapt.lora: no adapters of layers that ranks divide; use train.parallel.tensor=1")
        linears = {clean_name(name): one for name, one in model.named_modules() if isinstance(one, Linear)}
        model.requires_grad_(False)
        for pattern in self.config.targets:
            found = [linear for name, linear in linears.items() if fnmatchcase(name, pattern)]
            if not found:
                raise UserError(f"adapt.lora.targets: {pattern} matches no linear layer, such as {next(iter(linears))}")
            for linear in found:
                # A subclass of whatever it is, a layer in float8 too.
                linear.__class__ = _adapted(type(linear))
                adapted = cast("_Adapted", linear)
                adapted.scale = self.scale
                device = linear.weight.device
                adapted.lora_down = Down(linear.in_features, self.config.rank).to(device)
                adapted.lora_up = Up(self.config.rank, linear.out_features, parts=linear.parts).to(device)

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: w for name, w in weights.items() if f".{DOWN}." not in name and f".{UP}." not in name}
        for name, up in weights.items():
            if name.endswith(f".{UP}.weight"):
                module = name.removesuffix(f".{UP}.weight")
                weight, down = found[f"{module}.weight"], weights[f"{module}.{DOWN}.weight"]
                found[f"{module}.weight"] = weight + self.scale * (up @ down)
        return found


@functools.cache
def _adapted(kind: type[Linear]) -> type[Any]:
    return type(f"Adapted{kind.__name__}", (_Adapted, kind), {})


class _Adapted(Linear):
    """The first base of an adapted layer's class."""

    scale: float
    lora_down: Linear
    lora_up: Linear

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scale * self.lora_up(self.lora_down(input))

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return super().flops(seq_len, causal) + self.lora_down.flops(seq_len) + self.lora_up.flops(seq_len)


def install() -> None:
    if "lora" not in AdaptConfig.model_fields:
        AdaptConfig.__pydantic_fields__["lora"] = FieldInfo(annotation=LoraConfig | None, default=None)
        for section in (AdaptConfig, Config):
            section.model_rebuild(force=True)


def uninstall() -> None:
    if AdaptConfig.__pydantic_fields__.pop("lora", None) is not None:
        for section in (AdaptConfig, Config):
            section.model_rebuild(force=True)
