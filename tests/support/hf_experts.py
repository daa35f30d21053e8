"""Random configs of families with experts, and keys of config.json that need not come back equal."""

from __future__ import annotations

import random
from typing import Any

from tests.support import hf_decoders as decoders
from tests.support import hf_hybrids as hybrids
from tests.support import ropes

Options = dict[str, Any]
OTHER = decoders.OTHER | hybrids.OTHER - {"num_experts_per_tok"} | {
    # Of training: not read.
    *("output_router_logits", "n_shared_experts", "decoder_sparse_step", "mlp_only_layers", "expand"),
}  # fmt: skip


def chosen(rng: random.Random, number: str) -> Options:
    """Numbers of experts and of those that a token meets: also one, and all."""
    n = rng.choice([2, 3, 5, 8])
    return {number: n, "num_experts_per_tok": rng.choice([1, min(2, n), n])}


def weighted(rng: random.Random) -> Options:
    return {"router_aux_loss_coef": rng.choice([0.02, 0.3])}


def mixtral(rng: random.Random, i: int) -> Options:
    """With a width of heads: without one the class cannot stretch its positions."""
    keys = decoders.mistral(rng)
    keys["head_dim"] = keys["head_dim"] or keys["hidden_size"] // keys["num_attention_heads"]
    return keys | chosen(rng, "num_local_experts") | weighted(rng) | {"router_jitter_noise": rng.choice([0.0, 0.1])}


def olmoe(rng: random.Random, i: int) -> Options:
    return decoders.olmo2(rng) | chosen(rng, "num_experts") | weighted(rng) | {"norm_topk_prob": rng.random() < 0.5}


def sparse(rng: random.Random, layers: int) -> Options:
    which = [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [rng.randrange(layers)]}]
    return chosen(rng, "num_experts") | weighted(rng) | rng.choice(which) | {
        "moe_intermediate_size": rng.choice([12, 16, 20]),
        "norm_topk_prob": rng.random() < 0.7,
    }  # fmt: skip


def qwen3_moe(rng: random.Random, i: int) -> Options:
    keys = decoders.llama_keys(rng, head_dim=rng.choice([4, 10]), attention_bias=rng.random() < 0.5)
    window = rng.choice([{}, {"use_sliding_window": True, "sliding_window": 5}])
    return keys | window | sparse(rng, keys["num_hidden_layers"])


def qwen3_next(rng: random.Random, i: int) -> Options:
    keys = decoders.llama_keys(rng, head_dim=rng.choice([4, 12]), hidden_act="silu") | decoders.gdn_keys(rng)
    keys["rope_parameters"] |= {"partial_rotary_factor": rng.choice([0.5, 1.0])}
    return keys | sparse(rng, keys["num_hidden_layers"]) | {"shared_expert_intermediate_size": rng.choice([8, 20])}


def granitemoe(rng: random.Random, i: int) -> Options:
    keys = decoders.granite(rng)
    del keys["mlp_bias"]
    return keys | chosen(rng, "num_local_experts") | weighted(rng)


def granitemoehybrid(rng: random.Random, i: int) -> Options:
    return hybrids.granite(rng, i) | chosen(rng, "num_local_experts") | weighted(rng)


def grouped(rng: random.Random, number: str) -> Options:
    """DeepSeek-V3's router, with groups and without."""
    groups, each = rng.choice([(1, 2), (1, 5), (2, 3), (4, 2)])
    kept = rng.randint(1, groups)
    return {
        number: groups * each,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": rng.randint(1, kept * each),
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "moe_intermediate_size": rng.choice([12, 16]),
    }


def dots1(rng: random.Random, i: int) -> Options:
    keys = decoders.llama_keys(rng, head_dim=rng.choice([4, 10]), attention_bias=rng.random() < 0.5)
    windows = decoders.layer_types(rng, keys["num_hidden_layers"])
    first = rng.randrange(keys["num_hidden_layers"])
    return (
        keys
        | windows
        | grouped(rng, "n_routed_experts")
        | {"n_shared_experts": rng.choice([1, 2]), "first_k_dense_replace": first}
    )


def glm4_moe(rng: random.Random, i: int) -> Options:
    keys = decoders.llama_keys(rng, attention_bias=rng.random() < 0.5, use_qk_norm=rng.random() < 0.5)
    keys["rope_parameters"] |= {"partial_rotary_factor": rng.choice([0.5, 1.0])}
    keys["hidden_size"] = keys["num_attention_heads"] * rng.choice([4, 8])
    first = rng.randrange(keys["num_hidden_layers"])
    return keys | grouped(rng, "n_routed_experts") | {
        "n_shared_experts": rng.choice([1, 2]), "first_k_dense_replace": first
    }  # fmt: skip


def kimi_linear(rng: random.Random, i: int) -> Options:
    """Both kinds of layers at least once, and dense ones beside those with experts."""
    kinds = [
        "linear_attention",
        "full_attention",
        *rng.choices(["linear_attention", "full_attention"], k=rng.randint(0, 1)),
    ]
    heads = rng.choice([1, 2, 3])
    return grouped(rng, "num_local_experts") | {
        "hidden_size": rng.choice([16, 24]),
        "intermediate_size": rng.choice([24, 40]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": rng.choice([None, 6]),
        "kv_lora_rank": rng.choice([4, 10]),
        "qk_rope_head_dim": rng.choice([2, 4]),
        "qk_nope_head_dim": rng.choice([4, 6]),
        "v_head_dim": rng.choice([4, 10]),
        "attention_bias": rng.random() < 0.5,
        "linear_num_heads": rng.choice([1, 2, 3]),
        "linear_head_dim": rng.choice([4, 6]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "n_shared_experts": rng.choice([1, 2]),
        "layer_types": rng.sample(kinds, len(kinds)),
        "num_hidden_layers": len(kinds),
        "mlp_layer_types": rng.sample(["dense", "sparse", "sparse"], 3)[: len(kinds)],
        "rms_norm_eps": rng.choice([1e-5, 1e-3]),
        "initializer_range": rng.choice([0.02, 0.05]),
        "max_position_embeddings": 128,
        "pad_token_id": None,
    }


def latent(rng: random.Random) -> Options:
    """DeepSeek's attention. Without a head_dim, which the classes derive."""
    keys = decoders.llama_keys(rng, attention_bias=rng.random() < 0.5, num_key_value_heads=None)
    rope = keys["rope_parameters"]
    if rope["rope_type"] == "yarn" and rope["factor"] > 1 and rng.random() < 0.5:
        rope.pop("attention_factor", None)
        rope |= rng.choice([{"mscale": 0.7, "mscale_all_dim": 0.7}, {"mscale_all_dim": 1.0, "attention_factor": 0.9}])
    first = rng.randrange(keys["num_hidden_layers"])
    return keys | {"n_shared_experts": rng.choice([1, 2]), "first_k_dense_replace": first} | {
        "q_lora_rank": rng.choice([None, 7]),
        "kv_lora_rank": rng.choice([6, 12]),  # even, as nope: DeepSeek-V2's class takes no others
        "qk_nope_head_dim": rng.choice([4, 8]),
        "qk_rope_head_dim": rng.choice([2, 6]),
        "v_head_dim": rng.choice([5, 8, 9]),
    }  # fmt: skip


def deepseek_v3(rng: random.Random, i: int) -> Options:
    return latent(rng) | grouped(rng, "n_routed_experts")


def deepseek_v2(rng: random.Random, i: int) -> Options:
    keys = latent(rng) | grouped(rng, "n_routed_experts") | {"mlp_bias": rng.random() < 0.5}
    del keys["norm_topk_prob"]
    if keys["n_group"] == 1 or rng.random() < 0.3:
        keys |= {"topk_method": "greedy", "n_group": None, "topk_group": None}
    else:
        keys["topk_method"] = "group_limited_greedy"
    return keys


def nemotron_h(rng: random.Random, i: int) -> Options:
    heads = rng.choice([1, 2, 4])
    return grouped(rng, "n_routed_experts") | {
        "hidden_size": heads * rng.choice([8, 16]),
        "hybrid_override_pattern": rng.choice(["ME*E", "MEM*E", "M-*E", "*EME"]),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": rng.choice([4, 8]),
        "mamba_num_heads": 4,
        "mamba_head_dim": 4,
        "n_groups": rng.choice([1, 2]),
        "ssm_state_size": 8,
        "chunk_size": rng.choice([4, 16]),
        "intermediate_size": 24,
        "mlp_hidden_act": rng.choice(["relu2", "gelu"]),
        "moe_shared_expert_intermediate_size": rng.choice([8, 20]),
        "moe_latent_size": rng.choice([None, 8]),
        "max_position_embeddings": 128,
        "pad_token_id": None,
    }  # fmt: skip


def gpt_oss(rng: random.Random, i: int) -> Options:
    """Weights so large that the clamps of the experts' unit are met."""
    biased = rng.random() < 0.5
    keys = decoders.llama_keys(rng, head_dim=rng.choice([4, 10]), attention_bias=biased, hidden_act="silu")
    keys |= decoders.layer_types(rng, keys["num_hidden_layers"]) | {"initializer_range": rng.choice([0.3, 1.0])}
    return keys | chosen(rng, "num_local_experts") | weighted(rng)


def zaya(rng: random.Random, i: int) -> Options:
    kv_heads, layers = rng.choice([1, 2, 3]), rng.randint(1, 4)
    types = rng.choices(["hybrid", "hybrid_sliding"], k=layers)
    drawn = {
        kind: ropes.draw(rng, partial_rotary_factor=rng.choice([0.5, 1.0])) for kind in ("hybrid", "hybrid_sliding")
    }
    ropes_of = {kind: drawn[kind if kind in types else types[0]] for kind in drawn}
    for rope in ropes_of.values():
        rope.pop("truncate", None)
    return decoders.llama_keys(
        rng, num_key_value_heads=kv_heads, num_attention_heads=kv_heads * rng.choice([1, 2, 3])
    ) | {
        "num_hidden_layers": layers,
        "head_dim": rng.choice([4, 8]),
        "layer_types": types,
        "sliding_window": rng.randint(1, 9) if "hybrid_sliding" in types else None,
        "rope_parameters": ropes_of,
        "attention_bias": rng.random() < 0.5,
        "moe_intermediate_size": rng.choice([8, 12]),
        "num_experts": rng.choice([1, 3, 5]),
        "router_hidden_size": rng.choice([6, 10]),
        "cca_time0": rng.choice([1, 2, 3]),
        "cca_time1": rng.choice([1, 2, 3]),
    }


CLASSES = {
    "zaya": (zaya, "Zaya"),
    "deepseek_v2": (deepseek_v2, "DeepseekV2"),
    "deepseek_v3": (deepseek_v3, "DeepseekV3"),
    "glm4_moe": (glm4_moe, "Glm4Moe"),
    "gpt_oss": (gpt_oss, "GptOss"),
    "mixtral": (mixtral, "Mixtral"),
    "olmoe": (olmoe, "Olmoe"),
    "qwen3_moe": (qwen3_moe, "Qwen3Moe"),
    "granitemoe": (granitemoe, "GraniteMoe"),
    "kimi_linear": (kimi_linear, "KimiLinear"),
    "dots1": (dots1, "Dots1"),
    "qwen3_next": (qwen3_next, "Qwen3Next"),
    "granitemoehybrid": (granitemoehybrid, "GraniteMoeHybrid"),
    "nemotron_h": (nemotron_h, "NemotronH"),
}
