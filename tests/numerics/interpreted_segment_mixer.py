"""Mamba-2 mixers over segments that ranks share. Cases of test_mamba_parts_triton.py; pytest does not collect them by itself."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmtrain.kernels.mamba_mixer.reference import ReferenceMambaMixer
from llmtrain.models.mixers.mamba2_fused_segments import segment_mixer, segment_mixer_backward, segment_mixer_forward
from llmtrain.models.mixers.mamba2_segments import SegmentScan
from llmtrain.models.segments import ContextParallelRanks
from tests.numerics.interpreted_mixer import made
from tests.support import kernels as support

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
GROUPED = support.mixer_spec(2, 12, 5, n_groups=2, norm_groups=2)
CASES: dict[str, tuple[Any, int, int, int, bool, float | None, dict[str, Any]]] = {
    "several chunks": (support.mixer_spec(1, 16, 16), 2, 1, 20, True, None, {}),
    "three ranks, documents, groups, two sequences": (GROUPED, 3, 2, 6, True, 0.1, {}),
    "documents everywhere, halves of chunks": (GROUPED, 2, 1, 37, False, 0.3, {"halves": True, "num_sms": 1000}),
    "segments as short as the convolution reaches": (
        support.mixer_spec(1, 16, 8, dt_limit=(0.05, 0.3)),
        2,
        1,
        3,
        True,
        0.2,
        {},
    ),
    "one tap": (support.mixer_spec(1, 16, 8, width=1), 2, 1, 5, True, 0.2, {}),
}
"""spec, ranks, batch, tokens of a segment, bias, share of tokens that begin a document, launch."""


def rank(name: str, rank: int, file: Path) -> None:
    """What one rank of a group computes, saved: the output, and the gradients of its part and of the parameters."""
    spec, size, batch, n, biased, _, launch = CASES[name]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(file / "store"), size), rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    segments = ContextParallelRanks(rank, size, dist.group.WORLD.group_name)
    token, *rest = support.mixer_inputs(spec, batch, 2 * size * n, biased)[:7]
    context = SegmentScan.of(segments, token.shape[1], token.device, documents(name), spec.conv1d.width)
    leaves: list[Any] = [t if t is None else t.requires_grad_() for t in (segments.take(token).clone(), *rest)]
    out = segment_mixer(made(spec, **launch), context, *leaves)
    found = torch.autograd.grad(out, [t for t in leaves if t is not None], segments.take(upstream(name)))
    torch.save([out.detach(), *found], file / f"{rank}.pt")
    dist.destroy_process_group()


def documents(name: str) -> torch.Tensor | None:
    _, size, batch, n, _, borders, _ = CASES[name]
    begins = torch.rand(batch, 2 * size * n, generator=torch.Generator().manual_seed(n)) < (borders or 0)
    return None if borders is None else begins.long().cumsum(1).to(torch.int32)


def upstream(name: str) -> torch.Tensor:
    spec, size, batch, n, *_ = CASES[name]
    g = torch.Generator().manual_seed(3)
    return torch.randn(batch, 2 * size * n, spec.gated_norm.dim, generator=g)


SLOW = ("documents everywhere, halves of chunks",)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else pytest.mark.ci) for one in CASES]
)
def test_ranks_that_share_sequences_have_the_output_and_gradients_of_one(name, tmp_path):
    spec, size, batch, n, biased, *_ = CASES[name]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank, args=(name, i, tmp_path)) for i in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    parts = [torch.load(tmp_path / f"{i}.pt") for i in range(size)]

    leaves: list[Any] = [
        t if t is None else t.double().requires_grad_()
        for t in support.mixer_inputs(spec, batch, 2 * size * n, biased)[:7]
    ]
    expected = ReferenceMambaMixer(spec)(*leaves, document_ids=documents(name))
    wanted = torch.autograd.grad(expected, [t for t in leaves if t is not None], upstream(name).double())
    for i, part in enumerate(parts):
        for ours, whole in zip(part, (expected.detach(), wanted[0]), strict=False):
            assert_close(ours, ContextParallelRanks(i, size).take(whole), whole)
    for ours, whole in zip(zip(*(part[2:] for part in parts), strict=True), wanted[1:], strict=True):
        assert_close(torch.stack(ours).sum(0), whole, whole)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> None:
    assert float((ours.double() - exact).norm() / scale.norm()) < 1e-5


@pytest.fixture
def alone(tmp_path):
    """A group of this process alone, which holds both segments."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield ContextParallelRanks(0, 1, dist.group.WORLD.group_name)
    dist.destroy_process_group()


@pytest.mark.ci
@pytest.mark.parametrize(("batch", "packed"), [(1, False), (2, True)])
def test_the_operators_say_what_they_do(alone, batch, packed):
    """Schema, fake and autograd; shapes and strides."""
    spec = support.mixer_spec(1, 16, 16)
    tensors, kernel = support.mixer_inputs(spec, batch, 20)[:7], made(spec)
    ids = torch.arange(20).div(7, rounding_mode="floor").int().repeat(batch, 1) if packed else None
    context = SegmentScan.of(alone, 20, torch.device("cpu"), ids, 4)
    masks, ranks = (context.ids, context.conv_ids, context.reads, context.between), (0, 1, alone.group)
    how = (1, None, None, 1, 1e-5, False, kernel.options)
    leaves = [t.detach().requires_grad_() for t in tensors]
    torch.library.opcheck(segment_mixer_forward, (*leaves, *masks, *ranks, *how), test_utils=CHECKS)
    out, *kept = segment_mixer_forward(*tensors, *masks, *ranks, *how)
    arguments = (out, *tensors, *masks[:2], *kept, *ranks, 1, None, None, False, kernel.options)
    torch.library.opcheck(segment_mixer_backward, arguments, test_utils=CHECKS)
