"""The kernel of prompts that are read into a cache: it must not be planned anew for every length, as cuDNN's is."""

from typing import Any

import pytest
import torch

from llmtrain.kernels.platform import Platform, cpu
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.mixers.attention import Attention
from llmtrain.models.mixers.base import mixers_of

H200 = Platform("nvidia", "sm90", "H200", 140 << 30, 132)


def kernels(platform: Platform, **block: Any) -> tuple[str, str]:
    """Names of the functions that compute attention in training and of prompts."""
    settings = {"type": "attention", "n_heads": 8, "position": {"type": "rotary"}, **block}
    config = ModelConfig.model_validate(
        {"vocab_size": 64, "d_model": 512, "max_seq_len": 64, "blocks": {"a": settings}, "layers": "a"}
    )
    [mixer] = [mixer for _, mixer in mixers_of(HybridLM(config, platform, torch.bfloat16))]
    assert isinstance(mixer, Attention)
    cache = mixer.empty_cache(1, 8, torch.device("cpu"))
    return mixer.kernel.kernel.__name__, cache.kernel.kernel.__name__


@pytest.mark.parametrize("n_kv_heads", [8, 2])
def test_prompts_have_flash_attention_where_training_has_cudnn(n_kv_heads: int):
    assert kernels(H200, n_kv_heads=n_kv_heads) == ("_cudnn", "_flash")


def test_other_kernels_serve_both():
    assert kernels(H200, backend="sdpa:flash") == ("_flash", "_flash")
    assert kernels(cpu()) == ("_cpu", "_cpu")
