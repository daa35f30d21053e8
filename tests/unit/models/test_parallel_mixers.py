"""Several mixers side by side in one layer: what they compute, from caches too, and what belongs to the block around them."""

from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError

from llmtrain.kernels import platform
from llmtrain.models.backends import backend_problems, servable
from llmtrain.models.block import Block
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig, ParallelMixersBlock
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.mixers.parallel_mixers import ParallelMixers
from llmtrain.models.parameters import parameter_info

MAMBA: dict[str, Any] = {"type": "mamba2", "head_dim": 4, "d_state": 4, "chunk_size": 8}
ATTENTION: dict[str, Any] = {"type": "attention", "n_heads": 2, "position": {"type": "rotary"}}
MIXERS = [
    MAMBA | {"input_multiplier": 0.5, "residual_multiplier": 2.0},
    ATTENTION | {"sliding_window": 5},
    ATTENTION | {"residual_multiplier": 0.25},
]


def config(mixers: list[Any] = MIXERS, **block: Any) -> ModelConfig:
    blocks = {"x": {"type": "parallel_mixers", "mixers": mixers, "mlp": {"d_ff": 24}} | block}
    return ModelConfig.model_validate({"vocab_size": 50, "d_model": 16, "blocks": blocks, "layers": "x*2"})


def build(made: ModelConfig, documents: bool = False) -> CausalLM:
    model = HybridLM(made, platform.cpu(), documents=documents)
    model.init_weights(seed=1)
    return CausalLM(model).eval()


@torch.no_grad()
def test_the_sum_of_the_mixers_with_the_factors_of_each():
    model = build(config(residual_multiplier=0.5)).hybrid
    layer = cast("Block", model.blocks[0])
    mixer = layer.mixer
    assert isinstance(mixer, ParallelMixers) and list(mixer.mixers) == ["mamba2", "attention", "attention_2"]
    x = torch.randn(2, 11, 16)
    contexts = model.context(11, x.device).blocks[0].mixer
    mamba, window, attention = mixer.mixers.values()
    u = layer.norm(x)
    made = 2.0 * mamba(0.5 * u, contexts[0]) + window(u, contexts[1]) + 0.25 * attention(u, contexts[2])
    torch.testing.assert_close(mixer(u, contexts), made)


@torch.no_grad()
def test_reading_on_from_a_cache_and_documents_side_by_side():
    model = build(config(), documents=True)
    ids = torch.randint(50, (2, 23))
    whole, cache = model.logits(ids), model.empty_cache(2, 23)
    model.fill(ids[:, :9], cache)
    steps = [model.next_logits(ids[:, t : t + 1], cache) for t in range(9, 23)]
    torch.testing.assert_close(torch.stack(steps, dim=1), whole[:, 9:], atol=1e-5, rtol=1e-4)
    taken = cache.take(torch.tensor([1, 1]), 30)
    assert taken.nbytes > cache.rows(slice(0, 1)).nbytes > 0

    ids_of = torch.tensor([[0] * 10 + [1] * 13])
    packed = model.logits(ids[:1], ids_of)
    torch.testing.assert_close(packed[:, 10:], model.logits(ids[:1, 10:]), atol=1e-5, rtol=1e-4)


def test_the_layer_is_one_graph():
    model = build(config()).hybrid
    layer, x = cast("Block", model.blocks[0]), torch.randn(1, 16, 16, requires_grad=True)
    context = model.context(16, x.device).blocks[0]
    found = torch.compile(layer, backend="eager", fullgraph=True)(x, x, context)
    torch.testing.assert_close(found, layer(x, x, context))


def test_costs_are_the_sums_and_the_recurrences_own_parameters_are_found():
    model = build(config()).hybrid
    mixer = cast("Block", model.blocks[0]).mixer
    assert isinstance(mixer, ParallelMixers)
    assert mixer.flops(32).total == sum(part.flops(32).total for part in mixer.parts)
    found = {f"blocks.{i}.mixer.mixers.mamba2.ssm.{name}" for i in range(2) for name in ("A_log", "D", "dt_bias")}
    infos = parameter_info(model)
    assert {info.name for info in infos.values() if info.fp32} == found
    assert not any(info.decay for info in infos.values() if info.name in found)
    block = config().blocks["x"]
    assert isinstance(block, ParallelMixersBlock)
    one, *others = (part.saved_bytes(16, 2).everything for part in block.mixers)
    assert block.saved_bytes(16, 2).everything == one + sum(others) - 2 * (2 * 2 * 16)
    assert block.describe(16) == (
        "mamba2: 8 heads x 4, d_state 4, groups 1 | attention: 2 heads x 8, rotary, window 5 | attention: 2 heads x 8, rotary"
    )


def test_a_mixer_without_a_cache_makes_the_layer_read_again(monkeypatch):
    model = build(config())
    mixer = cast("Block", model.hybrid.blocks[0]).mixer
    assert isinstance(mixer, ParallelMixers)
    monkeypatch.setattr(type(mixer.parts[0]), "empty_cache", lambda *_: None)
    assert model.replays()
    ids = torch.randint(50, (1, 8))
    with torch.no_grad():
        cache = model.empty_cache(1, 8)
        model.fill(ids[:, :6], cache)
        found = [model.next_logits(ids[:, t : t + 1], cache) for t in (6, 7)]
        torch.testing.assert_close(torch.stack(found, dim=1), model.logits(ids)[:, 6:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mixers", "message"),
    [
        ([MAMBA], "at least 2 items"),
        ([MAMBA, ATTENTION | {"mlp": {"d_ff": 8}}], "mixers.1.mlp: belongs to the block that holds the mixers"),
        ([MAMBA | {"norm": {"type": "rmsnorm"}}, ATTENTION], "mixers.0.norm: belongs to the block"),
        ([MAMBA, ATTENTION | {"n_heads": 3}], "blocks.x.mixers.1.n_heads: must divide d_model = 16"),
        ([MAMBA | {"d_inner": 18}, ATTENTION], "blocks.x.mixers.0.head_dim: must divide d_inner = 18"),
        ([MAMBA, {"type": "shared_attention", "n_heads": 2}], "type"),
    ],
)
def test_what_is_refused(mixers, message):
    with pytest.raises(ValidationError, match=message):
        config(mixers)


def test_each_mixer_has_a_backend_of_its_own():
    made = config(
        [MAMBA | {"backend": "reference"}, ATTENTION | {"backend": "flash_attn", "softcap": 3.0, "head_dim": 300}]
    )
    (problem,) = backend_problems(made)
    assert problem.path == "blocks.x.mixers.1.backend" and problem.found == "flash_attn"
    block = servable(made, platform.cpu(), "float32").blocks["x"]
    assert isinstance(block, ParallelMixersBlock) and [part.backend for part in block.mixers] == ["reference", "auto"]
