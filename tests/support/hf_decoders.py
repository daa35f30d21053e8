"""Random configs of families of attention, some with Gated DeltaNet, and keys of config.json that need not come back equal."""

import random
from typing import Any

from tests.support import ropes

Options = dict[str, Any]
# Keys of config.json that need not come back equal: of training, older spellings, and the default of what a class may have.
OTHER = frozenset(
    {
        *("attention_dropout", "classifier_dropout", "resid_pdrop", "embd_pdrop"),
        *(
            "rope_theta",
            "rope_scaling",
            "partial_rotary_factor",
            "max_window_layers",
            "head_dim",
            "rope_local_base_freq",
        ),
        # Where there are no experts; A's initial range, which here begins above 0.
        *("num_experts", "decoder_sparse_step", "mlp_only_layers", "linear_a_log_min"),
        "residual_dropout",
    }
)


def llama_keys(rng: random.Random, **further: Any) -> Options:
    """Keys that all these classes have, with odd sizes and grouped heads."""
    heads = rng.choice([1, 2, 3, 4, 6])
    return {
        "hidden_size": heads * rng.choice([4, 6, 8]),
        "intermediate_size": rng.choice([24, 40, 52]),
        "num_hidden_layers": rng.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "rope_parameters": ropes.draw(rng),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "max_position_embeddings": 128,
        "initializer_range": rng.choice([0.02, 0.05]),
        "hidden_act": rng.choice(["silu", "silu", "gelu", "gelu_pytorch_tanh"]),
        "pad_token_id": None,  # the class learns nothing about that token
        **further,
    }


def layer_types(rng: random.Random, layers: int) -> Options:
    """Windows shorter than the texts in some layers, in all or in none."""
    types = rng.choices(["full_attention", "sliding_attention"], k=layers)
    return {"layer_types": types} | ({"sliding_window": rng.randint(1, 9)} if "sliding_attention" in types else {})


def with_ropes_by_type(rng: random.Random, keys: Options) -> Options:
    """Positions of each type of layer; of a type that no layer has, the others', as an export has no better ones."""
    drawn, types = ropes.draw_by_type(rng), keys["layer_types"]
    return keys | {"rope_parameters": {kind: drawn[kind if kind in types else types[0]] for kind in drawn}}


def mistral(rng: random.Random) -> Options:
    return llama_keys(rng, head_dim=rng.choice([None, 4, 10]), sliding_window=rng.choice([None, 1, 5]))


def qwen2(rng: random.Random) -> Options:
    keys = llama_keys(rng)
    layers = keys["num_hidden_layers"]
    windows = layer_types(rng, layers)
    windows |= {"use_sliding_window": "sliding_window" in windows}
    above = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": rng.randrange(layers)}
    return keys | rng.choice([{}, windows, above])


def qwen3(rng: random.Random) -> Options:
    return qwen2(rng) | {"head_dim": rng.choice([4, 10]), "attention_bias": rng.random() < 0.5}


def olmo2(rng: random.Random) -> Options:
    # Weights so large that the gradients of norms of small numbers do not drown in rounding.
    return llama_keys(rng, attention_bias=rng.random() < 0.5, initializer_range=rng.choice([0.3, 0.25]))


def olmo3(rng: random.Random) -> Options:
    keys = olmo2(rng)
    return with_ropes_by_type(rng, keys | layer_types(rng, keys["num_hidden_layers"]))


def phi3(rng: random.Random) -> Options:
    heads, partial = rng.choice([2, 4]), rng.choice([1.0, 0.75, 0.5])
    turned = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": partial}
    window = rng.choice([None, 4])
    keys = llama_keys(rng, num_attention_heads=heads, num_key_value_heads=rng.choice([1, heads]), hidden_size=8 * heads)
    return keys | {"rope_parameters": turned, "sliding_window": window}


def granite(rng: random.Random) -> Options:
    factors = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    multipliers = {name: rng.choice([0.22, 1.5, 6.0]) for name in factors}
    return llama_keys(rng, attention_bias=rng.random() < 0.5, mlp_bias=rng.random() < 0.5, **multipliers)


def gpt_neox(rng: random.Random) -> Options:
    heads = rng.choice([1, 2, 3, 4])
    return {
        "hidden_size": heads * rng.choice([8, 16]),
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads,
        "hidden_act": rng.choice(["gelu", "gelu_pytorch_tanh"]),
        "layer_norm_eps": rng.choice([1e-5, 1e-3]),
        "use_parallel_residual": rng.random() < 0.7,
        "attention_bias": rng.random() < 0.5,
        "rope_parameters": ropes.draw(rng, partial_rotary_factor=rng.choice([0.25, 0.5, 1.0])),
        "tie_word_embeddings": rng.random() < 0.5,
        "hidden_dropout": rng.choice([0.0, 0.1]),
        "initializer_range": rng.choice([0.02, 0.05]),
    }


def starcoder2(rng: random.Random) -> Options:
    keys = llama_keys(rng, use_bias=rng.random() < 0.5, sliding_window=rng.choice([None, 5]))
    return keys | {"norm_epsilon": keys.pop("rms_norm_eps"), "hidden_act": rng.choice(["gelu_pytorch_tanh", "gelu"])}


def gemma2(rng: random.Random) -> Options:
    keys = llama_keys(rng, head_dim=rng.choice([4, 10]), query_pre_attn_scalar=rng.choice([4, 7, 10]))
    caps = {"final_logit_softcapping": rng.choice([None, 3.0]), "attn_logit_softcapping": rng.choice([None, 2.0])}
    act = {"hidden_activation": keys.pop("hidden_act"), "attention_bias": rng.random() < 0.5}
    return keys | caps | act | layer_types(rng, keys["num_hidden_layers"])


def gemma3(rng: random.Random) -> Options:
    return with_ropes_by_type(rng, gemma2(rng) | {"attn_logit_softcapping": None})


def gdn_keys(rng: random.Random) -> Options:
    """Keys of Gated DeltaNet layers among those of attention, at least one of each."""
    heads, layers = rng.choice([1, 2, 4]), rng.randint(2, 4)
    types = ["linear_attention", "full_attention", *rng.choices(["linear_attention", "full_attention"], k=layers - 2)]
    return {
        "num_hidden_layers": layers,
        "layer_types": rng.sample(types, layers),
        "linear_num_value_heads": heads,
        "linear_num_key_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "linear_key_head_dim": rng.choice([4, 7]),
        # Of 4, one draw has gradients that move by 2e-3 where a weight moves by its rounding, in either implementation.
        "linear_value_head_dim": rng.choice([7, 10]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "attention_bias": rng.random() < 0.5,
    }


def qwen3_next(rng: random.Random) -> Options:
    keys = llama_keys(rng, head_dim=rng.choice([4, 12]), hidden_act="silu") | gdn_keys(rng)
    layers = keys["num_hidden_layers"]
    dense: list[Options] = [
        {"num_experts": 0},
        {"decoder_sparse_step": layers + 1},
        {"mlp_only_layers": list(range(layers))},
    ]
    keys["rope_parameters"] |= {"partial_rotary_factor": rng.choice([0.5, 1.0])}
    return keys | rng.choice(dense)


def olmo_hybrid(rng: random.Random) -> Options:
    keys = llama_keys(rng, initializer_range=rng.choice([0.1, 0.08]), hidden_act="silu") | gdn_keys(rng)
    without: Options = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    low, high = rng.choice([(0.5, 9.0), (0.0, 16.0)])
    of_fresh = {"linear_a_log_min": low, "linear_a_log_max": high, "linear_dt_max": rng.choice([0.1, 0.2])}
    of_fresh["linear_dt_min"] = rng.choice([0.001, 0.01])
    return keys | rng.choice([{}, without]) | of_fresh | {"linear_allow_neg_eigval": rng.random() < 0.5}


def smollm3(rng: random.Random) -> Options:
    keys = llama_keys(rng, attention_bias=rng.random() < 0.5, mlp_bias=rng.random() < 0.5)
    layers = keys["num_hidden_layers"]
    rotated = rng.sample([1, *rng.choices([0, 1], k=layers - 1)], layers)
    windows = layer_types(rng, layers)
    return keys | windows | {"no_rope_layers": rotated, "use_sliding_window": "sliding_window" in windows}


def glm(rng: random.Random) -> Options:
    keys = llama_keys(rng, head_dim=rng.choice([4, 8]), attention_bias=rng.random() < 0.5)
    keys["rope_parameters"] |= {"partial_rotary_factor": rng.choice([0.5, 1.0])}
    return keys


def seed_oss(rng: random.Random) -> Options:
    biases = {name: rng.random() < 0.5 for name in ("attention_bias", "attention_out_bias", "mlp_bias")}
    return llama_keys(rng, head_dim=rng.choice([4, 10]), residual_dropout=rng.choice([0.0, 0.1]), **biases)


def helium(rng: random.Random) -> Options:
    keys = llama_keys(rng, attention_bias=rng.random() < 0.5, mlp_bias=rng.random() < 0.5)
    return keys | {"head_dim": keys["hidden_size"] // keys["num_attention_heads"]}


def apertus(rng: random.Random) -> Options:
    keys = llama_keys(rng, attention_bias=rng.random() < 0.5)
    return keys | {"hidden_act": rng.choice(["xielu", "xielu", "gelu", "relu2"])}


def ministral(rng: random.Random) -> Options:
    keys = llama_keys(rng, head_dim=rng.choice([4, 10]))
    return keys | layer_types(rng, keys["num_hidden_layers"])


def ernie4_5(rng: random.Random) -> Options:
    return llama_keys(rng, head_dim=rng.choice([4, 10]), use_bias=rng.random() < 0.5)


CLASSES = {
    "ministral": (ministral, "Ministral"),
    "ernie4_5": (ernie4_5, "Ernie4_5"),
    "apertus": (apertus, "Apertus"),
    "smollm3": (smollm3, "SmolLM3"),
    "glm": (glm, "Glm"),
    "glm4": (glm, "Glm4"),
    "seed_oss": (seed_oss, "SeedOss"),
    "helium": (helium, "Helium"),
    "mistral": (mistral, "Mistral"),
    "qwen2": (qwen2, "Qwen2"),
    "qwen3": (qwen3, "Qwen3"),
    "olmo2": (olmo2, "Olmo2"),
    "olmo3": (olmo3, "Olmo3"),
    "phi3": (phi3, "Phi3"),
    "granite": (granite, "Granite"),
    "gpt_neox": (gpt_neox, "GPTNeoX"),
    "starcoder2": (starcoder2, "Starcoder2"),
    "gemma2": (gemma2, "Gemma2"),
    "gemma3_text": (gemma3, "Gemma3Text"),
    "qwen3_next": (qwen3_next, "Qwen3Next"),
    "olmo_hybrid": (olmo_hybrid, "OlmoHybrid"),
}
"""Model types, with the draw and the name of the class."""
