"""The wiring of every model family against Hugging Face's implementation: same weights, same logits."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MptConfig,
    MptForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

from llmtrain.kernels import platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM

VOCAB, T = 96, 40


def build(**config) -> HybridLM:
    return HybridLM(ModelConfig.model_validate({"vocab_size": VOCAB, **config}), platform=platform.cpu()).eval()


def scramble(model: nn.Module) -> nn.Module:
    """Every weight away from its initial value, so that none can be swapped or dropped unseen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def assert_same_logits(model: HybridLM, weights: Mapping[str, Tensor], peer: nn.Module) -> None:
    """weights: the peer's, under our names."""
    assert weights.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name].view_as(parameter))
        tokens = torch.randint(3, VOCAB, (2, T), generator=torch.Generator().manual_seed(1))
        ours, theirs = model(tokens), peer(tokens, use_cache=False).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("n_heads, clip", [(4, None), (6, 1.0)])
def test_mpt_with_alibi(n_heads, clip):
    """Six heads: ALiBi's slopes when the number of heads is no power of two."""
    d_model = 8 * n_heads
    attn = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": clip, "attn_pdrop": 0}
    config = MptConfig(d_model=d_model, n_heads=n_heads, n_layers=2, vocab_size=VOCAB, max_seq_len=64, attn_config=attn)
    peer = scramble(MptForCausalLM(config))
    block = {
        "type": "attention",
        "n_heads": n_heads,
        "position": {"type": "alibi"},
        "clip_qkv": clip,
        "mlp": {"type": "gelu", "d_ff": 4 * d_model},
    }
    model = build(d_model=d_model, norm={"type": "layernorm"}, blocks={"a": block}, layers="a*2")

    theirs = {name.removeprefix("transformer."): p for name, p in peer.named_parameters()}
    weights = {"embed.weight": theirs["wte.weight"], "norm.weight": theirs["norm_f.weight"]}
    for i in range(2):
        weights |= {
            f"blocks.{i}.norm.weight": theirs[f"blocks.{i}.norm_1.weight"],
            f"blocks.{i}.mixer.wqkv.weight": theirs[f"blocks.{i}.attn.Wqkv.weight"],
            f"blocks.{i}.mixer.wo.weight": theirs[f"blocks.{i}.attn.out_proj.weight"],
            f"blocks.{i}.mlp_norm.weight": theirs[f"blocks.{i}.norm_2.weight"],
            f"blocks.{i}.mlp.w_in.weight": theirs[f"blocks.{i}.ffn.up_proj.weight"],
            f"blocks.{i}.mlp.w_out.weight": theirs[f"blocks.{i}.ffn.down_proj.weight"],
        }
    assert_same_logits(model, weights, peer)


def test_llama_with_grouped_queries():
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    peer = scramble(LlamaForCausalLM(config))
    block = {
        "type": "attention",
        "n_heads": 4,
        "n_kv_heads": 2,
        "position": {"type": "rotary"},
        "mlp": {"type": "swiglu", "d_ff": 48},
    }
    model = build(d_model=32, blocks={"a": block}, layers="a*2", tie_embeddings=False)

    theirs = {name.removeprefix("model."): p for name, p in peer.named_parameters()}
    weights = {
        "embed.weight": theirs["embed_tokens.weight"],
        "norm.weight": theirs["norm.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    for i in range(2):
        attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        weights |= {
            f"blocks.{i}.norm.weight": theirs[f"layers.{i}.input_layernorm.weight"],
            f"blocks.{i}.mixer.wqkv.weight": torch.cat([theirs[f"{attn}.{x}_proj.weight"] for x in "qkv"]),
            f"blocks.{i}.mixer.wo.weight": theirs[f"{attn}.o_proj.weight"],
            f"blocks.{i}.mlp_norm.weight": theirs[f"layers.{i}.post_attention_layernorm.weight"],
            f"blocks.{i}.mlp.w_in.weight": torch.cat(
                [theirs[f"{mlp}.gate_proj.weight"], theirs[f"{mlp}.up_proj.weight"]]
            ),
            f"blocks.{i}.mlp.w_out.weight": theirs[f"{mlp}.down_proj.weight"],
        }
    assert_same_logits(model, weights, peer)


def mamba_weights(peer: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    names = {
        "in_proj.weight": "in_proj.weight",
        "conv1d.weight": "conv.weight",
        "conv1d.bias": "conv.bias",
        "A_log": "ssm.A_log",
        "D": "ssm.D",
        "dt_bias": "ssm.dt_bias",
        "norm.weight": "norm.weight",
        "out_proj.weight": "out_proj.weight",
    }
    return {f"{ours}.{b}": peer[f"{theirs}.{a}"] for a, b in names.items()}


def test_mamba2_with_two_groups():
    config = Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_heads=8,
        head_dim=8,
        state_size=16,
        n_groups=2,
        num_hidden_layers=2,
        chunk_size=16,
        residual_in_fp32=False,
        tie_word_embeddings=True,
    )
    peer = scramble(Mamba2ForCausalLM(config))
    block = {"type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "chunk_size": 32}
    model = build(d_model=32, blocks={"m": block}, layers="m*2")

    theirs = {name.removeprefix("backbone."): p for name, p in peer.named_parameters()}
    weights = {"embed.weight": theirs["embeddings.weight"], "norm.weight": theirs["norm_f.weight"]}
    for i in range(2):
        weights[f"blocks.{i}.norm.weight"] = theirs[f"layers.{i}.norm.weight"]
        weights |= mamba_weights(theirs, f"layers.{i}.mixer", f"blocks.{i}.mixer")
    assert_same_logits(model, weights, peer)


@pytest.mark.parametrize("n_shared, attn_adapters", [(1, True), (2, False)])
def test_zamba2(n_shared, attn_adapters):
    """As the 1.2B (one shared block, rotary positions, QKV adapters) and as the 2.7B (two, in turn, neither)."""
    kinds = ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"]
    config = Zamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=len(kinds),
        layers_block_type=kinds,
        mamba_d_state=16,
        n_mamba_heads=8,
        mamba_ngroups=2,
        chunk_size=16,
        intermediate_size=48,
        num_attention_heads=4,
        num_mem_blocks=n_shared,
        use_shared_attention_adapter=attn_adapters,
        adapter_rank=6,
        use_mem_rope=attn_adapters,
        time_step_min=0.5,  # so that the limit bites
    )
    peer = scramble(Zamba2ForCausalLM(config))
    blocks = {
        "m": {
            "type": "mamba2",
            "d_state": 16,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "dt_limit": (0.5, None),
        },
        "s": {
            "type": "shared_attention",
            "n_heads": 4,
            "n_shared": n_shared,
            "mlp": {"type": "geglu", "d_ff": 48},
            "adapter_rank": 6,
            "attn_adapter_rank": 6 if attn_adapters else None,
            "position": {"type": "rotary"} if attn_adapters else {"type": "none"},
        },
    }
    model = build(d_model=32, blocks=blocks, layers="m s+m m (s+m)*2")

    theirs = {name.removeprefix("model."): p for name, p in peer.named_parameters(remove_duplicate=False)}
    weights = {"embed.weight": theirs["embed_tokens.weight"], "norm.weight": theirs["final_layernorm.weight"]}
    use = 0
    for i, kind in enumerate(kinds):
        decoder = f"layers.{i}" if kind == "linear_attention" else f"layers.{i}.mamba_decoder"
        weights[f"blocks.{i}.norm.weight"] = theirs[f"{decoder}.input_layernorm.weight"]
        weights |= mamba_weights(theirs, f"{decoder}.mamba", f"blocks.{i}.mixer")
        if kind == "linear_attention":
            continue
        block, shared, ours = f"layers.{i}.shared_transformer", f"shared.s.{use % n_shared}", f"blocks.{i}.shared_input"
        gate_up = f"{block}.feed_forward.gate_up_proj_adapter_list.{use}"
        weights |= {
            f"{shared}.norm.weight": theirs[f"{block}.input_layernorm.weight"],
            f"{shared}.mixer.wqkv.weight": torch.cat([theirs[f"{block}.self_attn.{x}_proj.weight"] for x in "qkv"]),
            f"{shared}.mixer.wo.weight": theirs[f"{block}.self_attn.o_proj.weight"],
            f"{shared}.mlp_norm.weight": theirs[f"{block}.pre_ff_layernorm.weight"],
            f"{shared}.mlp.w_in.weight": theirs[f"{block}.feed_forward.gate_up_proj.weight"],
            f"{shared}.mlp.w_out.weight": theirs[f"{block}.feed_forward.down_proj.weight"],
            f"{ours}.linear.weight": theirs[f"layers.{i}.linear.weight"],
            f"{ours}.mlp_adapter.down.weight": theirs[f"{gate_up}.0.weight"],
            f"{ours}.mlp_adapter.up.weight": theirs[f"{gate_up}.1.weight"],
        }
        if attn_adapters:
            pairs = {x: f"{block}.self_attn.linear_{x}_adapter_list.{use}" for x in "qkv"}
            weights[f"{ours}.qkv_adapter.down.weight"] = torch.cat([theirs[f"{p}.0.weight"] for p in pairs.values()])
            weights |= {f"{ours}.qkv_adapter.up_{x}.weight": theirs[f"{p}.1.weight"] for x, p in pairs.items()}
        use += 1
    assert_same_logits(model, weights, peer)
