"""DeepSeek-V3 (arXiv:2412.19437) as transformers' DeepseekV3ForCausalLM: latent attention, and experts behind the first layers."""

from transformers import DeepseekV3Config

from llmtrain.models.hf.experts import BIASED_SIGMOID, SIGMOID_FIELDS, ExpertsBehindDense
from llmtrain.models.hf.latent_attention import LatentLayers


class DeepseekV3(ExpertsBehindDense, LatentLayers):
    """Not read, because the class computes without them: layers that predict further tokens (num_nextn_predict_layers)."""

    kind = DeepseekV3Config
    router = BIASED_SIGMOID
    router_fields = SIGMOID_FIELDS
