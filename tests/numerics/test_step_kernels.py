"""One token at a time from a cache gives what the kernels for whole sequences give: the references."""

import pytest
import torch

from llmtrain.kernels import platform, registry
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.ssd.spec import SSDSpec
from tests.support import steps

CPU = platform.cpu()


def built(operation: registry.Operation, spec: registry.Spec):
    return registry.resolve(operation, "reference", spec, CPU).build(spec, CPU)


@pytest.mark.parametrize("position", [0, 7, 60, 69])
@pytest.mark.parametrize("spec", steps.ATTENTION.values(), ids=steps.ATTENTION.keys())
def test_attention_is_the_last_row_of_attention_over_the_sequence(spec, position):
    """Rows begin at different slots; what no row may see is NaN."""
    first = [0, min(5, position), position]
    q, k, v, at, starts, *sinks = steps.attention_inputs(spec, 70, position, first, torch.float32)
    ours = built("attention_step", spec)(q, k, v, at, starts, *sinks)
    assert ours.shape == q.shape
    whole = built("attention", spec)
    for row, start in enumerate(first):
        # The kernel for sequences reads keys that the window hides: give it something finite there.
        keys, values = (t[row, :, start : position + 1].transpose(0, 1)[None].nan_to_num() for t in (k, v))
        queries = q[row].expand(1, position + 1 - start, -1, -1)
        context = whole.prepare(position + 1 - start, torch.device("cpu"))
        expected = whole(queries, keys, values, context, *sinks)[0, -1]
        torch.testing.assert_close(ours[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["mha", "everything-gqa", "sinks"])
def test_attention_through_a_table_of_pages(name):
    step = built("attention_step", steps.ATTENTION[name])
    inputs = steps.attention_inputs(steps.ATTENTION[name], 70, 60, [0, 5, 60], torch.float32)
    paged, table = steps.in_pages(inputs, 16)
    torch.testing.assert_close(step(*paged, pages=table), step(*inputs), atol=1e-6, rtol=1e-6)


def test_attention_of_a_row_without_slots_is_zero():
    spec = steps.ATTENTION["gqa"]
    out = built("attention_step", spec)(*steps.attention_inputs(spec, 8, 3, [0, 4], torch.float32))
    assert out[0].isfinite().all() and (out[1] == 0).all()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_position_is_any_integer_tensor_of_one_element(shape, dtype):
    spec = steps.ATTENTION["everything-gqa"]
    q, k, v, at, starts = steps.attention_inputs(spec, 70, 33, [0, 3], torch.float32)
    step = built("attention_step", spec)
    torch.testing.assert_close(step(q, k, v, at.to(dtype).view(shape), starts), step(q, k, v, at, starts))


@pytest.mark.parametrize("spec", steps.SSD.values(), ids=steps.SSD.keys())
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_one_token_of_the_scan(spec, dtype, tolerance):
    *inputs, state = steps.ssd_inputs(spec, 3, dtype)
    x, dt, A, B, C, D, dt_bias = inputs
    y, final = built("ssd", spec)(x[:, None], dt[:, None], A, B[:, None], C[:, None], D, dt_bias, state.clone())
    ours = built("ssd_step", spec)(*inputs, state)
    torch.testing.assert_close(ours, y[:, 0], atol=tolerance * y.abs().max().item(), rtol=0)
    torch.testing.assert_close(state, final, atol=tolerance * final.abs().max().item(), rtol=0)


def test_tokens_one_by_one_are_the_scan_of_the_sequence():
    spec = SSDSpec(4, 8, 16, 2, 8)
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 27, 4, 8), (2, 27, 4), (4,), (2, 27, 2, 16), (2, 27, 2, 16), (4,), (4,)]
    x, dt, A, B, C, D, dt_bias = (torch.randn(s, generator=g) for s in shapes)
    A = -A.exp()
    expected, final = built("ssd", spec)(x, dt, A, B, C, D, dt_bias)
    step, state = built("ssd_step", spec), torch.zeros(2, 4, 8, 16)
    ours = [step(x[:, t], dt[:, t], A, B[:, t], C[:, t], D, dt_bias, state) for t in range(27)]
    torch.testing.assert_close(torch.stack(ours, 1), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state, final, atol=2e-5, rtol=2e-5)


def test_a_bf16_token_is_as_exact_as_the_scan():
    spec = steps.SSD["usual sizes"]
    *inputs, state = steps.ssd_inputs(spec, 3, torch.bfloat16)
    exact_state = state.double()
    exact = built("ssd_step", spec)(*steps.widened(inputs), exact_state)
    x, dt, A, B, C, D, dt_bias = inputs
    scan, _ = built("ssd", spec)(x[:, None], dt[:, None], A, B[:, None], C[:, None], D, dt_bias, state.clone())
    ours = built("ssd_step", spec)(*inputs, state)
    assert (ours.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (ours - exact).norm() <= (scan[:, 0] - exact).norm()
    torch.testing.assert_close(state.double(), exact_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_the_convolution_token_by_token(width, biased, channels_last):
    spec = Conv1dSpec(6, width)
    g = torch.Generator().manual_seed(width)
    x, weight = torch.randn(2, 11, 6, generator=g), torch.randn(6, width, generator=g)
    bias = torch.randn(6, generator=g) if biased else None
    expected = built("conv1d", spec)(x, weight, bias)
    window = torch.zeros(2, width - 1, 6).transpose(1, 2) if channels_last else torch.zeros(2, 6, width - 1)
    step = built("conv1d_step", spec)
    ours = torch.stack([step(x[:, t], window, weight, bias) for t in range(11)], 1)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(window, x[:, 11 - width + 1 :].transpose(1, 2), atol=0, rtol=0)


@pytest.mark.parametrize("operation", ["attention_step", "conv1d_step"])
def test_bf16_keeps_its_dtype_and_stays_close(operation):
    if operation == "attention_step":
        spec = steps.ATTENTION["everything-gqa"]
        inputs = steps.attention_inputs(spec, 70, 60, [0, 5], torch.bfloat16)
    else:
        spec = Conv1dSpec(40, 4)
        inputs = steps.conv_inputs(spec, 2, True, torch.bfloat16)
    step = built(operation, spec)
    exact = step(*steps.widened(inputs))
    ours = step(*inputs)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, atol=0.02, rtol=0.02)
