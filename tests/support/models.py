"""Small models of every kind of layer and option."""

import json
from typing import Any, get_args

import torch

from llmtrain.config.schema_tree import sections_by_type
from llmtrain.kernels.platform import Platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import Block, ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.sections.layers import NormBackend

VOCAB = 97
GELU, SWIGLU = {"type": "gelu", "d_ff": 48}, {"type": "swiglu", "d_ff": 48}
MAMBA = {"type": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 16}
GDN = {"type": "gated_deltanet", "n_heads": 4, "key_head_dim": 6, "value_head_dim": 10}
KDA = {"type": "kimi_delta", "n_heads": 4, "key_head_dim": 6, "value_head_dim": 10, "gate_rank": 7}
CCA = {
    "type": "compressed_attention",
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 6,
    "mlp": {"type": "swiglu", "d_ff": 48},
}
SHARED = {"type": "shared_attention", "n_heads": 4, "mlp": {"type": "geglu", "d_ff": 48}, "adapter_rank": 4}
ALIBI, ROTARY = {"type": "alibi"}, {"type": "rotary"}
ATTENTION = {"type": "attention", "n_heads": 4, "mlp": SWIGLU}
LATENT = {
    "type": "latent_attention",
    "n_heads": 4,
    "kv_rank": 10,
    "nope_dim": 6,
    "rope_dim": 4,
    "value_dim": 5,
    "mlp": SWIGLU,
}
ZAYA = {"residual_scaling": True}


def routed(previous: bool, choice_bias: bool = True) -> dict[str, Any]:
    """ZAYA1's experts. previous: their router reads the state of a layer before."""
    mlp = {"width": 10, "previous": previous}
    router = {"renormalize": False, "choice_bias": choice_bias, "skip": True, "mlp": mlp}
    return {"type": "experts", "n_experts": 3, "top_k": 1, "d_ff": 20, "router": router, "balance": {"weight": 0}}


MODELS: dict[str, dict[str, Any]] = {
    "mpt with alibi": {
        "norm": {"type": "layernorm"},
        "blocks": {"a": ATTENTION | {"n_heads": 3, "head_dim": 8, "position": ALIBI, "mlp": GELU}},
        "layers": "a*3",
    },
    "mpt with learned positions and clipping": {
        "norm": {"type": "layernorm", "bias": True},
        "positions": "learned",
        "blocks": {"a": ATTENTION | {"qk_norm": "full", "clip_qkv": 1.0, "mlp": GELU}},
        "layers": "a*2",
    },
    "llama with grouped queries": {
        "blocks": {"a": ATTENTION | {"n_kv_heads": 2, "position": ROTARY}},
        "layers": "a*3",
        "tie_embeddings": False,
    },
    "a window and soft caps": {
        "blocks": {
            "a": ATTENTION | {"n_kv_heads": 1, "position": ROTARY, "softcap": 5.0},
            "w": ATTENTION | {"position": ALIBI, "sliding_window": 9, "qk_norm": "head"},
        },
        "layers": "(a w)*2",
        "logit_softcap": 10.0,
    },
    "latent attention with positions and without": {
        "blocks": {"a": LATENT | {"position": ROTARY, "q_rank": 7, "latent_bias": True}, "n": LATENT},
        "layers": "a n a",
    },
    "sinks, with a window in every second layer": {
        "blocks": {
            "a": ATTENTION | {"n_kv_heads": 2, "position": ROTARY, "sinks": True},
            "w": ATTENTION | {"n_kv_heads": 2, "position": ROTARY, "sinks": True, "sliding_window": 5},
        },
        "layers": "(w a)*2",
    },
    "mamba2 with groups": {"blocks": {"m": MAMBA | {"n_groups": 2, "conv_bias": False}}, "layers": "m*3"},
    "zamba2 as the 1.2B": {
        "blocks": {"m": MAMBA | {"dt_limit": [0.3, None]}, "s": SHARED | {"attn_adapter_rank": 4, "position": ROTARY}},
        "layers": "m s+m m s+m",
    },
    "norms after and on both sides, branches side by side, multipliers": {
        "norm": {"zero_centered": True, "place": "both"},
        "blocks": {
            "a": ATTENTION
            | {
                "position": ROTARY | {"fraction": 0.5},
                "residual_multiplier": 0.5,
                "mlp": {"type": "geglu_tanh", "d_ff": 48},
            },
            "p": ATTENTION
            | {
                "position": ROTARY,
                "parallel": True,
                "mlp": {"type": "relu2", "d_ff": 48},
                "norm": {"type": "layernorm"},
            },
            "m": {
                "type": "parallel_mixers",
                "mixers": [
                    MAMBA | {"input_multiplier": 0.5, "projection_multipliers": (0.5, 2.0, 1.0, 1.5, 1.0)},
                    {"type": "attention", "n_heads": 2, "position": ALIBI, "residual_multiplier": 2.0},
                ],
                "mlp": {"type": "gelu_tanh", "d_ff": 48, "out_multiplier": 0.5},
                "norm": {"type": "rmsnorm", "place": "after"},
            },
        },
        "layers": "a p m",
        "embedding_multiplier": 3.0,
        "logit_multiplier": 0.5,
    },
    "gated deltanet with grouped keys, and gated attention": {
        "norm": {"zero_centered": True},
        "blocks": {
            "g": GDN | {"n_key_heads": 2, "mlp": SWIGLU},
            "n": GDN | {"negative_eigenvalues": True, "d_conv": 1},
            "a": ATTENTION
            | {"n_kv_heads": 2, "position": ROTARY | {"fraction": 0.5}, "qk_norm": "head", "output_gate": True},
        },
        "layers": "g a n",
    },
    "kimi delta attention with both gates, and attention without positions": {
        "blocks": {"k": KDA | {"mlp": SWIGLU}, "b": KDA | {"lower_bound": -5.0, "d_conv": 2}, "a": ATTENTION},
        "layers": "k b a k",
    },
    "compressed attention with and without a window, biases and delayed halves of one head": {
        "blocks": {
            "c": CCA | {"position": {"type": "rotary", "fraction": 0.67}, "d_conv": 3},
            "w": CCA | {"n_kv_heads": 1, "qkv_bias": True, "sliding_window": 9, "d_head_conv": 3},
        },
        "layers": "c w c",
    },
    "compressed attention with routers that hand on their states, and scaled residuals": {
        "blocks": {
            "f": CCA | ZAYA | {"position": ROTARY, "mlp": routed(False)},
            "c": CCA | ZAYA | {"position": ROTARY, "mlp": routed(True)},
        },
        "layers": "f c*2",
        "embedding_scaling": True,
    },
    "attention with routers that hand on their states, past layers that do not": {
        "blocks": {
            "f": ATTENTION | {"position": ROTARY, "mlp": routed(False)},
            "a": ATTENTION | {"position": ROTARY, "mlp": {"type": "xielu", "d_ff": 48}},
            "c": ATTENTION | ZAYA | {"position": ROTARY, "norm": {"place": "both"}, "mlp": routed(True)},
        },
        "layers": "f a c c",
    },
    "mamba3 with groups and all channels turning": {
        "blocks": {
            "m": {"type": "mamba3", "d_state": 7, "head_dim": 8, "chunk_size": 8, "mlp": SWIGLU},
            "r": {"type": "mamba3", "d_state": 8, "head_dim": 16, "n_groups": 2, "rope_fraction": 1.0},
        },
        "layers": "m r m",
    },
    "zamba2 as the 2.7B": {
        "blocks": {"m": MAMBA | {"d_conv": 3}, "s": SHARED | {"n_shared": 2}},
        "layers": "m s+m m (s+m)*2",
    },
}


def build(
    name: str,
    platform: Platform,
    dtype: torch.dtype = torch.float32,
    *,
    device: str | None = None,
    backend: str = "auto",
    layers: str | None = None,
    documents: bool = False,
    vocab_size: int = VOCAB,
) -> CausalLM:
    """One of MODELS, with weights large enough that it tells tokens apart, in eval mode.

    device: default: the platform's. backend: of its blocks, and of norms if one of theirs. layers: not its own.
    """
    settings: dict[str, Any] = {"vocab_size": vocab_size, "d_model": 32, "max_seq_len": 300, **MODELS[name]}
    settings["blocks"] = {name: _with_backend(block, backend) for name, block in settings["blocks"].items()}
    if backend in get_args(NormBackend):
        settings["norm"] = settings.get("norm", {}) | {"backend": backend}
    settings["layers"] = layers or settings["layers"]
    config = ModelConfig.model_validate_json(json.dumps(settings))
    model = HybridLM(config, platform=platform, dtype=dtype, documents=documents)
    return CausalLM(large_weights(model)).to(device or platform.device_type).eval()


def large_weights(model: HybridLM) -> HybridLM:
    """The model, of seed 5, with weights large enough that it tells tokens apart."""
    model.init_weights(seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


def _with_backend(block: dict[str, Any], backend: str) -> dict[str, Any]:
    if "mixers" in block:
        return block | {"mixers": [_with_backend(part, backend) for part in block["mixers"]]}
    has_backends = "backend" in sections_by_type(Block)[block["type"]].model_fields
    return block | {"backend": backend} if has_backends else block


def _packable(name: str) -> bool:
    """True where no layer has anything against reading requests that share a prefix, on an NVIDIA GPU."""
    settings = {"vocab_size": VOCAB, "d_model": 32, **MODELS[name]}
    with torch.device("meta"):
        model = HybridLM(
            ModelConfig.model_validate_json(json.dumps(settings)), Platform("nvidia", "sm90", "", 1 << 30, 1)
        )
    return model.prefix_refusal() is None


PACKABLE = [name for name in MODELS if _packable(name)]
"""Models that score requests that share a prefix."""
