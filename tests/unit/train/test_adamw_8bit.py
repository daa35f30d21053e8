"""AdamW with moments in 8 bits: what the codes keep, and how near its steps come to AdamW's."""

import importlib.util

import pytest
import torch

from llmtrain.errors import UserError
from llmtrain.models.parameters import ParameterInfo, Parameters
from llmtrain.schema.optimizers import AdamW8bitConfig
from llmtrain.train.optimizers import adamw_8bit
from llmtrain.train.optimizers.adamw_8bit import adamw_update, build, dequantized, in_blocks, quantized

CONFIG = AdamW8bitConfig(type="adamw_8bit", lr=0.01)
SIGNED, UNSIGNED = adamw_8bit._maps(torch.device("cpu"))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_matrix(parameter: torch.nn.Parameter) -> Parameters:
    rows = (parameter.shape[0],)
    return {parameter: ParameterInfo("w", trainable=True, decay=True, fp32=False, matrix_rows=rows)}


def of_blocks(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each element's block, by loops."""
    found = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 256):
            found[row, start : start + 256] = x[row, start : start + 256].abs().max()
    return found


@pytest.mark.parametrize("columns", [1, 32, 256, 257, 600])
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e8])
@pytest.mark.parametrize("code_map", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_codes_keep_values_to_a_hundredth_of_their_blocks_largest(columns, size, code_map):
    x = random(3, columns) * size * torch.logspace(0, -6, columns)
    x = x if code_map is SIGNED else x.square()
    blocks = 3 * -(-columns // 256)
    codes, scales = quantized(in_blocks(x), code_map)
    assert (codes.dtype, codes.shape) == (torch.uint8, (blocks, 256))
    assert (scales.dtype, scales.shape) == (torch.float32, (blocks,))
    found, largest = dequantized(codes, scales, code_map).view(3, -1)[:, :columns], of_blocks(x)
    assert ((found - x).abs() <= 0.01 * largest).all()
    small = (x.abs() > 1e-2 * largest) & (x.abs() < 1e-1 * largest)
    assert ((found - x).abs()[small] <= 0.15 * x.abs()[small]).all()


def test_a_block_of_zeros_stays_one_and_a_square_above_zero_stays_above():
    x = torch.zeros(2, 256)
    for code_map in (SIGNED, UNSIGNED):
        assert torch.equal(dequantized(*quantized(x, code_map), code_map), x)
    x[0, 0], x[0, 1] = 1.0, 1e-30
    found = dequantized(*quantized(x, UNSIGNED), UNSIGNED)
    assert found[0, 1] > 0 and torch.equal(found == 0, x == 0)


def test_what_fills_up_a_block_is_zero_in_both_maps():
    for code, code_map in zip(adamw_8bit._zero_codes(), (SIGNED, UNSIGNED), strict=True):
        codes = in_blocks(torch.full((2, 300), 255, dtype=torch.uint8), code).view(2, 512)
        assert (code_map[codes[:, 300:].int()] == 0).all() and (codes[:, :300] == 255).all()


def stepped(kind: str, gradients: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    groups = [{"params": [parameter], "lr": 0.01, "weight_decay": 0.1}]
    if kind == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=CONFIG.betas, eps=CONFIG.eps)
    else:
        optimizer = build(CONFIG, groups, as_matrix(parameter))
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def test_the_first_step_is_adamws_and_later_ones_are_near():
    weight, gradients = random(40, 300), [random(40, 300, seed=n) for n in range(1, 21)]
    torch.testing.assert_close(stepped("8bit", gradients[:1], weight), stepped("adamw", gradients[:1], weight))
    mine, reference = (stepped(kind, gradients, weight) for kind in ("8bit", "adamw"))
    assert not torch.equal(mine, reference)
    assert torch.linalg.vector_norm(mine - reference) < 0.03 * torch.linalg.vector_norm(reference - weight)


def test_rows_at_once_do_not_matter(monkeypatch):
    weight, gradients = random(40, 300), [random(40, 300, seed=n) for n in (1, 2, 3)]
    whole = stepped("8bit", gradients, weight)
    monkeypatch.setattr(adamw_8bit, "_ELEMENTS_AT_ONCE", 7 * 300)
    assert torch.equal(stepped("8bit", gradients, weight), whole)


def test_other_parameters_are_stepped_by_adamw():
    matrix, vector = (torch.nn.Parameter(random(*shape)) for shape in ((8, 8), (8,)))
    group = {"params": [matrix, vector], "lr": 0.01, "weight_decay": 0.0}
    optimizer = build(CONFIG, [group], as_matrix(matrix))
    expected = stepped("adamw", [torch.ones(8)], vector.detach() / (1 - 0.01 * 0.1))  # whose decay then leaves `vector`
    matrix.grad, vector.grad = torch.ones(8, 8), torch.ones(8)
    optimizer.step()
    torch.testing.assert_close(vector.detach(), expected)
    assert set(optimizer.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}
    assert {t.dtype for name, t in optimizer.state[matrix].items() if name.endswith("codes")} == {torch.uint8}


def test_a_state_that_is_loaded_keeps_its_codes():
    parameter = torch.nn.Parameter(random(8, 300))
    optimizers = [build(CONFIG, [{"params": [parameter], "weight_decay": 0.0}], as_matrix(parameter)) for _ in range(2)]
    parameter.grad = random(8, 300, seed=1)
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    before, after = (optimizer.state[parameter] for optimizer in optimizers)
    assert {name: t.dtype for name, t in before.items()} == {name: t.dtype for name, t in after.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_torchao_is_asked_for(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"adamw_8bit needs torchao: pip install"):
        build(CONFIG, [], {})


@pytest.mark.slow
def test_compiled_it_is_the_same():
    update = torch.compile(adamw_update, fullgraph=True)
    for blocks in (5, 7, 3):
        moments = [*quantized(random(blocks, 256), SIGNED), *quantized(random(blocks, 256).square(), UNSIGNED)]
        numbers, step = torch.tensor([0.01, 0.1, 0.9, 0.95, 1e-8]), torch.tensor(3.0)
        weight, gradient = random(blocks, 256, seed=1), random(blocks, 256, seed=2)
        for tensor in (weight, gradient, *moments):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        found, expected = (
            one(weight, gradient, moments, step, numbers, (SIGNED, UNSIGNED)) for one in (update, adamw_update)
        )
        for mine, reference in zip(found, expected, strict=True):
            if mine.dtype == torch.uint8:  # a value between two codes may be rounded to either
                assert (mine.int() - reference.int()).abs().max() <= 1
            else:
                torch.testing.assert_close(mine, reference)
