"""Families with experts against their classes in transformers: logits, every gradient, the auxiliary loss, decoding, and back to
the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hf.family import UnsupportedModelError, family_of_hf_config
from tests.numerics import test_hf_decoders as decoders
from tests.numerics import test_hf_hybrids as hybrids
from tests.support import hf, ropes

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


PEERS = {
    "zaya": hf.Peer(zaya, transformers.ZayaConfig, transformers.ZayaForCausalLM),
    "deepseek_v2": hf.Peer(deepseek_v2, transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": hf.Peer(deepseek_v3, transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "glm4_moe": hf.Peer(glm4_moe, transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    "gpt_oss": hf.Peer(gpt_oss, transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "mixtral": hf.Peer(mixtral, transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "olmoe": hf.Peer(olmoe, transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "qwen3_moe": hf.Peer(qwen3_moe, transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "granitemoe": hf.Peer(granitemoe, transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM),
    "kimi_linear": hf.Peer(kimi_linear, transformers.KimiLinearConfig, transformers.KimiLinearForCausalLM),
    "dots1": hf.Peer(dots1, transformers.Dots1Config, transformers.Dots1ForCausalLM),
    "qwen3_next": hf.Peer(qwen3_next, transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "granitemoehybrid": hf.Peer(
        granitemoehybrid, transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM
    ),
    "nemotron_h": hf.Peer(nemotron_h, transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
}
UNPOOLED = ("zaya", "dots1", "nemotron_h", "deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_linear")
POOLED = [name for name in PEERS if name not in UNPOOLED]
"""Classes with an auxiliary loss."""


def case_of(name: str, number: int) -> hf.Case:
    return hf.random_case(f"{name} experts", PEERS[name].draw, PEERS[name].config, number)


def random_peer(name: str, case: Any) -> Any:
    """With routers that tell tokens apart, and biases of the choice, away from 0."""
    peer = hf.random_peer(case, PEERS[name].model)
    with torch.no_grad():
        for buffer_name, buffer in peer.named_buffers():
            if buffer_name.endswith("balancing_biases"):
                buffer[-1] = 0.0  # else no token would choose to meet no expert
            if buffer_name.endswith(("e_score_correction_bias", "balancing_biases")):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return peer


@hf.every_case(PEERS)
def test_same_function_and_back(name, number):
    case = case_of(name, number)
    peer = random_peer(name, case)
    ours, family = hf.ours_in_memory(peer), family_of_hf_config({"model_type": name})
    hf.assert_same_function(family, ours, peer, case)
    hf.assert_back_is_equal(family, ours, peer, case, OTHER)


@pytest.mark.parametrize("name", PEERS)
def test_through_folders(name, tmp_path):
    """save_pretrained -> ours -> a folder -> from_pretrained."""
    case = case_of(name, 7)
    peer = random_peer(name, case)
    for buffer_name, buffer in peer.named_buffers():
        if buffer_name.endswith("balancing_biases"):
            buffer[-1] = -1.0  # which from_pretrained makes it, whatever the file holds
    ours, family = hf.ours_from_folder(peer, tmp_path / "theirs"), family_of_hf_config({"model_type": name})
    hf.assert_export_loads(family, ours, peer, case, tmp_path / "ours", OTHER)


@pytest.mark.parametrize("number", [0, 1, 2, 9, 20])
@pytest.mark.parametrize("name", POOLED)
def test_same_auxiliary_loss_and_its_gradients(name, number):
    case = case_of(name, number)
    peer = random_peer(name, case)
    ours, tokens = hf.ours_in_memory(peer), hf.tokens_of(case, 19)
    found = CausalLM(ours).loss(tokens, tokens)
    found.loss.backward()
    # The class multiplies its loss by the weight as it adds it to the other.
    theirs = peer(tokens, labels=tokens, shift_labels=tokens, output_router_logits=True)
    assert ours.losses is not None
    assert float(ours.losses.terms["balance"]) == pytest.approx(
        peer.config.router_aux_loss_coef * float(theirs.aux_loss), rel=1e-4
    )
    theirs.loss.backward()
    gates = [p.grad for n, p in peer.named_parameters() if n.endswith((".gate.weight", ".router.weight"))]
    mine = [p.grad for n, p in ours.named_parameters() if n.endswith("router.weight")]
    for one, other in zip(mine, gates, strict=True):
        assert hf.distance(one, other) < 5e-4  # type: ignore[arg-type]


REFUSED = [
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0: the class clips behind the norms"),
    (
        "kimi_linear",
        {"tie_word_embeddings": True},
        "tie_word_embeddings = true: the class has an output layer of its own",
    ),
    ("kimi_linear", {"num_key_value_heads": 7}, "num_key_value_heads = 7: as many as num_attention_heads"),
    ("kimi_linear", {"num_shared_experts": 0}, "num_shared_experts = 0"),
    ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act = gelu: the convolution has silu"),
    ("dots1", {"n_shared_experts": None}, "n_shared_experts = null"),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "EM"},
        r"hybrid_override_pattern\[0\] = E \(moe\): a layer of experts follows",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "MEE"}, r"hybrid_override_pattern\[2\] = E"),
    ("mixtral", {"num_experts_per_tok": 9}, r"model.blocks.attn.*top_k.*exceeds n_experts"),
    ("mixtral", {"hidden_act": "relu"}, "hidden_act = relu"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED)
def test_rejects_options_that_are_not_here_by_name(name, changes, reason):
    case = case_of(name, 0)
    published = hf.published_config(case.config)
    if "hybrid_override_pattern" in changes:
        published.pop("layers_block_type", None)
    with pytest.raises(UnsupportedModelError, match=reason):
        family_of_hf_config(published).read_config(published | changes)
