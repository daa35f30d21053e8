"""A small model whose layers have experts, in this process."""

from typing import Any

from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from tests.support.models import ATTENTION, MAMBA, ROTARY, VOCAB, large_weights

RELU2 = {"type": "experts", "n_experts": 4, "top_k": 2, "d_ff": 24, "activation": "relu2"}
BIASED = {"type": "sigmoid", "choice_bias": True, "bias_rate": 0.5}


def config(dropout: float = 0.0, **experts: Any) -> ModelConfig:
    """A layer of attention, one of Mamba-2 and one of dense MLPs; experts: settings of the first two's."""
    mlp = {**RELU2, **experts}
    blocks = {
        "a": ATTENTION | {"position": ROTARY, "mlp": mlp},
        "m": MAMBA | {"mlp": mlp},
        "d": ATTENTION | {"position": ROTARY},
    }
    settings = {"vocab_size": VOCAB, "d_model": 32, "max_seq_len": 300, "blocks": blocks, "layers": "a m d"}
    return ModelConfig.model_validate(settings | {"dropout": dropout})


def build(**experts: Any) -> CausalLM:
    """Such a model, of seed 5, with weights large enough that its routers tell tokens apart."""
    return CausalLM(large_weights(HybridLM(config(**experts), platform.cpu())))
