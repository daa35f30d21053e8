"""A window as long as the model's sequences: nothing is hidden, so kernels of plain attention serve; beyond them it holds."""

from typing import Any

import torch

from llmtrain.kernels.platform import Platform, cpu
from llmtrain.models.backends import chosen
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.mixers.base import mixers_of

H200 = Platform("nvidia", "sm90", "H200", 140 << 30, 132)
BLOCK = {"type": "attention", "n_heads": 4, "position": {"type": "rotary"}, "sliding_window": 32}


def config(max_seq_len: int, d_model: int = 32) -> ModelConfig:
    settings = {
        "vocab_size": 64,
        "d_model": d_model,
        "max_seq_len": max_seq_len,
        "blocks": {"a": BLOCK},
        "layers": "a a",
    }
    return ModelConfig.model_validate(settings)


def test_kernels_are_chosen_as_without_it():
    def attention(max_seq_len: int) -> str | None:
        found = chosen(config(max_seq_len, d_model=512), H200, "bfloat16")
        return next(one.backend for one in found if one.kernel.operation == "attention")

    assert attention(32) == "sdpa:cudnn"
    assert attention(33) in ("triton", "flex")  # cuDNN's has no window
    mixers: list[Any] = [mixer for _, mixer in mixers_of(HybridLM(config(32), cpu(), torch.float32))]
    assert [mixer.kernel.spec.sliding_window for mixer in mixers] == [None, None]


def test_longer_sequences_have_the_window():
    models = [HybridLM(config(length), cpu(), torch.float32) for length in (32, 64)]
    for model in models:
        model.init_weights(1)
    for length in (20, 32, 50):
        ids = torch.arange(length).view(1, -1) % 64
        short, long = (model(ids, model.context(length, ids.device)) for model in models)
        torch.testing.assert_close(short, long)
