"""Llama (Touvron et al., arXiv:2307.09288; Llama 3, arXiv:2407.21783) as transformers' LlamaForCausalLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.differences import refuse_differences
from llmtrain.models.hf.family import Weight
from llmtrain.models.hf.settings import Refusals


class Llama:
    """The Llama family.

    Not read, because without effect on the outputs: attention_dropout (of training), pretraining_tp (a split of matrix
    products), use_cache. Not written: model.dropout, for which the class has no place.
    """

    architecture = "LlamaForCausalLM"
    model_type = "llama"

    def read_config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        config = settings.parse(LlamaConfig, published)
        refusals = Refusals()
        refusals.unless(config.hidden_act in ("silu", "swish"), "hidden_act", config.hidden_act, "only silu (swiglu)")
        block: dict[str, Any] = {"type": "attention", "n_heads": config.num_attention_heads}
        if config.num_key_value_heads != config.num_attention_heads:
            block["n_kv_heads"] = config.num_key_value_heads
        if config.head_dim * config.num_attention_heads != config.hidden_size:
            block["head_dim"] = config.head_dim
        block["position"] = settings.read_rotary(config, refusals)
        if config.attention_bias:
            block |= {"qkv_bias": True, "out_bias": True}
        block["mlp"] = {"type": "swiglu", "d_ff": config.intermediate_size, "bias": config.mlp_bias}
        refusals.check()
        return settings.validate_section(
            {
                "vocab_size": config.vocab_size,
                "d_model": config.hidden_size,
                "max_seq_len": config.max_position_embeddings,
                "norm": {"type": "rmsnorm", "eps": config.rms_norm_eps},
                "tie_embeddings": config.tie_word_embeddings,
                "blocks": {"attn": block},
                "layers": f"attn*{config.num_hidden_layers}",
                **settings.read_init(config.initializer_range),
            }
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        refusals = Refusals()
        key, block = settings.only_block(config, AttentionBlock, self.architecture, refusals)
        self._refuse(config, key, block, refusals)
        refusals.check()
        assert block.mlp is not None and block.position.type == "rotary"
        written = settings.class_config(
            LlamaConfig,
            self.architecture,
            {
                "vocab_size": config.vocab_size,
                "hidden_size": config.d_model,
                "intermediate_size": block.mlp.d_ff,
                "num_hidden_layers": len(config.layer_list()),
                "num_attention_heads": block.n_heads,
                "num_key_value_heads": block.kv_heads,
                "head_dim": block.spec(config.d_model).head_dim,
                "hidden_act": "silu",
                "max_position_embeddings": config.max_seq_len,
                "initializer_range": min(config.init.std, 1.0),  # the class takes no more
                "rms_norm_eps": config.norm.eps,
                "tie_word_embeddings": config.tie_embeddings,
                "attention_bias": block.qkv_bias,
                "mlp_bias": block.mlp.bias,
                **settings.write_rotary(block.position),
            },
        )
        refuse_differences(config, self.read_config(written), self.architecture)
        return written

    def _refuse(self, config: ModelConfig, key: str, block: AttentionBlock, refusals: Refusals) -> None:
        name = self.architecture
        settings.refuse_model_features(config, name, "rmsnorm", refusals)
        settings.refuse_own_norm(key, block, config, name, refusals)
        settings.refuse_attention_features(key, block, name, refusals)
        unless = refusals.unless
        unless(config.positions == "none", "model.positions", config.positions, f"{name} has none; set positions: none")
        kind = block.position.type
        unless(kind == "rotary", f"{key}.position", kind, f"{name} has rotary ones; set position: {{type: rotary}}")
        mlp = block.mlp and block.mlp.type
        unless(mlp == "swiglu", f"{key}.mlp", mlp, f"{name} has an MLP in every layer; set mlp: {{type: swiglu, ...}}")
        unless(block.clip_qkv is None, f"{key}.clip_qkv", block.clip_qkv, f"{name} has none; set clip_qkv: null")
        bias, scale, d = block.out_bias, block.softmax_scale, config.d_model
        unless(
            bias == block.qkv_bias, f"{key}.out_bias", bias, f"{name} has one setting for both; set it like qkv_bias"
        )
        usual = scale is None or math.isclose(scale, block.spec(d).head_dim ** -0.5)
        unless(usual, f"{key}.softmax_scale", scale, f"{name} has head_dim^-0.5; set softmax_scale: null")
        needed = f"{name} needs a divisor of d_model ({d}), even with a head_dim of its own"
        unless(d % block.n_heads == 0, f"{key}.n_heads", block.n_heads, needed)

    def weights(self, config: ModelConfig) -> list[Weight]:
        _, block = settings.only_block(config, AttentionBlock, self.architecture, Refusals())
        assert block.mlp is not None
        d, d_ff, bias = config.d_model, block.mlp.d_ff, block.mlp.bias
        head_dim = block.spec(d).head_dim
        q, kv = block.n_heads * head_dim, block.kv_heads * head_dim
        made = [tensors.embedding(config, "model.embed_tokens.weight", "lm_head.weight")]
        for i in range(len(config.layer_list())):
            ours, theirs = f"blocks.{i}", f"model.layers.{i}"
            attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
            qkv = {f"{attn}.q_proj": q, f"{attn}.k_proj": kv, f"{attn}.v_proj": kv}
            made += [
                tensors.same(f"{ours}.norm.weight", f"{theirs}.input_layernorm.weight", d),
                *tensors.linear(f"{ours}.mixer.wqkv", qkv, d, block.qkv_bias),
                *tensors.linear(f"{ours}.mixer.wo", {f"{attn}.o_proj": d}, q, block.out_bias),
                tensors.same(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", d),
                *tensors.linear(f"{ours}.mlp.w_in", {f"{mlp}.gate_proj": d_ff, f"{mlp}.up_proj": d_ff}, d, bias),
                *tensors.linear(f"{ours}.mlp.w_out", {f"{mlp}.down_proj": d}, d_ff, bias),
            ]
        made.append(tensors.same("norm.weight", "model.norm.weight", d))
        return made + tensors.head(config, "lm_head.weight")


FAMILY = Llama()
