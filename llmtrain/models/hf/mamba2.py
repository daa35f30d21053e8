"""Mamba-2 (Dao & Gu, arXiv:2405.21060) as transformers' Mamba2ForCausalLM, and as mamba_ssm publishes it (read only)."""

import math
from collections.abc import Mapping
from typing import Any

from transformers import Mamba2Config

from llmtrain.models.config import Mamba2Block, ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.differences import refuse_differences
from llmtrain.models.hf.family import Weight
from llmtrain.models.hf.settings import Refusals

_FIELDS = {
    "state_size": "d_state",
    "head_dim": "head_dim",
    "expand": "expand",
    "n_groups": "n_groups",
    "conv_kernel": "d_conv",
    "chunk_size": "chunk_size",
    "use_conv_bias": "conv_bias",
    "use_bias": "proj_bias",
}
"""Fields of Mamba2Config, and those of our block that they are."""


class Mamba2:
    """The Mamba-2 family.

    Not read, because without effect on the outputs: residual_in_fp32 (a precision), norm_before_gate (the class ignores it
    and gates first; Mamba-Codestral's file has `true` there, and its weights need `false`), chunk sizes aside.
    Not written: model.max_seq_len, model.dropout and a_init_range, for which the class has no place.
    """

    architecture = "Mamba2ForCausalLM"
    model_type = "mamba2"

    def read_config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        if "ssm_cfg" in published and "model_type" not in published:
            return settings.validate_section(_read_mamba_ssm(published))
        config = settings.parse(Mamba2Config, published)
        refusals = Refusals()
        refusals.unless(config.hidden_act in ("silu", "swish"), "hidden_act", config.hidden_act, "only silu")
        rms_norm = published.get("rms_norm", True)
        refusals.unless(rms_norm, "rms_norm", rms_norm, "the mixer's gated norm is always there; true is possible")
        refusals.check()
        block: dict[str, Any] = {
            "type": "mamba2",
            **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
            **settings.read_dt_limit(config.time_step_limit),
            **settings.read_dt_range(config),
        }
        return settings.validate_section(
            {
                "vocab_size": config.vocab_size,
                "d_model": config.hidden_size,
                "norm": {"type": "rmsnorm", "eps": config.layer_norm_epsilon},
                "tie_embeddings": config.tie_word_embeddings,
                "blocks": {"m": block},
                "layers": f"m*{config.num_hidden_layers}",
                **settings.read_init(config.initializer_range),
            }
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        block, refusals = self._blocks(config)[0], Refusals()
        settings.refuse_uneven_scans(config, self.architecture, refusals)
        refusals.check()
        written = settings.class_config(
            Mamba2Config,
            self.architecture,
            {
                "vocab_size": config.vocab_size,
                "hidden_size": config.d_model,
                "num_hidden_layers": len(config.layer_list()),
                **{theirs: getattr(block, ours) for theirs, ours in _FIELDS.items()},
                "expand": block.inner_width(config.d_model) // config.d_model,
                "num_heads": block.spec(config.d_model).n_heads,
                "hidden_act": "silu",
                "layer_norm_epsilon": config.norm.eps,
                "initializer_range": config.init.std,
                "time_step_min": block.dt_min,
                "time_step_max": block.dt_max,
                "time_step_floor": min(1e-4, block.dt_min),
                "tie_word_embeddings": config.tie_embeddings,
                **settings.write_dt_limit(block),
            },
        )
        refuse_differences(config, self, written)
        return written

    def _blocks(self, config: ModelConfig) -> list[Mamba2Block]:
        return settings.layer_blocks(config, self.architecture, {"mamba2": Mamba2Block})

    def weights(self, config: ModelConfig) -> list[Weight]:
        # mamba_ssm's files say `embedding`; all other names are equal.
        older = ("backbone.embedding.weight",)
        made = [tensors.embedding(config, "backbone.embeddings.weight", "lm_head.weight", older=older)]
        for i, block in enumerate(self._blocks(config)):
            theirs = f"backbone.layers.{i}"
            made.append(tensors.same(f"blocks.{i}.norm.weight", f"{theirs}.norm.weight", config.d_model))
            made += tensors.mamba2_mixer(f"blocks.{i}.mixer", f"{theirs}.mixer", block, config)
        made.append(tensors.same("norm.weight", "backbone.norm_f.weight", config.d_model))
        return made + tensors.head(config, "lm_head.weight")


# mamba_ssm's Mamba2 module, as in what is published of state-spaces/mamba2-*: its setting -> ours, and its default.
_SSM_SETTINGS: dict[str, tuple[str, Any]] = {
    "d_state": ("d_state", 128),
    "headdim": ("head_dim", 64),
    "expand": ("expand", 2),
    "ngroups": ("n_groups", 1),
    "d_conv": ("d_conv", 4),
    "chunk_size": ("chunk_size", 256),
    "conv_bias": ("conv_bias", True),
    "bias": ("proj_bias", False),
    "norm_before_gate": ("norm_before_gate", False),
    "dt_limit": ("dt_limit", (0.0, math.inf)),
    "dt_min": ("dt_min", 1e-3),
    "dt_max": ("dt_max", 1e-1),
    "A_init_range": ("a_init_range", (1, 16)),
}
# Settings of training or of the kernels only.
_SSM_HARMLESS = ("dt_init_floor", "use_mem_eff_path", "conv_init")


def _read_mamba_ssm(published: Mapping[str, Any]) -> dict[str, Any]:
    refusals = Refusals()
    for key, possible, what in (
        ("d_intermediate", 0, "layers without an MLP only"),
        ("attn_layer_idx", [], "Mamba-2 layers only; give a hybrid as transformers publishes it"),
        ("rms_norm", True, "RMSNorm only"),
    ):
        found = published.get(key, possible)
        refusals.unless(found == possible, key, found, what)
    ssm = dict(published["ssm_cfg"])
    layer = ssm.pop("layer", "Mamba1")  # mamba_ssm's own default
    refusals.unless(layer == "Mamba2", "ssm_cfg.layer", layer, "only Mamba2 layers")
    for key, found in ssm.items():
        known = (
            key in _SSM_SETTINGS or key in _SSM_HARMLESS or (key, found) in (("rmsnorm", True), ("D_has_hdim", False))
        )
        refusals.unless(known, f"ssm_cfg.{key}", found, f"cannot be expressed; there are {', '.join(_SSM_SETTINGS)}")
    refusals.check()
    block = {ours: ssm.get(theirs, default) for theirs, (ours, default) in _SSM_SETTINGS.items()}
    block |= {name: float(block[name]) for name in ("dt_min", "dt_max")} | settings.read_dt_limit(block.pop("dt_limit"))
    block["a_init_range"] = tuple(map(float, block["a_init_range"]))
    multiple = published.get("pad_vocab_size_multiple", 8)
    return {
        # The published tables are padded.
        "vocab_size": -(-published["vocab_size"] // multiple) * multiple,
        "d_model": published["d_model"],
        "norm": {"type": "rmsnorm", "eps": published.get("norm_epsilon", 1e-5)},
        "tie_embeddings": published.get("tie_embeddings", True),
        "blocks": {"m": {"type": "mamba2", **block}},
        "layers": f"m*{published['n_layer']}",
    }
