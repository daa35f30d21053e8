"""Backends that a model names, compared with what they can serve. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config.base import Problem
from llmtrain.kernels import registry
from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.sections.block import BlockSection
from llmtrain.models.sections.layers import NormConfig


def backend_problems(config: ModelConfig, documents: bool = False) -> Iterator[Problem]:
    """Named backends of blocks and of norms that cannot serve them on any machine. Paths start at the model section.

    documents: as HybridLM's.
    """
    for name, block in config.blocks.items():
        if any(block.width_problems(config.d_model)):
            continue  # reported by themselves; such a block has no kernel
        for path, part in block.parts():
            kernel = part.kernel(config.d_model, documents=documents)
            if kernel and (reason := registry.refusal(kernel.operation, kernel.backend, kernel.spec)):
                yield Problem(f"blocks.{name}.{path}backend", kernel.backend, reason)
    yield from _norm_problems(config)


def _norm_problems(config: ModelConfig) -> Iterator[Problem]:
    """A problem of model.norm is reported once, whichever blocks take it."""

    def refusal(norm: NormConfig, width: int) -> str | None:
        return registry.refusal("norm", norm.backend, norm.spec(width))

    widths = {name: block.input_width(config.d_model) for name, block in config.blocks.items()}
    for name, block in config.blocks.items():
        if block.norm and (reason := refusal(block.norm, widths[name])):
            yield Problem(f"blocks.{name}.norm.backend", block.norm.backend, reason)
    reason, takers = refusal(config.norm, config.d_model), ""
    if reason is None:
        inheriting = [name for name, block in config.blocks.items() if block.norm is None]
        wide = [name for name in inheriting if refusal(config.norm, widths[name])]
        if wide:
            reason = refusal(config.norm, widths[wide[0]])
            one = len(wide) == 1
            takers = (
                f"; {'block' if one else 'blocks'} {', '.join(wide)} {'takes' if one else 'take'} model.norm at "
                f"{widths[wide[0]]} channels, or a norm of {'its' if one else 'their'} own with type, bias and eps"
            )
    if reason:
        yield Problem("norm.backend", config.norm.backend, reason + takers)


def servable(config: ModelConfig, platform: Platform, dtype: str) -> ModelConfig:
    """The same function, to be run but not trained: `auto` for each named backend that this machine does not have, since
    the run that named it may have been on another.
    """

    def backend(part: BlockSection) -> str:
        kernel = part.kernel(config.d_model, dtype)
        if kernel is None or registry.refusal(kernel.operation, kernel.backend, kernel.spec, platform):
            return "auto"
        return kernel.backend

    return config.with_backends("auto", backend)
