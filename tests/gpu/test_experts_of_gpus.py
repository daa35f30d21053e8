"""Experts that two GPUs divide, over NCCL: loss and gradients in fp32 are those of one rank in fp64. On gloo:
tests/distributed/test_experts.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.test_experts import BALANCED, BESIDE, POOLED, UNBALANCED, case, experts, extreme
from tests.support.shared_sequences import Case, differences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("two_gpus"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BOUND = 1e-4
SHARED = {name: value for name, value in BESIDE.items() if name != "bias"}
"""Without the biases, which our kernels do not have."""


def over(
    *settings: dict[str, Any], recompute: str = "none", more: dict[str, Any] | None = None, **parallel: int
) -> Case:
    """A layer of attention and one of Mamba-2, of widths that kernels take."""
    mlp = experts({"n_experts": 8, "d_ff": 48}, *settings, **(more or {}))
    attention = {"type": "attention", "n_heads": 4, "head_dim": 16, "position": {"type": "rotary"}, "mlp": mlp}
    mamba = {"type": "mamba2", "d_state": 16, "head_dim": 16, "chunk_size": 16, "mlp": mlp}
    model = {"d_model": 64, "blocks": {"a": attention, "m": mamba}, "layers": "a m"}
    return replace(case(model, recompute, None, "off", **parallel), seq_len=32, dtype="float32", gpu=True)


CASES = {
    "experts": over(UNBALANCED, expert=2),
    "beside them an MLP, computed again": over(UNBALANCED, SHARED, recompute="full", expert=2),
    "kept by selective recomputation": over(UNBALANCED, SHARED, recompute="selective", expert=2),
    "context": over(POOLED, SHARED, recompute="kernels", context=2, expert=2),
    "tensor": over(BALANCED, SHARED, tensor=2, expert=2),
    "biases": over(UNBALANCED, BESIDE, expert=2),
    "shards alone": over(UNBALANCED),
}


@pytest.mark.parametrize("one", CASES.values(), ids=list(CASES))
def test_loss_and_gradients_are_those_of_one_rank(ranks, one):
    [(loss, gradient, name)] = ranks(2).run(differences, [one])[0]
    assert loss < BOUND and gradient < BOUND, (loss, gradient, name)


@pytest.mark.parametrize("first", [0, 7])
def test_a_gpu_may_get_no_row(ranks, first):
    [(loss, gradient, name)] = ranks(2).run(extreme, [over(UNBALANCED, SHARED, {"top_k": 1}, expert=2)], first)[0]
    assert loss < BOUND and gradient < BOUND, (loss, gradient, name)
