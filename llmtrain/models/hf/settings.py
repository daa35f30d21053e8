"""Reading and writing config.json: functions that the families share. No model of transformers is built here."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from transformers import PreTrainedConfig

from llmtrain.models.config import AttentionBlock, Block, Mamba2Block, ModelConfig, SharedAttentionBlock
from llmtrain.models.hf.family import OtherLayersError, UnsupportedModelError
from llmtrain.models.sections.layers import LinearScaling, Llama3Scaling, RotaryPosition

AnyBlock = TypeVar("AnyBlock", AttentionBlock, Mamba2Block, SharedAttentionBlock)

# Keys that the caller adds: the dtype depends on the export, the token ids on the tokenizer.
_CALLERS_KEYS = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id")
# Fields of blocks by which two blocks may differ and still compute the same function.
_NO_FUNCTION = ("backend", "chunk_size", "dt_min", "dt_max", "a_init_range")


class Refusals:
    """Collector of all features that one side cannot express, so that the user sees all of them at once."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def unless(self, expressed: bool, key: str, found: Any, what_to_do: str) -> None:
        if not expressed:
            self.reasons.append(f"{key} = {_as_yaml(found)}: {what_to_do}")

    def check(self, error: type[UnsupportedModelError] = UnsupportedModelError) -> None:
        """Raise the error if there is any reason."""
        if self.reasons:
            raise error(*self.reasons)


def _as_yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def parse(kind: type[PreTrainedConfig], published: Mapping[str, Any]) -> Any:
    """Parse config.json by a class of transformers, which renames old spellings and fills in defaults.

    Raises UnsupportedModelError for what the class itself does not accept, and for quantised weights.
    """
    refusals = Refusals()
    for key in ("quantization_config", "per_layer_config"):
        refusals.unless(published.get(key) is None, key, published.get(key), "only plain weights, alike in every layer")
    refusals.check()
    try:
        return kind.from_dict(_decode_floats(copy.deepcopy(dict(published))))
    except (StrictDataclassError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        text = " ".join(str(error).split())
        reason = f"transformers' {kind.__name__} does not accept this config.json: {text}"
        raise UnsupportedModelError(reason) from error


def _decode_floats(value: Any) -> Any:
    """Replace {"__float__": "Infinity"}, which transformers 5 writes, by the float; older files have the bare word."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _decode_floats(item) for key, item in value.items()}
    return [_decode_floats(item) for item in value] if isinstance(value, (list, tuple)) else value


def validate_section(section: dict[str, Any]) -> dict[str, Any]:
    """Return `section` if it is a valid `model` section. Raises UnsupportedModelError otherwise."""
    try:
        ModelConfig.model_validate(section)
    except ValidationError as error:
        reasons = [f"model.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UnsupportedModelError(*(f"config.json gives {reason}" for reason in reasons)) from error
    return section


def read_init(initializer_range: float) -> dict[str, Any]:
    """The `init` setting, for fresh weights; none for the 0 that some configs have."""
    return {"init": {"std": float(initializer_range)}} if initializer_range > 0 else {}


def read_dt_range(config: Any) -> dict[str, float]:
    """Range of the initial time steps, log-uniform between two limits, which are raised to the floor."""
    low, high = sorted(max(t, config.time_step_floor) for t in (config.time_step_min, config.time_step_max))
    return {"dt_min": float(low), "dt_max": float(high)} if low > 0 else {}


def read_rotary(config: Any, refusals: Refusals) -> dict[str, Any]:
    """Convert rope_parameters (or rope_theta and rope_scaling, as before transformers 5) to our `position`."""
    rope = config.rope_parameters
    kind, fraction = rope["rope_type"], rope.get("partial_rotary_factor")
    refusals.unless(fraction in (None, 1), "partial_rotary_factor", fraction, "rotary positions turn whole heads here")
    position: dict[str, Any] = {"type": "rotary", "theta": float(rope["rope_theta"])}
    if kind == "linear":
        position["scaling"] = {"type": "linear", "factor": float(rope["factor"])}
    elif kind == "llama3":
        factors = {name: float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        length = int(rope["original_max_position_embeddings"])
        position["scaling"] = {"type": "llama3", **factors, "original_max_seq_len": length}
    else:
        refusals.unless(kind == "default", "rope_scaling.rope_type", kind, "there are default, linear and llama3")
    return position


def class_config(kind: type[PreTrainedConfig], architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json: all attributes of the class, and those of `fields` that it merges into others.

    Raises UnsupportedModelError for what the class itself does not accept.
    """
    held = {key: value for key, value in parse(kind, fields).to_diff_dict().items() if key not in _CALLERS_KEYS}
    return {"architectures": [architecture], **fields, **held, "model_type": kind.model_type}


def write_rotary(position: RotaryPosition) -> dict[str, Any]:
    """Write both spellings: rope_parameters, and rope_theta with rope_scaling for transformers 4 and others.

    Those would silently use the default theta without them.
    """
    match position.scaling:
        case None:
            scaling = None
        case LinearScaling(factor=factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as llama3:
            fields = llama3.model_dump(exclude={"type", "original_max_seq_len"})
            length = llama3.original_max_seq_len
            scaling = {"rope_type": "llama3", **fields, "original_max_position_embeddings": length}
    return {
        "rope_parameters": {"rope_theta": position.theta, **(scaling or {"rope_type": "default"})},
        "rope_theta": position.theta,
        "rope_scaling": scaling,
    }


def used_blocks(config: ModelConfig) -> Iterator[tuple[str, Block]]:
    """Named blocks of the layers, each once, without the shared blocks."""
    for name in dict.fromkeys(layer.block for layer in config.layer_list()):
        yield name, config.blocks[name]


def only_block(
    config: ModelConfig, kind: type[AnyBlock], architecture: str, refusals: Refusals
) -> tuple[str, AnyBlock]:
    """The single block of all layers, and its dotted key.

    Raises OtherLayersError for a block of another type; collects a reason when blocks differ.
    """
    found = list(used_blocks(config))
    type_name = kind.model_fields["type"].annotation.__args__[0]  # type: ignore[union-attr]
    for name, block in found:
        instead = f"{architecture} has {type_name} layers"
        refusals.unless(isinstance(block, kind), f"model.blocks.{name}.type", block.type, instead)
    refusals.check(OtherLayersError)
    (first, block), *others = found
    for name, other in others:
        differing = [
            field
            for field in kind.model_fields
            if field not in _NO_FUNCTION and _resolved(block, field, config) != _resolved(other, field, config)
        ]
        unlike, instead = ", ".join(differing), f"{architecture} has one kind of layer; make them equal"
        refusals.unless(not differing, f"model.blocks.{name}", f"unlike {first} in {unlike}", instead)
    assert isinstance(block, kind)
    return f"model.blocks.{first}", block


def _resolved(block: Block, field: str, config: ModelConfig) -> Any:
    return (block.norm or config.norm).function if field == "norm" else getattr(block, field)


def refuse_model_features(config: ModelConfig, architecture: str, norm: str, refusals: Refusals) -> None:
    """Refuse features that no published class has, and a final norm that is not `norm` without bias.

    Learned positions are refused by the caller, with what to set instead.
    """
    unless, softcap, found = refusals.unless, config.logit_softcap, config.norm
    unless(softcap is None, "model.logit_softcap", softcap, f"{architecture} has none; set logit_softcap: null")
    unless(found.type == norm, "model.norm.type", found.type, f"{architecture} has {norm}; set type: {norm}")
    unless(not found.bias, "model.norm.bias", found.bias, f"{architecture} has no bias there; set bias: false")


def refuse_own_norm(key: str, block: Block, config: ModelConfig, architecture: str, refusals: Refusals) -> None:
    """Refuse a block with a norm of its own: the published classes have one norm setting."""
    same = _resolved(block, "norm", config) == config.norm.function
    refusals.unless(same, f"{key}.norm", "another than model.norm", f"{architecture} has one for all; set norm: null")


def refuse_attention_features(
    key: str, block: AttentionBlock | SharedAttentionBlock, architecture: str, refusals: Refusals
) -> None:
    """Refuse features that no published attention layer has."""
    for field, plain in (("qk_norm", "none"), ("sliding_window", None), ("softcap", None)):
        found, instead = getattr(block, field), f"{architecture} has none; set {field}: {_as_yaml(plain)}"
        refusals.unless(found == plain, f"{key}.{field}", found, instead)


def refuse_mamba2_features(
    config: ModelConfig, key: str, block: Mamba2Block, architecture: str, refusals: Refusals
) -> None:
    """Refuse features that no published Mamba-2 layer has."""
    unless = refusals.unless
    positions = config.positions
    unless(positions == "none", "model.positions", positions, f"{architecture} has none; set positions: none")
    unless(block.mlp is None, f"{key}.mlp", block.mlp and block.mlp.type, f"{architecture} has none; set mlp: null")
    instead = f"{architecture} gates first; set norm_before_gate: false"
    unless(not block.norm_before_gate, f"{key}.norm_before_gate", block.norm_before_gate, instead)
    refuse_own_norm(key, block, config, architecture, refusals)
