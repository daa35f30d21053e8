"""Correspondence of parameters and published tensors: constructors that the families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from llmtrain.models.config import Mamba2Block, ModelConfig
from llmtrain.models.hf.family import Part, Weight


def same(ours: str, theirs: str, *shape: int, copies: tuple[str, ...] = ()) -> Weight:
    """A parameter that is one published tensor."""
    return Weight(ours, shape, (Part(theirs, shape, copies),))


def linear(ours: str, theirs: dict[str, int], d_in: int, bias: bool = False) -> list[Weight]:
    """A linear layer whose output rows are those of one or more published layers, name -> rows, one after another."""
    rows = sum(theirs.values())
    weight = tuple(Part(f"{name}.weight", (n, d_in)) for name, n in theirs.items())
    made = [Weight(f"{ours}.weight", (rows, d_in), weight)]
    if bias:
        made.append(Weight(f"{ours}.bias", (rows,), tuple(Part(f"{name}.bias", (n,)) for name, n in theirs.items())))
    return made


def embedding(config: ModelConfig, theirs: str, head: str, older: tuple[str, ...] = ()) -> Weight:
    """The token embedding; a tied output layer may be stored as a copy of it. older: its names in older files."""
    tied = (head,) if config.tie_embeddings else ()
    return same("embed.weight", theirs, config.vocab_size, config.d_model, copies=(*older, *tied))


def head(config: ModelConfig, theirs: str) -> list[Weight]:
    """The output layer, when it is not tied."""
    return [] if config.tie_embeddings else [same("head.weight", theirs, config.vocab_size, config.d_model)]


def mamba2_mixer(ours: str, theirs: str, block: Mamba2Block, config: ModelConfig) -> list[Weight]:
    """Weights of a Mamba-2 mixer; names and layout are the same in transformers' Mamba2Mixer and Zamba2MambaMixer."""
    spec = block.spec(config.d_model)
    d_inner = block.expand * config.d_model
    channels = d_inner + 2 * block.n_groups * block.d_state
    conv = (channels, block.d_conv)
    return [
        *linear(
            f"{ours}.in_proj", {f"{theirs}.in_proj": d_inner + channels + spec.n_heads}, config.d_model, block.proj_bias
        ),
        Weight(f"{ours}.conv.weight", conv, (Part(f"{theirs}.conv1d.weight", (channels, 1, block.d_conv)),)),
        *([same(f"{ours}.conv.bias", f"{theirs}.conv1d.bias", channels)] if block.conv_bias else []),
        *(same(f"{ours}.ssm.{name}", f"{theirs}.{name}", spec.n_heads) for name in ("A_log", "D", "dt_bias")),
        same(f"{ours}.norm.weight", f"{theirs}.norm.weight", d_inner),
        *linear(f"{ours}.out_proj", {f"{theirs}.out_proj": config.d_model}, d_inner, block.proj_bias),
    ]


def also_under(weights: Iterable[Weight], prefix: str, others: Iterable[str]) -> list[Weight]:
    """Add copies of the weights under other prefixes: a shared module is stored once per use."""
    others = list(others)

    def with_copies(part: Part) -> Part:
        assert part.name.startswith(prefix), part
        return dataclasses.replace(part, copies=tuple(other + part.name.removeprefix(prefix) for other in others))

    return [dataclasses.replace(weight, parts=tuple(map(with_copies, weight.parts))) for weight in weights]
