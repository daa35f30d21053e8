"""Linear layers whose products are in float8 (train.float8), experts too, and the reasons of the others."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from llmtrain.config.base import Problem
from llmtrain.kernels.experts.spec import ExpertsSpec, refuse_float8
from llmtrain.models.feed_forward.experts import Experts
from llmtrain.models.init import clean_name
from llmtrain.models.layers import Linear
from llmtrain.models.sections.float8 import MULTIPLE, Float8Config


@dataclass(frozen=True)
class Float8Product:
    """A linear layer's product. left_out: why it stays in bf16; None where it is in float8."""

    d_in: int
    d_out: int
    left_out: str | None


def float8_products(model: nn.Module, config: Float8Config) -> dict[str, Float8Product]:
    """Every linear layer by the name of its module, in the order of the model; without those beneath another one (adapters)."""
    beneath = {
        inner
        for outer in model.modules()
        if isinstance(outer, Linear)
        for inner in outer.modules()
        if inner is not outer
    }
    return {
        clean_name(name): Float8Product(
            module.in_features, module.out_features, _reason(clean_name(name), module, config)
        )
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module not in beneath
    }


@dataclass(frozen=True)
class ExpertProducts:
    """Both products of a layer's experts: spec, of this rank's. left_out: as of Float8Product."""

    layer: Experts
    left_out: str | None

    @property
    def spec(self) -> ExpertsSpec:
        return self.layer.kernel.spec

    @property
    def matrix(self) -> int:
        """Numbers of an expert's two matrices."""
        return self.spec.d_model * (self.spec.d_in + self.spec.d_ff)


def float8_experts(model: nn.Module, config: Float8Config) -> dict[str, ExpertProducts]:
    """Every layer of experts, by the name of the module of their weights."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            name = clean_name(f"{name}.experts")
            reason = None if config.experts else "train.float8.experts"
            reason = "train.float8.exclude" if excluded(name, config) else reason
            found[name] = ExpertProducts(module, reason or refuse_float8(module.kernel.spec))
    return found


def excluded(name: str, config: Float8Config) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in config.exclude)


def exclude_problems(config: Float8Config, products: Mapping[str, object]) -> Iterator[Problem]:
    """Patterns that match no linear layer and no experts. products: of `float8_products` and `float8_experts`."""
    for i, pattern in enumerate(config.exclude):
        if not any(fnmatchcase(name, pattern) for name in products):
            examples = ", ".join(list(products)[:3])
            yield Problem(
                f"train.float8.exclude.{i}",
                pattern,
                f"matches no linear layer of the model, whose names are such as {examples}; `*` stands for any characters",
            )


def _reason(name: str, linear: Linear, config: Float8Config) -> str | None:
    if not linear.parts:
        return "the head"
    if excluded(name, config):
        return "train.float8.exclude"
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        return f"not a multiple of {MULTIPLE}"
    if not config.small_products and _is_small(linear.in_features, linear.out_features, config.recipe):
        return "small"
    return None


def _is_small(d_in: int, d_out: int, recipe: str) -> bool:
    """Products whose conversion takes as long as what float8 saves, by torchao's measurements on an H100 (the thresholds of its
    `_auto_filter_for_recipe`). Beside them, sums over less than 1024 channels, which memory bounds: low-rank adapters."""
    if recipe == "tensorwise":
        return d_in < 1024 or (d_in <= 4096 and d_out <= 1024)
    return d_in <= 1024 or d_out <= 2048 or (d_in <= 2048 and d_out <= 4096)
