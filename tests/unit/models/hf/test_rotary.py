"""Frequencies of published rotary positions against transformers' own functions."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmtrain.models.hf.llama import Llama
from llmtrain.models.layers import rotary_tables
from llmtrain.models.sections.layers import RotaryPosition
from tests.support import published_configs as published

QWEN3 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
OLMO3 = {
    **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
}
DEEPSEEK = {
    **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707},
}
GPT_OSS = QWEN3 | {"truncate": False, "factor": 32.0, "original_max_position_embeddings": 4096}
NO_FACTOR = QWEN3 | {"factor": None, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("scaling", [QWEN3, OLMO3, DEEPSEEK, GPT_OSS, NO_FACTOR], ids=str)
def test_yarn(scaling, theta):
    config: dict[str, Any] = published.LLAMA_2_7B | {"rope_scaling": scaling, "rope_theta": theta}
    section = Llama().read_config(config)
    rotary = RotaryPosition.model_validate(section["blocks"]["attn"]["position"])
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig.from_dict(config), torch.device("cpu"))
    positions = torch.arange(0, 4096, 7)
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = rotary_tables(positions, 128, rotary)
    torch.testing.assert_close(cos, angles.cos() * amplitude, atol=1e-3, rtol=0)
    torch.testing.assert_close(sin, angles.sin() * amplitude, atol=1e-3, rtol=0)
    cos, sin = rotary_tables(torch.ones(1), 128, rotary)
    torch.testing.assert_close(sin[0, 0], frequencies.sin() * amplitude, atol=1e-8, rtol=1e-6)
