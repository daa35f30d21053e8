"""Muon on one rank: which parameters it takes, and the numbers of its steps."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.models.hybrid import HybridLM
from llmtrain.models.parameters import ParameterInfo, Parameters, parameter_info
from llmtrain.schema.optimizers import AdamWConfig, MuonConfig
from llmtrain.train.optim import build_optimizer, learning_rates
from llmtrain.train.optimizers import adamw, muon
from llmtrain.train.optimizers.muon import newton_schulz
from tests.support.tiny import tiny_config
from tests.unit.train.test_optim import EVERY_KIND

MUON = {"optimizer.type": "muon"}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_matrix(weight: torch.nn.Parameter, rows: tuple[int, ...]) -> Parameters:
    return {weight: ParameterInfo("w", trainable=True, decay=True, fp32=False, matrix_rows=rows)}


def singular_values(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(matrix.double())


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (1, 8)])
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_iterations_bring_singular_values_near_one(shape, size, dtype):
    gradient = random(*shape)
    found = newton_schulz((gradient * size).to(dtype), 5)
    values = singular_values(found)
    assert found.shape == shape and values.min() > 0.5 and values.max() < 1.3
    u, _, v = torch.linalg.svd(gradient.double(), full_matrices=False)
    assert torch.nn.functional.cosine_similarity(found.double().flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_a_gradient_of_zeros_stays_one():
    assert torch.equal(newton_schulz(torch.zeros(4, 6), 5), torch.zeros(4, 6))


def by_muon(changes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names of the parameters that Muon takes, with the rows of their parts."""
    config = tiny_config(Path("shards"), Path("run"), EVERY_KIND | MUON | changes)
    with torch.device("meta"):
        model = HybridLM(config.model)
    optimizer = build_optimizer(model, config.optimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    taken = {parameter: info for parameter, info in parameter_info(model).items() if info.matrix_rows}
    for group in optimizer.param_groups:
        assert len({p in taken for p in group["params"]}) == 1
    return {info.name: info.matrix_rows for info in taken.values()}


def test_projections_are_taken_part_by_part_and_nothing_else_is():
    found = by_muon({})
    assert found["blocks.0.mixer.in_proj.weight"] == (64, 64, 8, 8, 4)  # z, x, B, C, dt
    assert found["blocks.3.mixer.wqkv.weight"] == (32, 32, 32)
    assert found["blocks.3.mlp.w_in.weight"] == (48,)
    assert found["shared.s.0.mlp.w_in.weight"] == (48, 48)  # gate, up
    assert found["blocks.1.shared_input.mlp_adapter.up.weight"] == (48, 48)
    endings = {name.rpartition(".")[0].rpartition(".")[2] for name in found}
    assert endings == {"in_proj", "out_proj", "wqkv", "wo", "w_in", "w_out", "down", "up", "linear"}
    assert all(name.startswith(("blocks.", "shared.")) and name.endswith(".weight") for name in found)


def test_each_experts_matrices_are_stepped_as_if_alone():
    weight, gradients = random(3, 8, 6), [random(3, 8, 6, seed=n) for n in (1, 2)]
    config = MuonConfig(type="muon", lr=0.1)

    def stepped(start: torch.Tensor, of_each: list[torch.Tensor]) -> torch.Tensor:
        parameter = torch.nn.Parameter(start.clone())
        groups = [{"params": [parameter], "lr": 0.1, "weight_decay": 0.1}]
        optimizer = muon.build(config, groups, as_matrix(parameter, (4, 4)))
        for gradient in of_each:
            parameter.grad = gradient
            optimizer.step()
        return parameter.detach()

    together = stepped(weight, gradients)
    alone = torch.stack([stepped(weight[i], [gradient[i] for gradient in gradients]) for i in range(3)])
    torch.testing.assert_close(together, alone)


def test_gated_deltanets_projections_too():
    block = {"type": "gated_deltanet", "n_heads": 4, "n_key_heads": 2, "key_head_dim": 8, "value_head_dim": 6}
    found = by_muon({"model.blocks.g": block, "model.layers": "m (s+m)*2 a g"})
    assert found["blocks.4.mixer.in_proj.weight"] == (16, 16, 24, 24, 4, 4)  # q, k, v, z, b, a
    assert found.keys() - by_muon({}).keys() == {f"blocks.4.mixer.{name}.weight" for name in ("in_proj", "out_proj")}


def test_mixers_side_by_side_as_each_alone():
    mamba = {"type": "mamba2", "d_state": 8, "head_dim": 16}
    attention = {"type": "attention", "n_heads": 4, "n_kv_heads": 2, "output_gate": True, "head_dim": 8}
    block = {"type": "parallel_mixers", "mixers": [mamba, attention]}
    found = by_muon({"model.blocks.p": block, "model.layers": "m (s+m)*2 a p"})
    assert found["blocks.4.mixer.mixers.mamba2.in_proj.weight"] == (64, 64, 8, 8, 4)
    assert found["blocks.4.mixer.mixers.attention.wqkv.weight"] == (32, 32, 16, 16)  # q, its gate, k, v
    assert len(found) == len(by_muon({})) + 4


def test_a_tied_embedding_stays_with_adamw():
    found = by_muon({"model.tie_embeddings": True})
    assert found == {name: parts for name, parts in by_muon({}).items() if name != "head.weight"}
    assert not any("embed" in name for name in found)


def test_groups_by_name_apply_to_matrices_too():
    config = tiny_config(
        Path("shards"), Path("run"), MUON | {"optimizer.groups": [{"match": "*.out_proj.weight", "lr": 0.5}]}
    )
    with torch.device("meta"):
        optimizer = build_optimizer(HybridLM(config.model), config.optimizer)
    assert sorted(set(learning_rates(optimizer))) == [3e-3, 0.5]


def stepped(config: MuonConfig, parts: tuple[int, ...], steps: int, decay: float = 0.0) -> tuple[torch.Tensor, ...]:
    """The weight before and after steps with the gradients random(seed=1), random(seed=2), …"""
    weight = torch.nn.Parameter(random(24, 16))
    before = weight.detach().clone()
    optimizer = muon.build(
        config, [{"params": [weight], "lr": config.lr, "weight_decay": decay}], as_matrix(weight, parts)
    )
    for seed in range(1, steps + 1):
        weight.grad = random(24, 16, seed=seed)
        optimizer.step()
    return before, weight.detach()


def test_two_steps_by_the_formula():
    config = MuonConfig(type="muon", lr=0.1, momentum=0.9)
    before, after = stepped(config, (24,), 2, decay=0.5)
    expected, momentum = before, torch.zeros(24, 16)
    for seed in (1, 2):
        gradient = random(24, 16, seed=seed)
        momentum = 0.9 * momentum + 0.1 * gradient
        direction = newton_schulz(0.1 * gradient + 0.9 * momentum, 5)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(24) * direction
    torch.testing.assert_close(after, expected)


def test_it_is_torchs_muon_to_the_rounding_of_bf16():
    before, ours = stepped(MuonConfig(type="muon", lr=0.1), (24,), 3)
    theirs = torch.nn.Parameter(before.clone())
    optimizer = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for seed in (1, 2, 3):
        theirs.grad = random(24, 16, seed=seed)
        optimizer.step()
    assert (ours - theirs).norm() < 0.05 * (theirs - before).norm()


def test_each_part_is_orthogonalised_by_itself_and_scaled_to_one_rms():
    config = MuonConfig(type="muon", lr=1.0)
    before, after = stepped(config, (16, 8), 1)
    for part, gradient in zip((after - before).split((16, 8)), random(24, 16, seed=1).split((16, 8)), strict=True):
        values = singular_values(part) / (0.2 * math.sqrt(16))
        assert values.min() > 0.5 and values.max() < 1.3
        torch.testing.assert_close(part, -0.2 * math.sqrt(16) * newton_schulz(gradient, 5))
        assert float(part.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_all_else_is_stepped_by_adamw_itself():
    weights = [[torch.nn.Parameter(random(6)), torch.nn.Parameter(random(4, 4))] for _ in range(2)]
    groups = [[{"params": some, "lr": 0.1, "weight_decay": 0.3}] for some in weights]
    ours = muon.build(MuonConfig(type="muon", lr=0.1), groups[0], {})
    theirs = adamw.build(AdamWConfig(lr=0.1), groups[1], {})
    for seed in (1, 2):
        for some in weights:
            for parameter in some:
                parameter.grad = random(*parameter.shape, seed=seed)
        ours.step()
        theirs.step()
    for a, b in zip(*weights, strict=True):
        assert torch.equal(a, b)


def test_a_parameter_without_gradient_stays_as_it_is_with_its_state():
    weight = torch.nn.Parameter(random(8, 8))
    optimizer = muon.build(MuonConfig(type="muon", lr=0.1), [{"params": [weight]}], as_matrix(weight, (8,)))
    weight.grad = random(8, 8, seed=1)
    optimizer.step()
    before = [weight.detach().clone(), optimizer.state[weight]["momentum_buffer"].clone()]
    weight.grad = None
    optimizer.step()
    assert torch.equal(weight, before[0]) and torch.equal(optimizer.state[weight]["momentum_buffer"], before[1])
