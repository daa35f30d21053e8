"""Falcon-H1 (arXiv:2507.22448) as transformers' FalconH1ForCausalLM: attention and Mamba-2 side by side in every layer, and factors
of what each part reads and gives."""

from typing import Any

from transformers import FalconH1Config

from llmtrain.models.config import AttentionBlock, Block, Mamba2Block, ModelConfig, ParallelMixersBlock
from llmtrain.models.hf import settings
from llmtrain.models.hf.family import Weight
from llmtrain.models.hf.hybrid_decoder import HybridDecoder, read_mamba, write_mamba
from llmtrain.models.hf.settings import Refusals
from llmtrain.models.sections.dense import MLPSection

_MAMBA_FACTORS = {"ssm_in_multiplier": "input_multiplier", "ssm_out_multiplier": "residual_multiplier"}
_ATTENTION_FACTORS = {"attention_in_multiplier": "input_multiplier", "attention_out_multiplier": "residual_multiplier"}


class FalconH1(HybridDecoder):
    """key_multiplier is part of softmax_scale, as scores are all that keys are for."""

    kind = FalconH1Config
    final_norm = "model.final_layernorm"
    norms = {"norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
    mlp = "feed_forward"
    kinds = {"parallel_mixers": ParallelMixersBlock}

    def layer_types(self, config: Any, refusals: Refusals) -> list[str]:
        return config.layers_block_type

    def read_model(self, config: Any, refusals: Refusals) -> dict[str, Any]:
        return {
            "embedding_multiplier": float(config.embedding_multiplier),
            "logit_multiplier": float(config.lm_head_multiplier),
        }

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        attention = super().read_block(config, layer_type, refusals)
        gate, out = map(float, config.mlp_multipliers)
        mlp = attention.pop("mlp") | {"activation_multiplier": gate, "out_multiplier": out}
        head_dim = attention.get("head_dim") or config.hidden_size // config.num_attention_heads
        attention["softmax_scale"] = head_dim**-0.5 * config.key_multiplier
        mamba = read_mamba(config, refusals) | {
            "projection_multipliers": tuple(map(float, config.ssm_multipliers)),
            "gated_norm": config.mamba_rms_norm,
            "norm_before_gate": config.mamba_rms_norm and config.mamba_norm_before_gate,
        }
        for block, factors in ((mamba, _MAMBA_FACTORS), (attention, _ATTENTION_FACTORS)):
            block |= {ours: float(getattr(config, theirs)) for theirs, ours in factors.items()}
        bias, other = config.projectors_bias, config.mamba_proj_bias
        needed = f"must be mamba_proj_bias ({settings.as_yaml(other)}): the projections of a Mamba-2 mixer have biases or not"
        refusals.unless(bias == other, "projectors_bias", bias, needed)
        return {"type": "parallel_mixers", "mixers": [mamba, attention], "mlp": mlp}

    def refuse_wiring(self, key: str, block: Block, config: ModelConfig, refusals: Refusals) -> None:
        super().refuse_wiring(key, block, config, refusals)
        assert isinstance(block, ParallelMixersBlock)
        found = sorted(block.named())
        needed = f"{self.architecture} has one of attention and one of mamba2"
        refusals.unless(found == ["attention", "mamba2"], f"{key}.mixers", ", ".join(found), needed)

    def write_mixers(self, config: ModelConfig, layers: list[ParallelMixersBlock]) -> dict[str, Any]:
        attention, mamba = _attention(layers[0]), _mamba(layers[0])
        head_dim = attention.spec(config.d_model).head_dim
        fields = write_mamba(config, mamba) | self.write_attention(config, attention)
        for block, factors in ((mamba, _MAMBA_FACTORS), (attention, _ATTENTION_FACTORS)):
            fields |= {theirs: getattr(block, ours) for theirs, ours in factors.items()}
        return fields | {
            "head_dim": head_dim,
            "key_multiplier": settings.quotient(attention.spec(config.d_model).scale, head_dim**-0.5),
            "mamba_d_ssm": mamba.inner_width(config.d_model),
            "mamba_rms_norm": mamba.gated_norm,
            "mamba_norm_before_gate": mamba.norm_before_gate,
            "projectors_bias": mamba.proj_bias,
            "ssm_multipliers": list(mamba.projection_multipliers),
        }

    def write_fields(self, config: ModelConfig, layers: list[ParallelMixersBlock]) -> dict[str, Any]:
        mlp = layers[0].mlp
        assert isinstance(mlp, MLPSection)
        return {
            "embedding_multiplier": config.embedding_multiplier,
            "lm_head_multiplier": config.logit_multiplier,
            "mlp_multipliers": [mlp.activation_multiplier, mlp.out_multiplier],
        }

    def mixer_weights(self, ours: str, theirs: str, block: ParallelMixersBlock, config: ModelConfig) -> list[Weight]:
        made: list[Weight] = []
        for name, part in block.named().items():
            made += super().mixer_weights(f"{ours}.mixers.{name}", theirs, part, config)
        return made


def _attention(block: ParallelMixersBlock) -> AttentionBlock:
    return next(part for part in block.mixers if isinstance(part, AttentionBlock))


def _mamba(block: ParallelMixersBlock) -> Mamba2Block:
    return next(part for part in block.mixers if isinstance(part, Mamba2Block))
