"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.kernels import platform
from llmtrain.kernels.conv1d import triton_launch as conv1d
from llmtrain.kernels.gated_norm import triton_launch as gated_norm
from llmtrain.kernels.mamba_mixer.reference import ReferenceMambaMixer
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.mamba_mixer.triton import (
    Keep,
    Launch,
    TritonMambaMixer,
    launch_backward,
    mamba_mixer_backward,
    mamba_mixer_forward,
)
from llmtrain.kernels.operation import leaves
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd import triton as ssd
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from tests.support import kernels as support

GPU = Platform("nvidia", "sm90", "", 1 << 36, 132)


def made(spec: MambaMixerSpec, num_sms: int = 1, keep: Keep = "all", halves: bool = False) -> TritonMambaMixer:
    """Several programs of every kernel in a small problem. One multiprocessor: the sequential scan; many: heads are spread over
    programs, whose parts of dB and dC are added up. halves: the scan's backward takes half a chunk at a time.
    """
    scan = ssd.default_launch(spec.ssd, GPU)
    assert scan.sequential_scan is not None
    backward = 32 if halves else 16
    scan = replace(
        scan,
        chunk_size=32,
        chunk_size_bwd=backward,
        intra_chunk_halves_bwd=scan.intra_chunk_bwd if halves else None,
        state_passing=replace(scan.state_passing, block_dstate=32, block_headdim=16),
        state_passing_bwd=replace(scan.state_passing_bwd, block_dstate=32, block_headdim=16),
        sequential_scan=replace(scan.sequential_scan, block_headdim=16),
        num_sms=num_sms,
    )
    conv_tile, norm_tile = conv1d.Tile(64, 2, 16, 4, 1), gated_norm.Tile(16, 1, 2, 8)
    conv, norm = (
        conv1d.Launch(conv_tile, conv_tile, min_programs=None),
        gated_norm.Launch(norm_tile, norm_tile, num_sms=None),
    )
    return TritonMambaMixer(spec, Launch(conv.dump(), scan.dump(), norm.dump(), keep))


def assert_agrees(kernel: TritonMambaMixer, tensors: list[Any], **options: Any) -> None:
    """The output and every gradient, with the composition of the references in float64."""
    ours = support.outcome(lambda *t: kernel(*t, **options), tensors)
    support.assert_agrees(ours, support.outcome(ReferenceMambaMixer(kernel.spec), tensors, torch.float64))
    assert ours[0].is_contiguous()
    assert all(t.dtype == torch.float32 for t in ours)


ODD = support.mixer_spec(4, 12, 5, n_groups=2, norm_groups=2)
SMALL = support.mixer_spec(2, 12, 5, n_groups=2, norm_groups=2)
CASES = {
    "odd sizes, groups, a state": (ODD, 2, 37, True, True, {}),
    "the same on many multiprocessors": (ODD, 2, 37, True, True, {"num_sms": 1000}),
    "no bias, norm first, 3 taps": (support.mixer_spec(3, 16, 16, width=3, norm_first=True), 1, 33, False, False, {}),
    "halves of chunks, groups, a state": (ODD, 2, 37, True, True, {"halves": True}),
    "halves of chunks on many multiprocessors": (ODD, 2, 37, True, True, {"halves": True, "num_sms": 1000}),
    "convolved again, limited dt": (
        support.mixer_spec(2, 16, 8, dt_limit=(0.05, 0.3)),
        2,
        20,
        True,
        False,
        {"keep": "scan"},
    ),
    "all computed again": (ODD, 1, 33, False, True, {"keep": "nothing", "halves": True}),
    "one token": (support.mixer_spec(2, 16, 16, norm_first=True), 2, 1, True, False, {"num_sms": 1000}),
}


@pytest.mark.parametrize("spec, batch, seq_len, biased, with_state, launch", CASES.values(), ids=CASES.keys())
def test_agrees_with_the_composition(spec, batch, seq_len, biased, with_state, launch):
    assert_agrees(made(spec, **launch), support.mixer_inputs(spec, batch, seq_len, biased, with_state))


def test_strides_of_every_kind_are_read():
    """A slice of something wider, columns not side by side, every other token, and one row expanded over the batch."""
    zxbcdt, *rest = support.mixer_inputs(SMALL, 2, 18)
    sliced = torch.cat((zxbcdt, zxbcdt), -1)[..., 3 : 3 + zxbcdt.shape[2]]
    for strided in (sliced, zxbcdt.mT.contiguous().mT, zxbcdt[:, ::2], zxbcdt[:1].expand(2, -1, -1)):
        assert_agrees(made(SMALL), [strided, *rest])


def test_gradients_have_their_tensors_dtypes():
    """As under amp_bf16 with FSDP2: what the scan sums over a sequence stays fp32."""
    spec = support.mixer_spec(2, 16, 16, dtype=torch.float16)
    tensors = support.mixer_inputs(spec, 1, 20, with_state=True)
    ours = support.outcome(made(spec), tensors)
    assert [t.dtype for t in ours] == [t.dtype for t in (tensors[0], *tensors)]
    support.assert_agrees(ours, support.outcome(ReferenceMambaMixer(spec), tensors, torch.float64), 3e-2)


@pytest.mark.parametrize("halves", [False, True])
def test_packed_documents_equal_the_documents_apart(halves):
    lengths = [5, 1, 16, 11]
    zxbcdt, *rest, _ = support.mixer_inputs(SMALL, 2, sum(lengths))
    ids = torch.cat([torch.full((2, n), i % 2) for i, n in enumerate(lengths)], 1)
    reference, kernel = ReferenceMambaMixer(SMALL), made(SMALL, halves=halves)

    def apart(zxbcdt, *rest):
        return torch.cat([reference(piece, *rest) for piece in zxbcdt.split(lengths, 1)], 1)

    ours = support.outcome(lambda *t: kernel(*t, document_ids=ids), [zxbcdt, *rest])
    support.assert_agrees(ours, support.outcome(apart, [zxbcdt, *rest], torch.float64))


class Operators(TorchDispatchMode):
    """Which ran; a copy into part of something else as `part`."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        into_part = func is torch.ops.aten.copy_.default and not args[0].is_contiguous()
        self.names.append("part" if into_part else func.name())
        return func(*args, **(kwargs or {}))


def test_gradients_are_written_where_they_stay():
    """The composition concatenates them; here nothing does, in the graph or within the operator."""
    tensors = support.mixer_inputs(SMALL, 2, 20)
    given = leaves(tensors)

    def of_graph(function) -> list[str]:
        y = function(*given)
        with Operators() as ran:
            torch.autograd.grad(y, [t for t in given if t is not None], torch.ones_like(y))
        return [name for name in ran.names if name not in ("aten::detach", "aten::ones_like")]

    assert of_graph(ReferenceMambaMixer(SMALL)).count("aten::cat") == 2
    assert of_graph(made(SMALL)) == ["llmtrain::mamba_mixer_backward"]

    tensors, options = [t if t is None else t.detach() for t in tensors], made(SMALL).options
    out, *kept = mamba_mixer_forward(*tensors, None, 2, None, None, 2, 1e-5, False, options)
    arguments: list[Any] = [out, *tensors, None, *kept, 2, None, None, False, options]
    with Operators() as ran:
        launch_backward(*arguments)
    assert "aten::split_with_sizes" in ran.names
    assert not {"part", "aten::cat", "aten::clone"}.intersection(ran.names)


@pytest.mark.ci
def test_every_run_is_equal_bit_by_bit_whatever_it_keeps():
    tensors = support.mixer_inputs(SMALL, 2, 37)
    first, *others = (support.outcome(made(SMALL, 1000, keep), tensors) for keep in ("all", *get_args(Keep)))
    support.assert_equal(first, *others)


@pytest.mark.ci
@pytest.mark.parametrize(
    "biased, with_state, launch",
    [(True, True, {}), (False, False, {"keep": "scan"}), (False, True, {"keep": "nothing"})],
)
def test_the_operator_is_whole(biased, with_state, launch):
    """Schema, fake, autograd and compilation without a graph break, with and without what is optional."""
    tensors, kernel = support.mixer_inputs(SMALL, 1, 20, biased, with_state), made(SMALL, **launch)
    ids = None if with_state else torch.zeros(1, 20, dtype=torch.int32)
    how = (2, 0.05, None, 2, 1e-5, False, kernel.options)
    support.assert_whole(mamba_mixer_forward, (*leaves(tensors), ids, *how))
    out, *kept = mamba_mixer_forward(*tensors, ids, *how)
    arguments = (out, *tensors, ids, *kept, 2, 0.05, None, False, kernel.options)
    support.assert_whole(mamba_mixer_backward, arguments)
    support.assert_compiles(kernel, tensors)


@pytest.mark.ci
@pytest.mark.parametrize("groups, first", [(1, False), (2, True)])
def test_a_model_runs_it_between_its_projections(groups, first):
    """Parameters reach the arguments that they are meant for; a layer compiles without a graph break."""
    block = {"type": "mamba2", "d_state": 16, "head_dim": 16, "n_groups": groups, "chunk_size": 16}
    block |= {"norm_before_gate": first}
    found = []
    for where, backend in ((GPU, "triton"), (platform.cpu(), "auto")):
        config = {"vocab_size": 50, "d_model": 32, "blocks": {"m": block | {"backend": backend}}, "layers": "m*2"}
        model = HybridLM(ModelConfig.model_validate(config), platform=where, dtype=torch.float32)
        model.init_weights(0)
        assert all((block.mixer.fused is not None) == (backend == "triton") for block in model.blocks)  # pyright: ignore[reportAttributeAccessIssue]
        if where is GPU:
            for layer in model.blocks:
                layer.compile(fullgraph=True, backend="aot_eager")
        ids = torch.arange(40).view(2, 20)
        out = CausalLM(model).loss(ids[:, :-1], ids[:, 1:])
        out.loss.backward()
        found.append([out.loss.detach(), *(p.grad for p in model.parameters())])
    support.assert_agrees(found[0], [t.double() for t in found[1]])
