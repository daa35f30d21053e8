"""Compressed convolutional attention against ZAYA1's layer in transformers: outputs and every gradient."""

import random
from typing import Any

import pytest
import torch
from transformers import ZayaConfig
from transformers.models.zaya.modeling_zaya import ZayaAttention, ZayaRotaryEmbedding

from llmtrain.kernels import platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.mixers.compressed_attention import CompressedAttention

NAMES = {
    "conv.weight": "qkv_proj.conv_qk_depthwise.weight",
    "conv.bias": "qkv_proj.conv_qk_depthwise.bias",
    "conv.head_weight": "qkv_proj.conv_qk_grouped.weight",
    "conv.head_bias": "qkv_proj.conv_qk_grouped.bias",
    "key_scale": "qk_norm.temp",
    "wo.weight": "o_proj.weight",
    "wo.bias": "o_proj.bias",
    **{
        f"wqkv.{kind}": [f"qkv_proj.{name}.{kind}" for name in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")]
        for kind in ("weight", "bias")
    },
}
"""Our parameters, and theirs; several are one another's rows in order."""


def pair(seed: int) -> tuple[CompressedAttention, ZayaAttention, ZayaRotaryEmbedding]:
    """The same layer in both, with every weight away from its initial value."""
    rng, window = random.Random(seed), "hybrid_sliding" if seed % 3 == 0 else "hybrid"
    kv_heads, bias = rng.choice([1, 2, 3]), rng.random() < 0.5
    sizes: dict[str, Any] = {"num_attention_heads": kv_heads * rng.choice([1, 2, 3]), "num_key_value_heads": kv_heads}
    times: dict[str, Any] = {"cca_time0": rng.choice([1, 2, 3]), "cca_time1": rng.choice([1, 2, 3])}
    head_dim, d_model, fraction = rng.choice([4, 8]), rng.choice([12, 20]), rng.choice([0.5, 1.0])
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": fraction}
    theirs_config = ZayaConfig(
        hidden_size=d_model,
        head_dim=head_dim,
        attention_bias=bias,
        sliding_window=5,
        layer_types=[window],
        num_hidden_layers=1,
        rope_parameters={"hybrid": rope, "hybrid_sliding": rope},
        **sizes,
        **times,
    )
    theirs_config._attn_implementation = "eager"
    block = {
        "type": "compressed_attention",
        "n_heads": sizes["num_attention_heads"],
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "position": {"type": "rotary", "theta": 100.0, "fraction": fraction},
        "sliding_window": 5 if window == "hybrid_sliding" else None,
        "qkv_bias": bias,
        "out_bias": bias,
        "d_conv": times["cca_time0"],
        "d_head_conv": times["cca_time1"],
    }
    config = ModelConfig.model_validate(
        {"vocab_size": 8, "d_model": d_model, "max_seq_len": 64, "blocks": {"c": block}, "layers": "c"}
    )
    torch.manual_seed(seed)
    theirs, rotary = ZayaAttention(theirs_config, 0), ZayaRotaryEmbedding(theirs_config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.4)
    ours = HybridLM(config, platform.cpu(), torch.float32).blocks[0].mixer
    assert isinstance(ours, CompressedAttention)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(gathered(dict(theirs.named_parameters()), name).view_as(parameter))
    return ours, theirs, rotary


def gathered(tensors: dict, name: str) -> torch.Tensor:
    found = NAMES[name]
    return tensors[found] if isinstance(found, str) else torch.cat([tensors[one] for one in found])


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 24))])
@pytest.mark.parametrize("seq_len", [1, 13])
def test_outputs_and_gradients_are_those_of_transformers(seed, seq_len):
    ours, theirs, rotary = pair(seed)
    kind, reach = theirs.layer_type, theirs.sliding_window or seq_len
    x = torch.randn(2, seq_len, theirs.hidden_size)
    place = torch.arange(seq_len)
    hidden = (place[None] > place[:, None]) | (place[:, None] - place[None] >= reach)
    mask = torch.zeros(seq_len, seq_len).masked_fill(hidden, float("-inf"))[None, None]
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    theirs_out, _ = theirs(
        inputs[0],
        attention_mask={"causal": mask, "conv": None},
        position_embeddings=rotary(x, place[None], kind),
    )
    ours_out = ours(inputs[1], ours.prepare(seq_len, x.device, None))
    torch.testing.assert_close(ours_out, theirs_out, atol=1e-4, rtol=1e-4)
    up = torch.randn_like(ours_out)
    theirs_out.backward(up)
    ours_out.backward(up)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-4, rtol=1e-4)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        expected = gathered(gradients, name).view_as(parameter)
        torch.testing.assert_close(
            parameter.grad, expected, atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
