"""Random configs of hybrids of attention and Mamba-2, and keys of config.json that need not come back equal."""

import random
from typing import Any

from tests.support import ropes

Options = dict[str, Any]
# Keys of config.json that need not come back equal: of training, older spellings, and what a class derives or passes over.
OTHER = frozenset(
    {
        *("attention_dropout", "num_logits_to_keep", "rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim"),
        *("mamba_expand", "intermediate_size", "num_experts_per_tok"),
    }
)


def common(rng: random.Random, i: int) -> Options:
    """Keys that all these classes have. Without limits of time steps in every third case: decoding there forgets about them."""
    heads = rng.choice([1, 2, 4])
    limits = [None, [0.05, 2.0], [0.01, float("inf")]]
    return {
        "hidden_size": heads * rng.choice([8, 16]),
        "intermediate_size": rng.choice([24, 40]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "attention_bias": rng.random() < 0.5,
        "mamba_n_groups": rng.choice([1, 2]),
        "mamba_d_state": rng.choice([3, 8]),
        "mamba_d_conv": rng.choice([2, 4]),
        "mamba_chunk_size": rng.choice([4, 16]),
        "mamba_conv_bias": rng.random() < 0.5,
        "mamba_proj_bias": rng.random() < 0.5,
        "rms_norm_eps": rng.choice([1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "max_position_embeddings": 128,
        "initializer_range": rng.choice([0.02, 0.05]),
        "rope_parameters": ropes.draw(rng),
        "pad_token_id": None,  # the class learns nothing about that token
        **({"time_step_limit": limit} if i % 3 != 1 and (limit := rng.choice(limits)) else {}),
    }


def layers(rng: random.Random) -> list[str]:
    """Both kinds at least once."""
    kinds = ["mamba", "attention"]
    return rng.sample(more := [*kinds, *rng.choices(kinds, k=rng.randint(0, 2))], len(more))


def scan(rng: random.Random, keys: Options) -> Options:
    """Heads that are together `expand` times as wide as the stream."""
    expand, head_dim = rng.choice([1, 2, 3]), rng.choice([4, 2])
    heads = expand * keys["hidden_size"] // head_dim
    return {"mamba_expand": expand, "mamba_d_head": head_dim, "mamba_n_heads": heads}


def bamba(rng: random.Random, i: int) -> Options:
    keys, types = common(rng, i), layers(rng)
    part = rng.choice([{}, {"partial_rotary_factor": 1.0}])
    where = {"attn_layer_indices": [n for n, kind in enumerate(types) if kind == "attention"]}
    return keys | scan(rng, keys) | where | {
        "num_hidden_layers": len(types),
        "mlp_bias": rng.random() < 0.5,
        "rope_parameters": keys["rope_parameters"] | part,
    }  # fmt: skip


def granite(rng: random.Random, i: int) -> Options:
    keys, types = common(rng, i), layers(rng)
    factors = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    return keys | scan(rng, keys) | {name: rng.choice([0.22, 1.5, 6.0]) for name in factors} | {
        "num_hidden_layers": len(types),
        "layer_types": types,
        "num_local_experts": 0,
        "shared_intermediate_size": rng.choice([24, 40]),
        **rng.choice([{"position_embedding_type": "rope"}, {"position_embedding_type": "nope", "rope_parameters": None}]),
    }  # fmt: skip


def falcon(rng: random.Random, i: int) -> Options:
    keys, groups = common(rng, i), rng.choice([1, 2])
    heads, head_dim, norm = groups * rng.choice([1, 3]), rng.choice([4, 8]), rng.random() < 0.5
    single = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return keys | {f"{name}_multiplier": rng.choice([0.3, 0.7071067811865476, 1.5]) for name in single} | {
        "num_hidden_layers": rng.randint(1, 3),
        "head_dim": rng.choice([4, 10]),
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_ssm": heads * head_dim,
        "mamba_rms_norm": norm,
        "mamba_norm_before_gate": norm and rng.random() < 0.5,
        "projectors_bias": keys["mamba_proj_bias"],
        "mlp_bias": rng.random() < 0.5,
        "mlp_multipliers": [rng.choice([0.4, 1.7]) for _ in range(2)],
        "ssm_multipliers": [rng.choice([0.4, 1.0, 1.7]) for _ in range(5)],
    }  # fmt: skip


CLASSES = {
    "bamba": (bamba, "Bamba"),
    "granitemoehybrid": (granite, "GraniteMoeHybrid"),
    "falcon_h1": (falcon, "FalconH1"),
}
