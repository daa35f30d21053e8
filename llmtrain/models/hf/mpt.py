"""MPT (MosaicML's LLM Foundry) as transformers' MptForCausalLM: ALiBi, LayerNorm, GELU, and no bias anywhere."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import MptConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.differences import refuse_differences
from llmtrain.models.hf.family import Part, UnsupportedModelError, Weight
from llmtrain.models.hf.settings import Refusals
from llmtrain.models.sections.dense import MLPSection

_MAX_BIAS = 8

# Features of LLM Foundry's MPT that the class in transformers ignores: it would not compute the model that was trained, so
# they are refused. Key -> the values without effect, and what the class has instead.
_IGNORED_BY_CLASS: dict[str, tuple[tuple[Any, ...], str]] = {
    "expansion_ratio": ((4,), "MptForCausalLM has 4"),
    "no_bias": ((True,), "MptForCausalLM has no biases"),
    "logit_scale": ((None,), "MptForCausalLM does not scale its logits"),
    "norm_type": (("low_precision_layernorm", "layernorm"), "MptForCausalLM has LayerNorm"),
    "ffn_config": ((None,), "MptForCausalLM has a GELU MLP"),
    "final_logit_softcapping": ((None,), "MptForCausalLM has none"),
    "block_overrides": ((None,), "MptForCausalLM has one kind of layer"),
}
_IGNORED_BY_ATTENTION: dict[str, tuple[tuple[Any, ...], str]] = {
    "attn_type": (("multihead_attention",), "MptForCausalLM has as many key and value heads as query heads"),
    "alibi": ((True,), "MptForCausalLM always has ALiBi"),
    "prefix_lm": ((False,), "MptForCausalLM is causal throughout"),
    "qk_ln": ((False,), "MptForCausalLM has none"),
    "qk_gn": ((False,), "MptForCausalLM has none"),
    "rope": ((False,), "MptForCausalLM has ALiBi"),
    "kv_n_heads": ((None,), "MptForCausalLM has as many key and value heads as query heads"),
    "head_dim": ((None,), "MptForCausalLM has d_model / n_heads"),
    "sliding_window_size": ((-1, None), "MptForCausalLM has none"),
    "attn_logit_softcapping": ((None,), "MptForCausalLM has none"),
}


class Mpt:
    """The MPT family.

    Not read, because without effect on the outputs: attn_impl, attn_uses_sequence_id (packed sequences, for which the class
    takes no ids), learned_pos_emb (without effect beside ALiBi), embedding_fraction (of a gradient), attn_pdrop.
    model.dropout is resid_pdrop and emb_pdrop; when those differ it is read as 0.

    alibi_bias_max: the class ignores it and has 8 (5.23 does not hand it to build_mpt_alibi_tensor). Files with
    another value, such as mpt-7b-storywriter's, are read as they were trained; only 8 is written.
    """

    architecture = "MptForCausalLM"
    model_type = "mpt"

    def read_config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        refusals = Refusals()
        attention = dict(published.get("attn_config") or {})
        for section, prefix, features in (
            (published, "", _IGNORED_BY_CLASS),
            (attention, "attn_config.", _IGNORED_BY_ATTENTION),
        ):
            for key, (harmless, instead) in features.items():
                found = section.get(key, harmless[0])
                refusals.unless(found in harmless, prefix + key, found, f"cannot be expressed: {instead}")
        more = "with LLM Foundry's own weights: `llmtrain checkpoint convert FOLDER OUT --to llmtrain` reads them"
        refusals.unless(not refusals.reasons, "model_type", "mpt", more)
        refusals.check()

        for key in ("clip_qkv", "softmax_scale"):  # whole numbers in some files, which the class does not take
            if isinstance(attention.get(key), int):
                attention[key] = float(attention[key])
        config = settings.parse(MptConfig, {**published, "attn_config": attention})
        attn = config.attn_config
        block: dict[str, Any] = {"type": "attention", "n_heads": config.n_heads, "position": {"type": "alibi"}}
        if attn.alibi_bias_max != _MAX_BIAS:
            block["position"]["max_bias"] = float(attn.alibi_bias_max)
        if attn.clip_qkv:  # the class takes 0 for none
            block["clip_qkv"] = float(attn.clip_qkv)
        if attn.softmax_scale is not None:
            block["softmax_scale"] = float(attn.softmax_scale)
        block["mlp"] = {"type": "gelu", "d_ff": 4 * config.d_model}
        same_dropout = config.resid_pdrop == config.emb_pdrop
        return settings.validate_section(
            {
                "vocab_size": config.vocab_size,
                "d_model": config.d_model,
                "max_seq_len": config.max_seq_len,
                "norm": {"type": "layernorm", "eps": config.layer_norm_epsilon},
                "tie_embeddings": config.tie_word_embeddings,
                "blocks": {"attn": block},
                "layers": f"attn*{config.n_layers}",
                **({"dropout": float(config.resid_pdrop)} if same_dropout and config.resid_pdrop else {}),
                **settings.read_init(config.initializer_range),
            }
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        block: AttentionBlock = settings.layer_blocks(config, self.architecture, {"attention": AttentionBlock})[0]
        refusals, instead = Refusals(), f"{self.architecture} has d_model / n_heads; set head_dim: null"
        for name, one in settings.used_blocks(config):
            assert isinstance(one, AttentionBlock)
            refusals.unless(config.d_model % one.n_heads == 0, f"model.blocks.{name}.head_dim", one.head_dim, instead)
        refusals.check()
        attention = {
            "attn_type": "multihead_attention",
            "alibi": True,
            "alibi_bias_max": _MAX_BIAS,
            "clip_qkv": block.clip_qkv,
            "softmax_scale": block.softmax_scale,
            "qk_ln": False,
            "prefix_lm": False,
            "attn_uses_sequence_id": False,
            "attn_pdrop": 0,
        }
        written = settings.class_config(
            MptConfig,
            self.architecture,
            {
                "vocab_size": config.vocab_size,
                "d_model": config.d_model,
                "n_heads": block.n_heads,
                "n_layers": len(config.layer_list()),
                "expansion_ratio": 4,
                "max_seq_len": config.max_seq_len,
                "learned_pos_emb": False,
                "attn_config": attention,
                "layer_norm_epsilon": config.norm.eps,
                "no_bias": True,
                "resid_pdrop": config.dropout,
                "emb_pdrop": config.dropout,
                "initializer_range": config.init.std,
                "tie_word_embeddings": config.tie_embeddings,
            },
        )
        # The class adds every default of a config to this section, labels of classifiers among them.
        written |= {"attn_config": attention}
        refuse_differences(config, self, written)
        return written

    def weights(self, config: ModelConfig) -> list[Weight]:
        """Weights under LLM Foundry's names, of whatever it has beyond the class too: biases, learned positions, GQA, gated MLPs,
        norms of queries and keys, an output layer that is not tied."""
        d, stack = config.d_model, "transformer.blocks"
        made = [tensors.embedding(config, "transformer.wte.weight", "lm_head.weight")]
        if config.positions == "learned":
            made.append(tensors.same("positions.weight", "transformer.wpe.weight", config.max_seq_len, d))
        for i, layer in enumerate(config.layer_list()):
            ours, theirs, block = f"blocks.{i}", f"{stack}.{i}", config.blocks[layer.block]
            if not isinstance(block, AttentionBlock) or not isinstance(block.mlp, MLPSection):
                raise UnsupportedModelError(f"model.blocks.{layer.block}: {self.architecture} has attention and an MLP")
            rows = 2 * block.mlp.d_ff if block.mlp.gated else block.mlp.d_ff
            names = ("gate_proj", "up_proj") if block.mlp.gated else ("up_proj",)
            mixer = tensors.attention_mixer(
                f"{ours}.mixer", f"{theirs}.attn", block, config, qkv=("Wqkv",), out="out_proj"
            )
            made += [
                *tensors.norm(f"{ours}.norm", f"{theirs}.norm_1", d, block.norm or config.norm),
                *(_renamed(weight, {"q_norm": "q_ln", "k_norm": "k_ln"}) for weight in mixer),
                *tensors.norm(f"{ours}.mlp_norm", f"{theirs}.norm_2", d, block.norm or config.norm),
                *tensors.linear(
                    f"{ours}.mlp.w_in",
                    {f"{theirs}.ffn.{name}": rows // len(names) for name in names},
                    d,
                    block.mlp.bias,
                ),
                *tensors.linear(f"{ours}.mlp.w_out", {f"{theirs}.ffn.down_proj": d}, block.mlp.d_ff, block.mlp.bias),
            ]
        made += tensors.norm("norm", "transformer.norm_f", d, config.norm)
        return made + tensors.head(config, "lm_head.weight")


def _renamed(weight: Weight, names: Mapping[str, str]) -> Weight:
    """The weight with modules of other names there."""

    def under(part: Part) -> Part:
        *above, module, kind = part.name.split(".")
        return replace(part, name=".".join((*above, names.get(module, module), kind)))

    return replace(weight, parts=tuple(map(under, weight.parts)))
