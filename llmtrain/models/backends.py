"""Backends that a model names, compared with what they can serve. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.config.base import Problem
from llmtrain.kernels import registry
from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.sections.block import Kernel, WithBackend
from llmtrain.models.sections.layers import NormConfig

if TYPE_CHECKING:
    from llmtrain.kernels.attention.measured import Choice


def backend_problems(config: ModelConfig, dtype: str = "bfloat16", documents: bool = False) -> Iterator[Problem]:
    """Named backends of blocks and of norms that cannot serve them on any machine. Paths start at the model section.

    dtype, documents: as HybridLM's.
    """
    for name, block in config.blocks.items():
        if any(block.width_problems(config.d_model)):
            continue  # reported by themselves; such a block has no kernel
        kernels = [(path, part.kernel(config.d_model, dtype, documents)) for path, part in block.parts()]
        kernels += [("mlp.", block.mlp.kernel(config.d_model, dtype))] if block.mlp else []
        for path, kernel in kernels:
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

    def backend(part: WithBackend) -> str:
        kernel = part.kernel(config.d_model, dtype)
        if kernel is None or registry.refusal(kernel.operation, kernel.backend, kernel.spec, platform):
            return "auto"
        return kernel.backend

    return config.with_backends("auto", backend)


class Chosen(NamedTuple):
    """A kernel of a model as it is built on a platform. block: name, and the path of the part within it, or `model`.

    backend: None where none can serve, for the reason `refusal`. rows: the times that the choice rests on, its own first; empty
    where there are none, or the backend is named in the config.
    """

    block: str
    kernel: Kernel
    backend: str | None
    rows: list[Choice]
    refusal: str | None = None


def chosen(config: ModelConfig, platform: Platform, dtype: str, documents: bool = False) -> Iterator[Chosen]:
    """Every kernel of every block, in the config's order, as HybridLM(config, platform, dtype, documents) chooses them."""
    yield from _chosen_norm("model", config.norm, config.d_model, platform, dtype)
    for name, block in config.blocks.items():
        if block.norm or block.input_width(config.d_model) != config.d_model:
            norm, width = block.norm or config.norm, block.input_width(config.d_model)
            yield from _chosen_norm(name, norm, width, platform, dtype)
        for path, part in block.parts():
            where = f"{name}.{path}".rstrip(".")
            for number, kernel in enumerate(part.kernels(config.d_model, block.norm or config.norm, dtype, documents)):
                yield _chosen(where, kernel, platform, config.max_seq_len, beside=number > 0)
        if block.mlp and (kernel := block.mlp.kernel(config.d_model, dtype)):
            yield _chosen(f"{name}.mlp", kernel, platform, None, beside=False)


def _chosen_norm(where: str, norm: NormConfig, width: int, platform: Platform, dtype: str) -> Iterator[Chosen]:
    yield _chosen(where, Kernel("norm", norm.spec(width, dtype), norm.backend), platform, None, beside=False)


def _chosen(where: str, kernel: Kernel, platform: Platform, seq_len: int | None, beside: bool) -> Chosen:
    operation, spec, name = kernel
    if operation == "attention" and seq_len is not None:
        spec = spec.within(seq_len)  # as the mixer does
    if beside:
        return Chosen(where, kernel, registry.resolve_beside(operation, name, spec, platform).name, [])
    if reason := registry.refusal(operation, name, spec, platform):
        return Chosen(where, kernel, None, [], reason)
    rows = registry.measured(operation, name, spec, platform, seq_len)
    return Chosen(where, kernel, registry.resolve(operation, name, spec, platform, seq_len).name, rows)
