"""Comparison of a model of ours with what a class of transformers computes, by settings, so that export loses nothing."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from llmtrain.models.config import Block, ModelConfig
from llmtrain.models.hf.family import Family, UnsupportedModelError
from llmtrain.models.hf.settings import Refusals, as_yaml

# Settings of the model that have no part in its function, or whose part is in the blocks. The length of learned positions,
# which no family has, goes with model.positions.
_NO_FUNCTION = {"blocks", "layers", "max_seq_len", "dropout", "init"}


def refuse_differences(ours: ModelConfig, family: Family, written: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError with every setting in which what was written differs from our model.

    written: the content of config.json, with as many layers as ours.
    """
    architecture = family.architecture
    try:
        read_back = family.read_config(written)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(*(f"model: of {architecture}, {reason}" for reason in error.reasons)) from error
    theirs = ModelConfig.model_validate(read_back)
    refusals = Refusals()
    fields = [dict(_model_function(config)) for config in (ours, theirs)]
    found = dict(_differences("model", *fields))
    for layer, other in zip(ours.layer_list(), theirs.layer_list(), strict=True):
        for name, their_name in ((layer.block, other.block), (layer.shared, other.shared)):
            path = "model.layers" if name is None or their_name is None else f"model.blocks.{name}"
            block, their_block = ours.blocks.get(name or ""), theirs.blocks.get(their_name or "")
            differing = _differences(path, _function(block, ours), _function(their_block, theirs))
            own_norm = block is not None and block.norm is not None
            of_norm = f"{path}.norm."
            found |= {at if own_norm else at.replace(of_norm, "model.norm."): pair for at, pair in differing}
    for path, (value, needed) in found.items():
        instead = f"{architecture} has {as_yaml(needed)}; set {path.rpartition('.')[2]}: {as_yaml(needed)}"
        refusals.unless(False, path, value, instead)
    refusals.check()


def _model_function(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    yield from config.model_dump(exclude=_NO_FUNCTION | {"norm"}).items()
    yield "norm", config.norm.model_dump(exclude={"backend", "place"})


def _function(block: Block | None, config: ModelConfig) -> dict[str, Any] | None:
    return block and {"type": block.type} | block.function(config.d_model, config.norm)


def _differences(path: str, ours: Any, theirs: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(dotted path, (our value, theirs)) of each setting that differs; of sections of another type, the type alone."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        alike = ours.get("type") == theirs.get("type") or ours.keys() == theirs.keys()
        for key in ours if alike else ("type",):
            yield from _differences(f"{path}.{key}", ours[key], theirs[key])
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not math.isclose(ours, theirs, rel_tol=1e-12):
            yield path, (ours, theirs)
    elif ours != theirs:
        found, needed = (value.get("type", value) if isinstance(value, Mapping) else value for value in (ours, theirs))
        yield path, (found, needed)
