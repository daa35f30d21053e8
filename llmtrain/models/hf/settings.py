"""Reading and writing config.json: functions that the families share. No model of transformers is built here."""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from transformers import PreTrainedConfig

from llmtrain.models.config import AttentionBlock, Block, Mamba2Block, ModelConfig
from llmtrain.models.hf.family import OtherLayersError, UnsupportedModelError
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.experts import ExpertsSection
from llmtrain.models.sections.layers import LinearScaling, Llama3Scaling, RotaryPosition, YarnScaling

_NO_TOKEN_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
"""In place of the classes' defaults, about which transformers warns where they lie outside the vocabulary."""
# Keys that the caller adds: the dtype depends on the export, the token ids on the tokenizer.
_CALLERS_KEYS = ("dtype", *_NO_TOKEN_IDS)
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Types of layers in layer_types: attention without and with a window, and a recurrence."""
# hidden_act -> the type of an MLP, gated or of two matrices; the first of several spellings is written.
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
_PLAIN = {"gelu": "gelu", "relu2": "relu2", "xielu": "xielu"}
for _spelling in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"):
    _GATED[_spelling], _PLAIN[_spelling] = "geglu_tanh", "gelu_tanh"


class Refusals:
    """Collector of all features that one side cannot express, so that the user sees all of them at once."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def unless(self, expressed: bool, key: str, found: Any, what_to_do: str) -> None:
        if not expressed:
            self.reasons.append(f"{key} = {as_yaml(found)}: {what_to_do}")

    def check(self, error: type[UnsupportedModelError] = UnsupportedModelError) -> None:
        """Raise the error if there is any reason."""
        if self.reasons:
            raise error(*self.reasons)


def as_yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def parse(kind: type[PreTrainedConfig], published: Mapping[str, Any]) -> Any:
    """Parse config.json by a class of transformers, which renames old spellings and fills in defaults.

    Raises UnsupportedModelError for what the class itself does not accept, and for quantised weights.
    """
    refusals = Refusals()
    for key in ("quantization_config", "per_layer_config"):
        refusals.unless(published.get(key) is None, key, published.get(key), "only plain weights, alike in every layer")
    causal = published.get("is_causal", True)  # no class's own, but transformers 5 makes every mask by it
    refusals.unless(bool(causal), "is_causal", causal, "attention is causal here")
    refusals.check()
    try:
        return kind.from_dict(_NO_TOKEN_IDS | _decode_floats(copy.deepcopy(dict(published))))
    except (StrictDataclassError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
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


def layer_types(config: Any, given: bool, refusals: Refusals, kinds: tuple[str, ...] = (FULL, SLIDING)) -> list[str]:
    """The type of each layer. given: by layer_types, of these kinds; otherwise by the one window of all layers."""
    window = getattr(config, "sliding_window", None)
    if not given:
        types = [FULL if window is None else SLIDING] * config.num_hidden_layers
        found = getattr(config, "layer_types", None)
        refusals.unless(found in (None, types), "layer_types", found, "the class gives all layers one window or none")
        return types
    unknown = sorted(set(config.layer_types) - set(kinds))
    refusals.unless(not unknown, "layer_types", unknown, f"there are {' and '.join(kinds)}")
    refusals.unless(window is not None or SLIDING not in config.layer_types, "sliding_window", None, "a layer needs it")
    refusals.check()
    return list(config.layer_types)


def read_mlp(config: Any, key: str, refusals: Refusals, gated: bool = True) -> str:
    """The type of the MLP. key: of its activation in config.json."""
    types, found = _GATED if gated else _PLAIN, getattr(config, key)
    refusals.unless(found in types, key, found, f"there are {', '.join(types)}")
    return types.get(found, "")


def write_mlp(kind: str, gated: bool) -> str:
    """The name of the activation of an MLP; of one that the class does not have, the name of any that it has."""
    types = _GATED if gated else _PLAIN
    return next((name for name, found in types.items() if found == kind), next(iter(types)))


def read_rotary(
    config: Any, refusals: Refusals, *, partial: bool = False, layer_type: str | None = None
) -> dict[str, Any]:
    """Convert rope_parameters (or rope_theta and rope_scaling, as before transformers 5) to our `position`.

    partial: the class rotates a part of each head where config.json says so. layer_type: whose, where types differ.
    """
    rope = config.rope_parameters
    rope = rope.get(layer_type, rope)
    kind, fraction = rope["rope_type"], rope.get("partial_rotary_factor")
    if rope.get("rope_theta") is None:
        raise UnsupportedModelError("rope_parameters.rope_theta = null: rotary positions need a number")
    refusals.unless(
        partial or fraction in (None, 1), "partial_rotary_factor", fraction, "the class rotates whole heads"
    )
    position: dict[str, Any] = {"type": "rotary", "theta": float(rope["rope_theta"])}
    if partial and fraction not in (None, 1):
        position["fraction"] = float(fraction)
    if kind == "linear":
        position["scaling"] = {"type": "linear", "factor": float(rope["factor"])}
    elif kind == "llama3":
        factors = {name: float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        length = int(rope["original_max_position_embeddings"])
        position["scaling"] = {"type": "llama3", **factors, "original_max_seq_len": length}
    elif kind == "yarn":
        position["scaling"] = _read_yarn(rope, config.max_position_embeddings)
        # Where positions differ by type of layer, the classes look for it beside the types.
        position["scaling"]["truncate"] = bool(config.rope_parameters.get("truncate", True))
    else:
        depends = (
            "; the frequencies of this one depend on the length of the text, so that a token that was read cannot stay"
        )
        instead = "there are default, linear, llama3 and yarn" + depends * (kind in ("dynamic", "longrope"))
        refusals.unless(kind == "default", "rope_scaling.rope_type", kind, instead)
    return position


def _read_yarn(rope: Mapping[str, Any], max_seq_len: int) -> dict[str, Any]:
    original = int(rope["original_max_position_embeddings"])
    factor = float(rope["factor"] or max_seq_len / original)
    made: dict[str, Any] = {"type": "yarn", "factor": factor, "original_max_seq_len": original}
    made |= {key: float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key)}
    amplitude, above, below = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if amplitude is None and above and below:  # DeepSeek's spelling
        amplitude = magnitude(factor, above) / magnitude(factor, below)
    return made if amplitude is None else made | {"attention_factor": float(amplitude)}


def magnitude(factor: float, weight: float) -> float:
    """YaRN's factor of queries and keys for contexts `factor` times as long, by DeepSeek's weight of it."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def class_config(kind: type[PreTrainedConfig], architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json: all attributes of the class, and those of `fields` that it merges into others.

    Raises UnsupportedModelError for what the class itself does not accept.
    """
    try:
        made = parse(kind, fields)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(*(f"model: {reason}" for reason in error.reasons)) from error
    held = {key: value for key, value in made.to_diff_dict().items() if key not in _CALLERS_KEYS}
    if "time_step_limit" not in fields:
        held.pop("time_step_limit", None)  # the classes' default, [0, infinity], is no number in strict JSON
    return {"architectures": [architecture], **fields, **held, "model_type": kind.model_type}


def write_rotary(position: RotaryPosition, *, partial: bool = False, default: float = 1.0) -> dict[str, Any]:
    """Write both spellings: rope_parameters, and rope_theta with rope_scaling for transformers 4 and others.

    Those would silently use the default theta without them. partial: as read_rotary's; default: what the class then rotates.
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
        case YarnScaling() as yarn:
            fields = yarn.model_dump(exclude={"type", "original_max_seq_len"}, exclude_none=True)
            scaling = {"rope_type": "yarn", **fields, "original_max_position_embeddings": yarn.original_max_seq_len}
    fraction = {"partial_rotary_factor": position.fraction} if partial and {position.fraction, default} != {1} else {}
    return {
        "rope_parameters": {"rope_theta": position.theta, **(scaling or {"rope_type": "default"}), **fraction},
        "rope_theta": position.theta,
        "rope_scaling": scaling,
        **fraction,
    }


def write_rotary_by_type(layers: list[AttentionBlock]) -> dict[str, Any]:
    """rope_parameters of full attention and of layers with a window apart, each of the first such layer, or else of any."""
    by_type = {SLIDING if block.sliding_window else FULL: block.position for block in reversed(layers)}
    found = {kind: by_type.get(kind, layers[0].position) for kind in (FULL, SLIDING)}
    written = {kind: write_rotary(position) for kind, position in found.items() if position.type == "rotary"}
    # The older spelling of both is of full attention.
    return written[FULL] | {"rope_parameters": {kind: fields["rope_parameters"] for kind, fields in written.items()}}


def read_inner_width(d_inner: int, d_model: int) -> dict[str, int]:
    """The channels of a scan: by `expand` where they are a multiple of d_model."""
    return {"d_inner": d_inner} if d_inner % d_model else {"expand": d_inner // d_model}


def read_dt_limit(limit: Sequence[float] | None) -> dict[str, Any]:
    """The limits of time steps. softplus is positive, so that (0, inf) limits nothing."""
    low, high = limit or (0.0, math.inf)
    if low <= 0 and math.isinf(high):
        return {}
    return {"dt_limit": (float(low), None if math.isinf(high) else float(high))}


def write_dt_limit(block: Mamba2Block) -> dict[str, Any]:
    """time_step_limit where there is one: without the key the classes have none."""
    low, high = block.dt_limit or (0.0, None)
    return {} if (low, high) == (0, None) else {"time_step_limit": [low, math.inf if high is None else high]}


def inverse(factor: float) -> float:
    """1 / factor, and exactly the divisor that a factor was made of: few decimals are taken before many."""
    rounded = round(1 / factor, 9)
    return rounded if rounded and 1 / rounded == factor else 1 / factor


def quotient(product: float, factor: float) -> float:
    """product / factor; of the numbers that give exactly the product, the one with the fewest digits."""
    found = product / factor
    rounded = (float(f"{found:.{digits}g}") for digits in range(1, 17))
    return next((number for number in rounded if number * factor == product), found)


def used_blocks(config: ModelConfig) -> Iterator[tuple[str, Block]]:
    """Named blocks of the layers, each once, without the shared blocks."""
    for name in dict.fromkeys(layer.block for layer in config.layer_list()):
        yield name, config.blocks[name]


def _refuse_other_layers(
    name: str,
    block: Block,
    kinds: type | tuple[type, ...],
    instead: str,
    architecture: str,
    refusals: Refusals,
    experts: bool = False,
) -> None:
    """Refuse a block of another type than these, and a feed-forward layer that is not dense. experts: or has experts."""
    refusals.unless(isinstance(block, kinds), f"model.blocks.{name}.type", block.type, instead)
    known = (MLPSection, ExpertsSection) if experts else MLPSection
    dense = block.mlp is None or isinstance(block.mlp, known)
    found = block.mlp and block.mlp.type
    refusals.unless(dense, f"model.blocks.{name}.mlp.type", found, f"{architecture} has dense MLPs, such as swiglu")


def layer_blocks(
    config: ModelConfig, architecture: str, kinds: Mapping[str, type], experts: bool = False, shared: bool = False
) -> list[Any]:
    """The block of each layer, all of these kinds, by type. experts: some may have some; shared: or shared blocks beside them.
    Raises OtherLayersError for others."""
    refusals = Refusals()
    for layer in dict.fromkeys(config.layer_list()):
        block, instead = config.blocks[layer.block], f"{architecture} has {' and '.join(kinds)} layers"
        _refuse_other_layers(layer.block, block, tuple(kinds.values()), instead, architecture, refusals, experts)
        own = shared or layer.shared is None
        refusals.unless(own, "model.layers", layer.shared, f"{architecture} has no shared blocks")
    refusals.check(OtherLayersError)
    return [config.blocks[layer.block] for layer in config.layer_list()]


def attention_layers(
    config: ModelConfig, architecture: str, experts: bool = False, positions: Sequence[str] = ("rotary",)
) -> list[AttentionBlock]:
    """The block of each layer, all of them attention with positions of these types and an MLP, or experts where the class has some.

    Raises OtherLayersError for others.
    """
    found, refusals = layer_blocks(config, architecture, {"attention": AttentionBlock}, experts), Refusals()
    for key, block in used_blocks(config):
        refuse_other_wiring(f"model.blocks.{key}", block, architecture, refusals, positions)
    refusals.check(OtherLayersError)
    return found


def refuse_other_wiring(
    key: str, block: Block, architecture: str, refusals: Refusals, positions: Sequence[str] = ("rotary",)
) -> None:
    """Refuse attention with other positions than these, and a layer without an MLP."""
    mlp = block.mlp and block.mlp.type
    for path, part in block.parts():
        if isinstance(part, AttentionBlock):
            has = f"{architecture} has {' or '.join(positions)} ones; set position: {{type: {positions[0]}}}"
            refusals.unless(part.position.type in positions, f"{key}.{path}position", part.position.type, has)
    refusals.unless(mlp is not None, f"{key}.mlp", mlp, f"{architecture} has an MLP in every layer; give one")


def refuse_uneven_scans(config: ModelConfig, architecture: str, refusals: Refusals) -> None:
    """Refuse scans of blocks whose channels are no multiple of d_model."""
    instead = f"{architecture} has a multiple of d_model ({config.d_model}); set expand and d_inner: null"
    for name, block in used_blocks(config):
        if isinstance(block, Mamba2Block):
            inner = block.inner_width(config.d_model)
            refusals.unless(inner % config.d_model == 0, f"model.blocks.{name}.d_inner", inner, instead)
