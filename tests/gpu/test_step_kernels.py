"""The Triton kernels of cached decoding on a GPU, against the references in float64; and inside a CUDA graph."""

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import platform, registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from tests.support import steps
from tests.support.selection import cases

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": (torch.bfloat16, 0.01), "fp32": (torch.float32, 2e-5)}
OPTIONS = ("mha", "gqa", "mqa-40-heads", "alibi", "window-gqa", "softcap", "everything", "everything-gqa", "gqa-256")
"""Of attention, by default; in a graph, those of GRAPHS."""
GRAPHS = ("mha", "gqa", "everything", "everything-gqa")
LARGE = {
    "batch 64": (AttentionSpec(16, 16, 128, 128**-0.5), 64),
    "batch 64, gqa": (AttentionSpec(32, 8, 128, 128**-0.5), 64),
    "batch 1, gqa": (AttentionSpec(32, 8, 128, 128**-0.5), 1),
    "batch 600, no splits": (AttentionSpec(8, 8, 64, 0.125), 600),
}


def built(operation: registry.Operation, spec: registry.Spec, dtype: torch.dtype, name: str = "triton"):
    here = platform.detect()
    spec = type(spec)(**{**vars(spec), "dtype": str(dtype).removeprefix("torch.")})
    return registry.resolve(operation, name, spec, here).build(spec, here)


def assert_close(ours: Tensor, exact: Tensor, relative: float) -> None:
    assert torch.isfinite(ours).all()
    assert (ours.double() - exact).norm() <= relative * exact.norm()


@pytest.mark.parametrize("dtype, relative", cases(DTYPES, "bf16"))
@pytest.mark.parametrize("spec", cases(steps.ATTENTION, *OPTIONS))
def test_attention(spec, dtype, relative):
    first = [0, 31, 700, 999]
    inputs = steps.attention_inputs(spec, 1100, 999, first, dtype, "cuda")
    exact = built("attention_step", spec, torch.float64, "reference")(*steps.widened(inputs))
    ours = built("attention_step", spec, dtype)(*inputs)
    assert ours.dtype == dtype
    for row in range(len(first)):
        assert_close(ours[row], exact[row], relative)


@pytest.mark.parametrize("spec", cases(steps.ATTENTION, "mha", "gqa", "everything-gqa"))
def test_attention_through_a_table_of_pages_is_the_same_in_every_bit(spec):
    inputs = steps.attention_inputs(spec, 1088, 999, [0, 31, 700, 999], torch.bfloat16, "cuda")
    paged, table = steps.in_pages(inputs, 32)
    step = built("attention_step", spec, torch.bfloat16)
    assert torch.equal(step(*paged, pages=table[:, :34].contiguous()), step(*inputs))


@pytest.mark.parametrize("spec, batch", cases(LARGE, "batch 64, gqa", "batch 600, no splits"))
def test_attention_of_large_batches(spec, batch):
    first = [row % 50 for row in range(batch)]
    inputs = steps.attention_inputs(spec, 300, 290, first, torch.bfloat16, "cuda")
    exact = built("attention_step", spec, torch.float64, "reference")(*steps.widened(inputs))
    assert_close(built("attention_step", spec, torch.bfloat16)(*inputs), exact, 0.01)


@pytest.mark.parametrize("name", cases({"mha": "mha", "gqa": "gqa"}, "gqa"))
def test_attention_of_a_row_without_slots_is_zero(name):
    spec = steps.ATTENTION[name]
    out = built("attention_step", spec, torch.bfloat16)(
        *steps.attention_inputs(spec, 300, 3, [0, 4], torch.bfloat16, "cuda")
    )
    assert out[0].isfinite().all() and (out[1] == 0).all()


@pytest.mark.parametrize("dtype, relative", cases(DTYPES, "bf16"))
@pytest.mark.parametrize("spec", cases(steps.SSD, "odd sizes", "usual sizes", "limited dt"))
def test_ssd(spec, dtype, relative):
    inputs = steps.ssd_inputs(spec, 5, dtype, "cuda")
    exact = steps.widened(inputs)
    expected = built("ssd_step", spec, torch.float64, "reference")(*exact)
    ours = built("ssd_step", spec, dtype)(*inputs)
    assert ours.dtype == dtype
    assert_close(ours, expected, relative)
    assert_close(inputs[-1], exact[-1], 1e-5)


@pytest.mark.parametrize("dtype, relative", cases(DTYPES, "bf16"))
@pytest.mark.parametrize("spec", cases(steps.CONV, "40 x 4", "300 x 3"))
@pytest.mark.parametrize("channels_last", cases({"channels last": True, "channels first": False}, "channels last"))
def test_conv1d(spec, dtype, relative, channels_last):
    inputs = steps.conv_inputs(spec, 5, True, dtype, channels_last, "cuda")
    exact = steps.widened(inputs)
    expected = built("conv1d_step", spec, torch.float64, "reference")(*exact)
    assert_close(built("conv1d_step", spec, dtype)(*inputs), expected, relative)
    assert (inputs[1].double() == exact[1]).all()


def captured(step, *inputs) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The step in a graph, and where its result appears. What it updates in place is as before."""
    before = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*inputs)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*inputs)
    for now, then in zip(inputs, before, strict=True):
        if isinstance(now, Tensor):
            now.copy_(then)
    return graph, out


@pytest.mark.parametrize("backend", cases({"triton": "triton", "reference": "reference"}, "triton"))
@pytest.mark.parametrize("name", cases({name: name for name in GRAPHS}, "everything-gqa"))
def test_attention_in_a_graph_follows_the_position(name, backend):
    spec, dtype = steps.ATTENTION[name], torch.bfloat16
    q, k, v, position, first = steps.attention_inputs(spec, 1100, 1099, [0, 0], dtype, "cuda")
    k, v = k.nan_to_num(), v.nan_to_num()  # the window moves over all of it
    graph, out = captured(built("attention_step", spec, dtype, backend), q, k, v, position, first)
    first.copy_(torch.tensor([0, 7]))
    reference = built("attention_step", spec, torch.float64, "reference")
    for at in (7, 63, 64, 500, 1099):
        position.fill_(at)
        graph.replay()
        # The reference rounds its scores to bf16.
        assert_close(out, reference(*steps.widened((q, k, v, position, first))), 0.01 if backend == "triton" else 0.03)


@pytest.mark.parametrize("backend", cases({"triton": "triton", "reference": "reference"}, "triton"))
def test_ssd_in_a_graph_carries_its_state(backend):
    spec, dtype = steps.SSD["usual sizes"], torch.bfloat16
    inputs = steps.ssd_inputs(spec, 3, dtype, "cuda")
    exact = steps.widened(inputs)
    graph, out = captured(built("ssd_step", spec, dtype, backend), *inputs)
    reference = built("ssd_step", spec, torch.float64, "reference")
    for _ in range(4):
        graph.replay()
        assert_close(out, reference(*exact), 0.01)
    assert_close(inputs[-1], exact[-1], 1e-5)


@pytest.mark.parametrize("backend", cases({"triton": "triton", "reference": "reference"}, "triton"))
def test_conv1d_in_a_graph_shifts_its_window(backend):
    spec, dtype = Conv1dSpec(300, 4), torch.bfloat16
    inputs = steps.conv_inputs(spec, 3, True, dtype, device="cuda")
    exact = steps.widened(inputs)
    graph, out = captured(built("conv1d_step", spec, dtype, backend), *inputs)
    reference = built("conv1d_step", spec, torch.float64, "reference")
    for _ in range(5):
        graph.replay()
        assert_close(out, reference(*exact), 0.01)
    assert (inputs[1].double() == exact[1]).all()
