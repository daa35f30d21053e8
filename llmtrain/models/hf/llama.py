"""Llama (Touvron et al., arXiv:2307.09288; Llama 3, arXiv:2407.21783) as transformers' LlamaForCausalLM."""

from transformers import LlamaConfig

from llmtrain.models.hf.decoder import Decoder


class Llama(Decoder):
    """Not read besides: pretraining_tp, a split of matrix products."""

    kind = LlamaConfig
