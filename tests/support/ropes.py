"""Random rotary positions of config.json, scaled in every way that is read."""

import random
from typing import Any


def draw(rng: random.Random, **further: Any) -> dict[str, Any]:
    """rope_parameters; the short contexts before the extension let the texts of tests reach past them."""
    scaling: dict[str, Any] = rng.choice(
        [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": 1.5},
            {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 16,
            },
            {"rope_type": "yarn", "factor": rng.choice([1.0, 4.0]), "original_max_position_embeddings": 16} | yarn(rng),
        ]
    )
    return {"rope_theta": rng.choice([10.0, 100.0, 10_000.0]), **scaling, **further}


def draw_by_type(rng: random.Random) -> dict[str, dict[str, Any]]:
    """rope_parameters of classes where they differ by type of layer. Those pass over `truncate`."""
    drawn = {kind: draw(rng) for kind in ("full_attention", "sliding_attention")}
    return {kind: {key: rope[key] for key in rope if key != "truncate"} for kind, rope in drawn.items()}


def yarn(rng: random.Random) -> dict[str, Any]:
    """Options of YaRN, each of them absent at times."""
    amplitude = rng.choice([{}, {"attention_factor": 0.7}, {"attention_factor": 1.3}])
    ramp = rng.choice(
        [{}, {"beta_fast": 4.0}, {"beta_fast": 2.0, "beta_slow": 0.5}, {"beta_fast": 1.0, "beta_slow": 1.0}]
    )
    return amplitude | ramp | rng.choice([{}, {"truncate": False}])
