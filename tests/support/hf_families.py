"""Every family with its class in transformers: random configs, and keys of config.json that need not come back equal."""

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import transformers

from llmtrain.models.hf.family import Family, family_of_hf_config
from tests.support import hf, hf_decoders, hf_experts, hf_hybrids

Options = dict[str, Any]


def llama(rng: random.Random, i: int) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3, 4, 6])
    d_model = heads * rng.choice([4, 6, 8])
    rope: dict[str, Any] = {"rope_theta": rng.choice([100.0, 10_000.0, 500_000.0])}
    match i % 3:
        case 0:
            rope["rope_type"] = "default"
        case 1:
            rope |= {"rope_type": "linear", "factor": rng.choice([1.5, 4.0])}
        case 2:
            # So short that every band of frequencies is met.
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope["original_max_position_embeddings"] = rng.choice([16, 64])
            rope["rope_theta"] = rng.choice([10.0, 100.0])
    return {
        "hidden_size": d_model,
        "intermediate_size": rng.choice([24, 40, 52]),
        "num_hidden_layers": rng.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": rng.choice([None, 4, 10, 16]),
        "rope_parameters": rope,
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "max_position_embeddings": 128,
        "initializer_range": rng.choice([0.02, 0.05]),
        "hidden_act": rng.choice(["silu", "silu", "gelu", "gelu_pytorch_tanh"]),
    }


def mpt(rng: random.Random, i: int) -> dict[str, Any]:
    heads = [1, 2, 3, 4, 5, 6][i % 6]  # powers of two, and others, which have ALiBi slopes of their own
    return {
        "d_model": heads * rng.choice([4, 8]),
        "n_heads": heads,
        "n_layers": rng.randint(2, 4),
        "max_seq_len": rng.choice([64, 80]),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.6,
        "initializer_range": rng.choice([0.02, 0.05]),
        "attn_config": {"clip_qkv": rng.choice([None, None, 0.5, 1.0]), "softmax_scale": rng.choice([None, 0.11, 0.7])},
    }


def mamba2(rng: random.Random, i: int) -> dict[str, Any]:
    groups = [1, 2, 3][i % 3]
    head_dim, expand = rng.choice([4, 8]), rng.choice([1, 2, 3])
    heads = groups * expand * rng.choice([1, 2])  # so that d_model comes out whole
    return {
        "hidden_size": heads * head_dim // expand,
        "num_heads": heads,
        "head_dim": head_dim,
        "expand": expand,
        "n_groups": groups,
        "state_size": rng.choice([4, 8, 12]),
        "num_hidden_layers": rng.randint(2, 4),
        "conv_kernel": rng.choice([2, 3, 4]),
        "chunk_size": rng.choice([8, 16]),
        "use_bias": rng.random() < 0.3,
        "use_conv_bias": rng.random() < 0.6,
        "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
        # Initial steps in these tests are about softplus(-3..1) = 0.05..1.3, so that these limits are met.
        "time_step_limit": rng.choice([(0.0, math.inf), (0.1, math.inf), (0.0, 0.4), (0.1, 0.5)]),
        "time_step_min": rng.choice([1e-3, 1e-2]),
        "time_step_max": rng.choice([0.1, 0.3]),
        "time_step_floor": rng.choice([1e-4, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.6,
        "initializer_range": rng.choice([0.1, 0.05]),
    }


def nemotron_h(rng: random.Random, i: int) -> dict[str, Any]:
    heads, head_dim, groups = rng.choice([2, 4, 8]), rng.choice([4, 8]), rng.choice([1, 2, 4])
    heads *= groups
    attention = rng.choice([1, 2, 4])
    mixers = rng.choices(["M", "M-", "*", "*-"], k=rng.randint(1, 3))
    return {
        "hidden_size": rng.choice([heads * head_dim // 2, 20]),
        "hybrid_override_pattern": "".join(rng.sample(["M-", "*", *mixers], 2 + len(mixers))),
        "intermediate_size": rng.choice([24, 40]),
        "num_attention_heads": attention,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4) if attention % n == 0]),
        "head_dim": rng.choice([4, 10]),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "n_groups": groups,
        "ssm_state_size": rng.choice([3, 8]),
        "conv_kernel": rng.choice([2, 4]),
        "chunk_size": rng.choice([4, 16]),
        "time_step_min": rng.choice([0.001, 0.3]),
        "time_step_max": rng.choice([0.1, 0.5]),
        "time_step_floor": rng.choice([1e-4, 1e-2]),
        "use_conv_bias": rng.random() < 0.5,
        "use_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "mlp_hidden_act": rng.choice(["relu2", "gelu"]),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
        "initializer_range": rng.choice([0.02, 0.05]),
        "pad_token_id": None,
    }


def zamba2(rng: random.Random, i: int) -> dict[str, Any]:
    mamba_heads = rng.choice([2, 4])
    heads = rng.choice([1, 2, 4])
    adapters, rope = bool(i & 1), bool(i & 2)
    kinds = [rng.choice(["linear_attention", "hybrid"]) for _ in range(rng.randint(2, 5))]
    kinds[rng.randrange(len(kinds))] = "hybrid"
    scaling = rng.choice([{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
    return {
        "hidden_size": rng.choice([16, 24]),
        "num_hidden_layers": len(kinds),
        "layers_block_type": kinds,
        "mamba_d_state": rng.choice([4, 8]),
        "mamba_d_conv": rng.choice([2, 3, 4]),
        "mamba_expand": rng.choice([1, 2]),
        "mamba_ngroups": rng.choice([1, 2]),
        "n_mamba_heads": mamba_heads,
        "chunk_size": rng.choice([8, 16]),
        "time_step_min": rng.choice([1e-3, 0.1, 0.5]),  # a limit as well, as in mamba2
        "time_step_max": rng.choice([0.6, 1.0]),
        "add_bias_linear": rng.random() < 0.3,
        "intermediate_size": rng.choice([20, 36]),
        "hidden_act": rng.choice(["gelu", "gelu", "silu"]),
        "num_attention_heads": heads,
        # The class has adapters for as many key and value heads as query heads only.
        "num_key_value_heads": heads if adapters else rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "num_mem_blocks": rng.choice([n for n in (1, 2) if n <= kinds.count("hybrid")]),
        "use_shared_attention_adapter": adapters,
        "adapter_rank": rng.choice([2, 5]),
        "use_mem_rope": rope,
        **({"rope_parameters": {"rope_theta": rng.choice([100.0, 10_000.0]), **scaling}} if rope else {}),
        "time_step_floor": rng.choice([1e-4, 1e-3]),
        "initializer_range": rng.choice([0.02, 0.05]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.7,
        "max_position_embeddings": 128,
    }


def tie_shared_blocks(peer: Any) -> None:
    """With tie_word_embeddings: false, transformers 5.23 leaves the shared blocks untied as well; see models/hf/zamba2.py."""
    hybrid = [layer for layer in peer.model.layers if hasattr(layer, "shared_transformer")]
    for i, layer in enumerate(hybrid):
        layer.shared_transformer = hybrid[i % peer.config.num_mem_blocks].shared_transformer


def unties_shared_blocks(config: Any) -> bool:
    return not config.tie_word_embeddings and config.layers_block_type.count("hybrid") > config.num_mem_blocks


@dataclass(frozen=True)
class Peer:
    """A family's class. name: of its cases, which begins with the model type. other: further keys that need not be equal. folders:
    numbers of the cases that go through folders."""

    name: str
    draw: Callable[[random.Random, int], Options]
    config: Any
    model: Any
    other: frozenset[str]
    tie: Callable[[Any], None] | None = None
    folders: tuple[int, ...] = (7,)

    def case(self, number: int) -> hf.Case:
        return hf.random_case(self.name, self.draw, self.config, number)

    def made(self, case: hf.Case) -> Any:
        return hf.random_peer(case, self.model, self.tie)

    @property
    def model_type(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def family(self) -> Family:
        return family_of_hf_config({"model_type": self.model_type})


def _peer(
    name: str, draw: Callable[[random.Random, int], Options], kind: str, other: Collection[str], **further: Any
) -> Peer:
    config, model = (getattr(transformers, one) for one in (f"{kind}Config", f"{kind}ForCausalLM".replace("Text", "")))
    return Peer(name, draw, config, model, frozenset(other), **further)


LLAMA = _peer("llama", llama, "Llama", ["attention_dropout", "pretraining_tp"], folders=range(6))
# attn_config: see test_attention_section
MPT = _peer("mpt", mpt, "Mpt", ["learned_pos_emb", "attn_config"], folders=range(6))
_OF_MAMBA = ["residual_in_fp32", "rescale_prenorm_residual", "time_step_rank", "time_step_floor"]
MAMBA2 = _peer("mamba2", mamba2, "Mamba2", _OF_MAMBA, folders=range(6))
# Of training and of fresh weights, and what the class derives or passes over.
NEMOTRON_H = _peer(
    "nemotron_h",
    nemotron_h,
    "NemotronH",
    ["attention_dropout", "time_step_limit", "time_step_max", "time_step_floor", "num_hidden_layers", "expand"],
    folders=(3,),
)
ZAMBA2 = _peer(
    "zamba2",
    zamba2,
    "Zamba2",
    [
        *("attention_dropout", "num_logits_to_keep", "use_mamba_kernels", "use_mem_eff_path", "kv_channels"),
        *("num_query_groups", "rope_theta", "rope_scaling", "time_step_floor"),
    ],
    tie=tie_shared_blocks,
    folders=range(6),
)
EXPERTS = [_peer(f"{name} experts", draw, kind, hf_experts.OTHER) for name, (draw, kind) in hf_experts.CLASSES.items()]
PEERS = {
    peer.name: peer
    for peer in (
        *(LLAMA, MPT, MAMBA2, NEMOTRON_H, ZAMBA2),
        *(
            _peer(name, lambda rng, i, draw=draw: draw(rng), kind, hf_decoders.OTHER)
            for name, (draw, kind) in hf_decoders.CLASSES.items()
        ),
        *(_peer(name, draw, kind, hf_hybrids.OTHER) for name, (draw, kind) in hf_hybrids.CLASSES.items()),
        *EXPERTS,
    )
}
