"""Scaling of rotary frequencies, in the names of Hugging Face and in ours."""

from __future__ import annotations

from typing import Any


def llama3_scaling(found: dict[str, Any]) -> dict[str, Any]:
    """Our `position.scaling`, from the names of Hugging Face's rope_scaling."""
    scaling: dict[str, Any] = {"type": "llama3", "factor": float(found.get("factor", 1.0))}
    for key, ours in (("low_freq_factor", "low_freq_factor"), ("high_freq_factor", "high_freq_factor")):
        if key in found:
            scaling[ours] = float(found[key])
    if "original_max_position_embeddings" in found:
        scaling["original_max_seq_len"] = int(found["original_max_position_embeddings"])
    return scaling
