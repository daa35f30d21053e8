"""Cases of test_ssd_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import pytest
import torch

from llmtrain.kernels import platform, registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.step_triton import TritonAttentionStep
from llmtrain.kernels.conv1d.step_triton import TritonConv1dStep
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.step_triton import TritonSSDStep
from tests.support import steps

CPU = platform.cpu()
MANY = Platform("cpu", "cpu", "", 1 << 30, num_sms=132)


def reference(operation: registry.Operation, spec: registry.Spec):
    return registry.resolve(operation, "reference", spec, CPU).build(spec, CPU)


def assert_attends(spec: AttentionSpec, where: Platform, capacity: int, position: int, first: list[int]) -> None:
    inputs = steps.attention_inputs(spec, capacity, position, first, torch.float32)
    kernel = TritonAttentionStep(spec, where)
    kernel.slots = 16  # several tiles, ragged ones too, in a small cache
    expected = reference("attention_step", spec)(*steps.widened(inputs))
    torch.testing.assert_close(kernel(*inputs).double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", steps.ATTENTION.values(), ids=steps.ATTENTION.keys())
def test_attention(spec):
    """Two splits; rows that begin at the first, a middle and the last slot."""
    assert_attends(spec, MANY, 100, 75, [0, 31, 75])


@pytest.mark.parametrize("name", ["mha", "everything", "everything-gqa"])
@pytest.mark.parametrize("position", [0, 15, 16, 299])
def test_attention_where_most_splits_have_nothing_to_do(name, position):
    assert TritonAttentionStep(steps.ATTENTION[name], MANY).splits(2, 300) == 5
    assert_attends(steps.ATTENTION[name], MANY, 300, position, [0, position // 2])


@pytest.mark.parametrize("name", ["mha", "mha-160", "everything-gqa", "mqa-40-heads"])
def test_attention_of_one_split(name):
    spec = steps.ATTENTION[name]
    one = Platform("cpu", "cpu", "", 1 << 30, num_sms=1)
    kernel = TritonAttentionStep(spec, one)
    batch = 32  # as many programs as the processor wants
    assert kernel.splits(batch, 60) == 1
    assert_attends(spec, one, 60, 59, list(range(batch)))


@pytest.mark.parametrize("name", ["mha", "gqa"])
@pytest.mark.parametrize("capacity", [60, 300])
def test_attention_of_a_row_without_slots_is_zero(name, capacity):
    assert_attends(steps.ATTENTION[name], MANY, capacity, 3, [0, 4])


@pytest.mark.parametrize("name", ["mha", "everything", "gqa-80", "sinks-window-gqa", "mqa-40-heads"])
@pytest.mark.parametrize("size", [8, 32])
def test_attention_through_a_table_of_pages_is_the_same_in_every_bit(name, size):
    inputs = steps.attention_inputs(steps.ATTENTION[name], 100, 75, [0, 31, 75], torch.float32)
    kernel = TritonAttentionStep(steps.ATTENTION[name], MANY)
    kernel.slots = 16
    paged, table = steps.in_pages(inputs, size)
    kernel.splits = lambda batch, capacity: 2  # they go by the capacity, which is that of whole pages
    assert torch.equal(kernel(*paged, pages=table), kernel(*inputs))


def test_attention_in_fp16():
    spec = steps.ATTENTION["alibi-gqa"]
    inputs = steps.attention_inputs(spec, 100, 75, [0, 31], torch.float16)
    ours = TritonAttentionStep(spec, MANY)(*inputs)
    assert ours.dtype == torch.float16
    expected = reference("attention_step", spec)(*steps.widened(inputs))
    torch.testing.assert_close(ours.double(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("spec", steps.SSD.values(), ids=steps.SSD.keys())
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_ssd(spec, dtype, tolerance):
    inputs = steps.ssd_inputs(spec, 2, dtype)
    exact = steps.widened(inputs)
    expected = reference("ssd_step", spec)(*exact)
    y = TritonSSDStep(spec, CPU)(*inputs)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(inputs[-1].double(), exact[-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", steps.CONV.values(), ids=steps.CONV.keys())
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_conv1d(spec, biased, channels_last):
    inputs = steps.conv_inputs(spec, 2, biased, torch.float32, channels_last)
    exact = steps.widened(inputs)
    expected = reference("conv1d_step", spec)(*exact)
    torch.testing.assert_close(TritonConv1dStep(spec, CPU)(*inputs).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inputs[1].double(), exact[1], atol=0, rtol=0)
