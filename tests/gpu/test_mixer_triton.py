"""The inside of a Mamba-2 mixer as one operator on a GPU: as exact as PyTorch's, equal to its parts, compiled."""

import gc
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from llmtrain.kernels import platform, registry
from llmtrain.kernels.mamba_mixer.operation import OPERATION as MIXER
from llmtrain.kernels.mamba_mixer.reference import ReferenceMambaMixer, compose
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.mamba_mixer.triton import Keep, TritonMambaMixer, default_launch
from tests.support import kernels as support
from tests.support.selection import cases

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
ZAMBA = support.mixer_spec(80, 64, 128, dtype=BF16)
GROUPED = support.mixer_spec(16, 64, 64, n_groups=2, norm_groups=2, norm_first=True, dt_limit=(1e-3, None), dtype=BF16)
SHAPES = {
    "zamba2": (ZAMBA, 1, 2048, True, False),
    "ragged, groups, norm first, no bias": (GROUPED, 2, 1001, False, True),
    "odd": (support.mixer_spec(3, 24, 40, width=3, dtype=BF16), 3, 65, True, True),
    "one token": (GROUPED, 2, 1, True, True),
    "63 tokens": (ZAMBA, 1, 63, True, False),
    "4097 tokens": (ZAMBA, 1, 4097, True, False),
}


def kernel(spec: MambaMixerSpec, **changes: Any) -> TritonMambaMixer:
    return TritonMambaMixer(spec, replace(default_launch(spec, platform.detect()), **changes))


def parts(spec: MambaMixerSpec) -> Any:
    """The same kernels as three operations."""
    here = platform.detect()
    conv, scan, norm = (
        registry.resolve(name, "triton", getattr(spec, name), here).build(getattr(spec, name), here)
        for name in ("conv1d", "ssd", "gated_norm")
    )

    def run(zxbcdt, weight, bias, A, D, dt_bias, norm_weight, state):
        return compose(
            spec,
            zxbcdt,
            lambda xBC: conv(xBC, weight, bias),
            lambda x, dt, B, C: scan(x, dt, A, B, C, D, dt_bias, state)[0],
            lambda y, z: norm(y, z, norm_weight),
        )

    return run


@pytest.mark.parametrize("spec, batch, seq_len, biased, with_state", SHAPES.values(), ids=SHAPES.keys())
def test_as_exact_as_the_composition_in_the_same_dtype(spec, batch, seq_len, biased, with_state):
    assert_as_exact(spec, support.mixer_inputs(spec, batch, seq_len, biased, with_state, "cuda"), None)


@pytest.mark.parametrize("spec", [ZAMBA, GROUPED], ids=["zamba2", "groups"])
def test_as_exact_where_sequences_hold_documents(spec):
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([700, 1, 300, 47]))[None].cuda()
    assert_as_exact(spec, support.mixer_inputs(spec, 1, ids.shape[1], device="cuda"), ids)


def assert_as_exact(spec: MambaMixerSpec, tensors: list[Any], ids: torch.Tensor | None) -> None:
    """Output and gradients of ours beside those of the composition in the same dtype."""

    def run(mixer: Any) -> Any:
        return lambda *t: mixer(*t, document_ids=ids)

    reference = ReferenceMambaMixer(spec)
    exact = support.outcome(run(reference), tensors, torch.float64)
    ours, theirs = (support.errors(support.outcome(run(f), tensors), exact) for f in (kernel(spec), reference))
    names = ("y", *(name for name, t in zip(MIXER.leaves, tensors, strict=True) if t is not None))
    support.assert_as_exact(names, ours, theirs)


@pytest.mark.parametrize(
    "spec, batch, seq_len, biased, with_state", cases(SHAPES, "ragged, groups, norm first, no bias")
)
def test_equal_to_its_parts_bit_by_bit(spec, batch, seq_len, biased, with_state):
    """In every run, whatever is kept."""
    tensors = support.mixer_inputs(spec, batch, seq_len, biased, with_state, "cuda")
    expected = support.outcome(parts(spec), tensors)
    for keep in ("all", *get_args(Keep)):
        ours = support.outcome(kernel(spec, keep=keep), tensors)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("keep, dropped", [("all", 0), ("scan", 5376), ("nothing", 5376 + 5120)])
def test_keeps_no_more_for_the_backward_than_its_parts(keep, dropped):
    """What adds up over layers. dropped: numbers per token, of the convolution's output and the scan's."""
    tensors = support.mixer_inputs(ZAMBA, 2, 2048, device="cuda")

    def kept(function: Any) -> int:
        leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
        function(*leaves)  # compiled, and memory of launches allocated
        gc.collect()
        before = torch.cuda.memory_allocated()
        y = function(*leaves)
        assert y.requires_grad
        return torch.cuda.memory_allocated() - before

    of_all = 2 * 2048 * tensors[0].element_size()  # a number per token
    assert kept(kernel(ZAMBA, keep=keep)) <= kept(parts(ZAMBA)) - (dropped - 250) * of_all


def test_compiled_without_a_graph_break():
    torch._dynamo.reset()
    tensors, ours = support.mixer_inputs(GROUPED, 2, 333, with_state=True, device="cuda"), kernel(GROUPED)
    compiled = support.outcome(torch.compile(ours.__call__, fullgraph=True), tensors)
    assert all(torch.equal(a, b) for a, b in zip(compiled, support.outcome(ours, tensors), strict=True))
