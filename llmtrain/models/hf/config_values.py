"""Types and ranges of values in a config.json, for keys that transformers' classes do not check. No torch here."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_MOST, _MOST_LAYERS = 2**53, 10_000
_NUMBERS = {
    "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "factor", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "mamba_headdim", "mamba_expand", "mamba_d_state", "mamba_d_conv",
    "mamba_ngroups", "n_mamba_heads", "attention_head_dim", "time_step_min", "time_step_max", "time_step_floor",
}  # fmt: skip
_NEVER_NULL = {"mamba_headdim", "attention_head_dim"}
_LAYERS = {"num_hidden_layers", "n_layers", "n_layer", "num_layers"}
_SIZES = {"hidden_size", "d_model", "vocab_size", "num_attention_heads", "n_heads", "intermediate_size", "head_dim"}
_LISTS = {"layers_block_type", "layer_types", "hybrid_layer_ids"}
_SECTIONS = {"attn_config", "rope_parameters", "rope_scaling", "ssm_cfg"}


def wrong_values(published: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """A reason for each value, at any depth, that is of another type than its key's, or out of range."""
    for key, value in published.items():
        here = f"{path}.{key}".lstrip(".")
        expected = _expected(key, value)
        if expected is not None:
            yield f"config.json: {here} = {json.dumps(value, default=str)}: expected {expected}"
        elif isinstance(value, Mapping):
            yield from wrong_values(value, here)


def _expected(key: str, value: Any) -> str | None:
    """Expected kind of a value; None where the value is allowed."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if value is None:
        return "a value" if key in _NEVER_NULL else None
    if key in _LISTS and not isinstance(value, (list, tuple)):
        return "a list"
    if key in _SECTIONS and not isinstance(value, Mapping):
        return "a mapping"
    if key in _LAYERS | _SIZES:
        most = _MOST_LAYERS if key in _LAYERS else _MOST
        return None if number is not None and 1 <= number <= most else f"an integer between 1 and {most:,}"
    if number is not None:
        return None if isinstance(number, float) or abs(number) <= _MOST else f"at most {_MOST:,}"
    if key in _NUMBERS and not (isinstance(value, Mapping) and set(value) == {"__float__"}):
        return "a number"
    return None
