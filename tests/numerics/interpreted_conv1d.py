"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import pytest
import torch

from llmtrain.kernels.conv1d.reference import causal_conv1d_silu
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.conv1d.triton import TritonConv1d, conv1d_backward, conv1d_forward
from llmtrain.kernels.conv1d.triton_launch import Launch, Tile
from llmtrain.kernels.operation import leaves
from tests.support import kernels as support


def made(
    channels: int, width: int, run: int = 8, group: int = 4, parallel_runs: int = 2, ahead: bool = False
) -> TritonConv1d:
    """Several programs, runs and steps in a small problem."""
    tile = Tile(16, parallel_runs, run, group, 1, prefetch=ahead)
    return TritonConv1d(Conv1dSpec(channels, width, "float32"), Launch(tile, tile, min_programs=None))


@pytest.mark.parametrize(
    "channels, width, biased",
    [(40, 4, True), (16, 4, False), (7, 3, True), (20, 2, True), (33, 2, False), (17, 1, True)],
)
@pytest.mark.parametrize("batch, seq_len", [(1, 1), (2, 3), (1, 16), (2, 37)])
def test_agrees_with_the_reference(channels, width, biased, batch, seq_len):
    tensors = support.conv_inputs(batch, seq_len, channels, width, biased, torch.float32)
    ours = support.outcome(made(channels, width), tensors)
    support.assert_agrees(ours, support.outcome(causal_conv1d_silu, tensors, torch.float64))
    assert ours[0].is_contiguous()
    assert all(t.dtype == torch.float32 for t in ours)


@pytest.mark.parametrize(
    "run, group, parallel_runs",
    [*(pytest.param(*one, marks=pytest.mark.ci) for one in ((4, 4, 1), (16, 8, 4))), (6, 3, 2), (32, 4, 1)],
)
def test_the_launch_changes_nothing_but_rounding(run, group, parallel_runs):
    tensors = support.conv_inputs(2, 43, 20, 4, True, torch.float32)
    ours = support.outcome(made(20, 4, run, group, parallel_runs), tensors)
    support.assert_agrees(ours, support.outcome(causal_conv1d_silu, tensors, torch.float64))


@pytest.mark.ci
@pytest.mark.parametrize("run, group, parallel_runs", [(4, 4, 1), (16, 4, 2), (6, 3, 2)])
def test_when_tokens_are_read_changes_no_bit(run, group, parallel_runs):
    tensors = support.conv_inputs(2, 43, 20, 4, True, torch.float32)
    runs = [support.outcome(made(20, 4, run, group, parallel_runs, ahead), tensors) for ahead in (False, True)]
    support.assert_equal(*runs)


@pytest.mark.ci
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[5, 1, 16, 11], [1, 1, 1, 20], [8, 8, 7]])
def test_packed_documents_equal_the_documents_apart(width, lengths):
    tensors = support.conv_inputs(2, sum(lengths), 20, width, True, torch.float32)
    # A number may come again: a document is a run.
    ids = torch.cat([torch.full((2, n), i % 2) for i, n in enumerate(lengths)], 1)

    def apart(x, weight, bias):
        return torch.cat([causal_conv1d_silu(piece, weight, bias) for piece in x.split(lengths, 1)], 1)

    kernel = made(20, width)
    ours = support.outcome(lambda *t: kernel(*t, document_ids=ids), tensors)
    support.assert_agrees(ours, support.outcome(apart, tensors, torch.float64))


def test_strides_of_every_kind_are_read():
    """Channels not side by side, one row expanded over the batch, and a gradient that is a slice."""
    x, weight, bias = support.conv_inputs(2, 9, 20, 4, True, torch.float32)
    for strided in (x.transpose(1, 2).contiguous().transpose(1, 2), x[:1].expand(2, -1, -1), x[:, ::2], x[..., ::2]):
        channels = strided.shape[2]
        tensors = [strided, weight[:channels], bias[:channels]]
        kernel = made(channels, 4)
        exact = support.outcome(causal_conv1d_silu, tensors, torch.float64)
        support.assert_agrees(support.outcome(kernel, tensors), exact)

    def sliced(function):
        return lambda *t: torch.cat((function(*t), t[0]), -1)

    ours = support.outcome(sliced(made(20, 4)), [x, weight, bias])
    support.assert_agrees(ours, support.outcome(sliced(causal_conv1d_silu), [x, weight, bias], torch.float64))


def test_gradients_have_their_tensors_dtypes():
    x, weight, bias = support.conv_inputs(1, 9, 20, 4, True, torch.float32)
    halved = support.outcome(made(20, 4), [x.half(), weight, bias.half()])
    assert [t.dtype for t in halved] == [torch.float16, torch.float16, torch.float32, torch.float16]
    exact = support.outcome(causal_conv1d_silu, [x.half(), weight, bias.half()], torch.float64)
    support.assert_agrees(halved, exact, 2e-2)


def test_two_runs_are_equal_bit_by_bit():
    tensors = support.conv_inputs(2, 37, 20, 4, True, torch.float32)
    runs = [support.outcome(made(20, 4), tensors) for _ in range(2)]
    support.assert_equal(*runs)


def test_the_operator_is_whole():
    """Schema, fake, autograd and compilation without a graph break, with and without what is optional."""
    kernel = made(20, 4)
    ids = torch.zeros(2, 9, dtype=torch.int32)
    for biased, documents in ((True, None), (False, ids)):
        tensors = support.conv_inputs(2, 9, 20, 4, biased, torch.float32)
        support.assert_whole(conv1d_forward, (*leaves(tensors), documents, kernel.options))
        support.assert_whole(conv1d_backward, (torch.ones(2, 9, 20), *tensors, documents, kernel.options))
        support.assert_compiles(lambda *t, documents=documents: kernel(*t, document_ids=documents), tensors)
