"""Cases of test_ssd_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmtrain.kernels import tuning
from llmtrain.kernels.operation import leaves
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.reference import ReferenceSSD
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.kernels.ssd.triton import TritonSSD, default_launch, ssd_forward
from llmtrain.kernels.ssd.triton_forward import tma_descriptor
from llmtrain.kernels.ssd.triton_launch import Launch
from tests.support import kernels as support

GPU = Platform("nvidia", "sm90", "", 1 << 36, 132)


both_tiles = pytest.mark.parametrize("halves", [False, True], ids=["whole chunks", "halves of chunks"])
"""What the backward takes at a time."""


def small(
    spec: SSDSpec, forward: int = 32, halves: bool = False, num_sms: int = 1, tile: int = 16, state_first: bool = False
) -> Launch:
    """Several chunks and tiles of the state in a small problem. One multiprocessor: the sequential scan, and one program takes
    all heads of a chunk; many: state passing and chunk scan, and heads are spread over programs. halves: the backward's chunks
    are of two tiles.
    """
    launch = default_launch(spec, GPU)
    assert launch.sequential_scan is not None
    backward = 2 * tile if halves else tile
    return replace(
        launch,
        chunk_size=forward,
        chunk_size_bwd=backward,
        intra_chunk_halves_bwd=launch.intra_chunk_bwd if halves else None,
        state_passing=replace(launch.state_passing, block_dstate=32, block_headdim=16),
        state_passing_bwd=replace(launch.state_passing_bwd, block_dstate=32, block_headdim=16),
        sequential_scan=replace(launch.sequential_scan, block_headdim=16, state_first=state_first),
        num_sms=num_sms,
    )


def assert_agrees(spec: SSDSpec, batch: int, seq_len: int, with_state: bool, launch: Launch) -> None:
    tensors = support.scan_inputs(spec, batch, seq_len, torch.float32, with_state)
    ours, expected = support.scan_outcome(TritonSSD(spec, launch), tensors), support.exact_scan(spec, tensors)
    assert all(t.dtype == torch.float32 for t in ours.values())
    support.assert_scans_agree(ours, expected, 1e-4)


FP32: Any = {"dtype": "float32"}
MANY = {"num_sms": 1000}
CASES = {
    "ragged, odd sizes, groups, a state": (SSDSpec(4, 24, 5, 2, 64, **FP32), 2, 37, True, {}),
    "the same on many multiprocessors": (SSDSpec(4, 24, 5, 2, 64, **FP32), 2, 37, True, MANY),
    "a block of heads that is not full": (
        SSDSpec(3, 16, 40, 1, 64, **FP32),
        1,
        32,
        False,
        {"forward": 16, "num_sms": 2},
    ),
    "one token": (SSDSpec(2, 16, 16, 1, 64, **FP32), 2, 1, True, {}),
    "one token on many multiprocessors": (SSDSpec(2, 16, 16, 1, 64, **FP32), 2, 1, True, MANY),
    "states of two parts": (SSDSpec(4, 16, 70, 2, 64, **FP32), 2, 37, True, {}),
    "the same states on many multiprocessors": (SSDSpec(4, 16, 70, 2, 64, **FP32), 1, 50, True, MANY),
    "what comes from the state first": (SSDSpec(4, 24, 5, 2, 64, **FP32), 2, 37, True, {"state_first": True}),
    "limited dt": (SSDSpec(2, 16, 16, 2, 64, dt_limit=(0.05, 0.3), **FP32), 1, 33, True, {}),
    "dt with a floor only": (SSDSpec(2, 16, 16, 1, 64, dt_limit=(0.05, None), **FP32), 1, 17, False, {}),
}


@both_tiles
@pytest.mark.parametrize("spec, batch, seq_len, with_state, launch", CASES.values(), ids=CASES.keys())
def test_agrees_with_the_reference(spec, batch, seq_len, with_state, launch, halves):
    assert_agrees(spec, batch, seq_len, with_state, small(spec, halves=halves, **launch))


@pytest.mark.parametrize(
    "head_dim, at_most, num_sms, halves",
    [(32, 16, 1, True), (24, 16, 1000, False), (20, 8, 1, False), (16, 16, 1, False)],
)
def test_wide_heads_are_split(head_dim, at_most, num_sms, halves):
    """Also where the most that a part may have does not divide the width; with documents, groups and states at both ends."""
    spec = SSDSpec(4, head_dim, 24, 2, 64, dt_limit=(0.05, 0.3), **FP32)
    tensors = support.scan_inputs(spec, 2, 37, torch.float32, True)
    ids = support.documents([5, 11, 21], 2)
    launch = replace(small(spec, halves=halves, num_sms=num_sms), split_headdim=at_most)
    assert head_dim // launch.head_parts(head_dim) <= at_most
    kernel, reference = TritonSSD(spec, launch), ReferenceSSD(spec)
    ours = support.scan_outcome(lambda *t: kernel(*t, document_ids=ids), tensors)
    expected = support.scan_outcome(lambda *t: reference(*t, document_ids=ids), tensors, wide=True)
    support.assert_scans_agree(ours, expected, 1e-4)


def as_for_large_states(launch: Launch, **passing: Any) -> Launch:
    """As measured rows run at d_state 256: C B^T once per program; dB and dC by two programs, each with half of d_state; states
    passed in tiles of half a chunk. passing: more of the launches that pass states.
    """
    return replace(
        launch,
        state_passing=replace(launch.state_passing, tile=launch.chunk_size // 2, **passing),
        state_passing_bwd=replace(launch.state_passing_bwd, **passing),
        chunk_scan=replace(launch.chunk_scan, keep_cb=True),
        intra_chunk_bwd=replace(launch.intra_chunk_bwd, keep_cb=True),
        inter_chunk_bwd=replace(launch.inter_chunk_bwd, dstate_blocks=2),
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "head_dim, d_state, halves, dtype",
    [(32, 24, True, "float32"), (24, 24, False, "float32"), (16, 250, True, "float32"), (32, 24, True, "float16")],
)
def test_launches_for_large_states(head_dim, d_state, halves, dtype):
    """Also where two programs of dB and dC have two parts of d_state each; with documents, groups and states at both ends."""
    spec = SSDSpec(4, head_dim, d_state, 2, 64, dtype=dtype)
    tensors = support.scan_inputs(spec, 2, 37, getattr(torch, dtype), True)
    ids = support.documents([5, 11, 21], 2)
    launch = as_for_large_states(small(spec, halves=halves, num_sms=1000))
    launch = replace(launch, split_headdim=16, fp16_states=dtype == "float16")
    kernel, reference = TritonSSD(spec, launch), ReferenceSSD(spec)
    ours = support.scan_outcome(lambda *t: kernel(*t, document_ids=ids), tensors)
    expected = support.scan_outcome(lambda *t: reference(*t, document_ids=ids), tensors, wide=True)
    limit = 1e-4 if dtype == "float32" else 1e-3
    support.assert_scans_agree(ours, expected, limit)


@pytest.mark.ci
@pytest.mark.parametrize("d_state, rows", [(128, 64), (256, 128)])
def test_large_states_may_be_loaded_and_stored_by_tma(d_state, rows):
    spec = SSDSpec(4, 32, d_state, 1, 64, **FP32)
    launch = small(spec, halves=True, num_sms=1000)
    fetching = {"use_tma": True, "num_stages": 2}
    launch = replace(launch, split_headdim=16, **{n: replace(getattr(launch, n), **fetching) for n in LOOPS})
    assert_agrees(spec, 2, 64, True, as_for_large_states(launch, block_dstate=rows, **fetching))


LOOPS = ("chunk_scan", "intra_chunk_bwd", "intra_chunk_halves_bwd", "inter_chunk_bwd")


@both_tiles
@pytest.mark.parametrize("seq_len, d_state", [(48, 16), pytest.param(64, 128, marks=pytest.mark.ci)])
@pytest.mark.parametrize("num_sms", [1, 1000], ids=["sequential scan", "state passing"])
def test_tiles_may_be_loaded_by_tma(seq_len, d_state, halves, num_sms):
    """Two sequences, one after the other; of 48 tokens a last chunk of 32 has no second half but that of the next sequence."""
    spec = SSDSpec(4, 16, d_state, 2, 64, **FP32)
    launch = small(spec, halves=halves, num_sms=num_sms)
    fetching = {
        name: replace(getattr(launch, name), use_tma=True, num_stages=2)
        for name in ("sequential_scan", "chunk_scan", "intra_chunk_bwd", "inter_chunk_bwd")
    }
    assert_agrees(spec, 2, seq_len, True, replace(launch, **fetching))


@pytest.mark.parametrize("num_sms", [1, 1000], ids=["sequential scan", "state passing"])
@pytest.mark.parametrize(
    "dtype, halves, block",
    [("float32", False, 32), ("float16", True, 32), pytest.param("float16", True, 16, marks=pytest.mark.ci)],
)
def test_heads_narrower_than_a_block_may_be_loaded_by_tma(dtype, halves, block, num_sms):
    """Blocks then end in the next head's columns, which here are much larger, and the last one's in B."""
    spec = SSDSpec(4, 48, 16, 2, 64, dtype=dtype)
    tensors = support.scan_inputs(spec, 2, 64, getattr(torch, dtype), True)
    tensors[0] = (tensors[0] * torch.tensor([1.0, 50.0, 1e-3, 50.0]).view(4, 1)).to(tensors[0].dtype)
    launch = small(spec, halves=halves, num_sms=num_sms)
    fetching = {"use_tma": True, "num_stages": 2}
    names = (*LOOPS[: 4 if halves else 2], "inter_chunk_bwd", "sequential_scan", "state_passing", "state_passing_bwd")
    launch = replace(launch, **{n: replace(getattr(launch, n), **fetching) for n in names})
    columns = {"block_headdim": block, "block_dstate": 16}
    assert launch.sequential_scan is not None
    launch = replace(
        launch,
        split_headdim=24,
        fp16_states=dtype == "float16",
        sequential_scan=replace(launch.sequential_scan, block_headdim=block),
        state_passing=replace(launch.state_passing, **columns),
        state_passing_bwd=replace(launch.state_passing_bwd, **columns),
    )
    x = torch.empty(2, 64, 8, 24, dtype=tensors[0].dtype)
    assert tma_descriptor(True, x, 32, narrow=True) is not None and tma_descriptor(True, x, 32) is None
    ours, expected = support.scan_outcome(TritonSSD(spec, launch), tensors), support.exact_scan(spec, tensors)
    support.assert_scans_agree(ours, expected, 1e-4 if dtype == "float32" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 63, 64, 65, 128])
@pytest.mark.parametrize("head_dim, d_state", [(16, 16), (24, 5), (64, 128), (128, 64), (20, 130)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_sms", [1, 5, 1000])
@both_tiles
def test_agrees_with_the_reference_over_a_grid(seq_len, head_dim, d_state, groups, with_state, num_sms, halves):
    spec = SSDSpec(4, head_dim, d_state, groups, 64, **FP32)
    tensors = support.scan_inputs(spec, 2 if seq_len < 64 else 1, seq_len, torch.float32, with_state)
    ours = support.scan_outcome(TritonSSD(spec, small(spec, halves=halves, num_sms=num_sms)), tensors)
    support.assert_scans_agree(ours, support.exact_scan(spec, tensors), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx90a", "gfx942"])
def test_the_tables_agree_with_the_reference(arch):
    spec = SSDSpec(12, 64, 64, 1, 256, **FP32)
    for row in tuning.read_shipped(arch).rows:
        if (row.kernel, row.shape) == ("ssd", (64, 128)):
            assert_agrees(spec, 1, 100, True, replace(row.launch, input_precision="ieee"))


@pytest.mark.parametrize(
    "lengths",
    [
        [5, 1, 16, 11],  # borders inside chunks, two in one chunk, and at a chunk's end
        pytest.param([16, 16, 33], marks=pytest.mark.slow),
        pytest.param([1, 1, 40, 1], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("num_sms", [1, 1000])
@both_tiles
@pytest.mark.parametrize("d_state", [pytest.param(16, marks=pytest.mark.ci), 70])
def test_packed_documents_equal_the_documents_apart(lengths, num_sms, halves, d_state):
    spec = SSDSpec(2, 16, d_state, 1, 64, **FP32)
    tensors = support.scan_inputs(spec, 1, sum(lengths), torch.float32, True)
    ids = support.documents(lengths)
    kernel = TritonSSD(spec, small(spec, halves=halves, num_sms=num_sms))

    def apart(x, dt, A, B, C, D, dt_bias, state):
        """The initial state goes to the first document; what is final is the last one's."""
        pieces = zip(*(t.split(lengths, 1) for t in (x, dt, B, C)), strict=True)
        ys = []
        for x_, dt_, B_, C_ in pieces:
            y, state = ReferenceSSD(spec)(x_, dt_, A, B_, C_, D, dt_bias, state)
            ys.append(y)
            last, state = state, None
        return torch.cat(ys, 1), last

    ours = support.scan_outcome(lambda *t: kernel(*t, document_ids=ids), tensors)
    expected = support.scan_outcome(apart, tensors, wide=True)
    support.assert_scans_agree(ours, expected, 1e-4)


FP16_STATES = list(itertools.product([False, True], [16, 64], [0.0, 5.0], [(24, 1), (24, 1000), (70, 1), (70, 1000)]))
"""Halves of chunks, columns of a state with an exponent of their own, steps longer by, (d_state, multiprocessors)."""
COVERING = {
    (False, 16, 0.0, (24, 1)),
    (True, 64, 5.0, (24, 1)),
    (True, 16, 5.0, (24, 1000)),
    (False, 64, 0.0, (24, 1000)),
    (True, 16, 0.0, (70, 1)),
    (False, 64, 5.0, (70, 1)),
}
"""Every pair of two settings is in one of these."""


@pytest.mark.ci
@pytest.mark.parametrize(
    "halves, columns, longer, sizes",
    [pytest.param(*case, marks=[] if case in COVERING else pytest.mark.slow) for case in FP16_STATES],
)
def test_states_in_fp16_with_powers_of_two(halves, columns, longer, sizes):
    """From fp16, whose own rounding of a gradient is 2.8e-4. x in sequences of very different size, and a state to begin with."""
    d_state, num_sms = sizes
    spec = SSDSpec(4, 40, d_state, 2, 64, dtype="float16")
    tensors = support.scan_inputs(spec, 2, 70, torch.float16, with_state=True)
    tensors[0] = tensors[0] * torch.tensor([1e-3, 1e2]).half().view(2, 1, 1, 1)
    tensors[6] = tensors[6] + longer
    launch = small(spec, halves=halves, num_sms=num_sms)
    launch = replace(
        launch, fp16_states=True, state_passing_bwd=replace(launch.state_passing_bwd, block_headdim=columns)
    )
    ours, expected = support.scan_outcome(TritonSSD(spec, launch), tensors), support.exact_scan(spec, tensors)
    support.assert_scans_agree(ours, expected, 1e-3)


@pytest.mark.ci
@both_tiles
@pytest.mark.parametrize("limits, use_tma", [(None, True), ((0.05, 0.3), False)], ids=["TMA", "limited dt"])
def test_documents_with_states_in_fp16(halves, limits, use_tma):
    """As the measured rows run: borders inside chunks, two in one, and at a chunk's end; every gradient."""
    spec = SSDSpec(4, 40, 24, 2, 64, dt_limit=limits, dtype="float16")
    tensors = support.scan_inputs(spec, 1, 64, torch.float16, with_state=True)
    ids = support.documents([5, 1, 26, 11, 21])
    launch = replace(small(spec, halves=halves), fp16_states=True)
    for name in ("sequential_scan", "intra_chunk_bwd", "inter_chunk_bwd") if use_tma else ():
        launch = replace(launch, **{name: replace(getattr(launch, name), use_tma=True, num_stages=2)})
    kernel, reference = TritonSSD(spec, launch), ReferenceSSD(spec)
    ours = support.scan_outcome(lambda *t: kernel(*t, document_ids=ids), tensors)
    expected = support.scan_outcome(lambda *t: reference(*t, document_ids=ids), tensors, wide=True)
    support.assert_scans_agree(ours, expected, 1e-3)


@pytest.mark.parametrize("size", [1.0, 2.0**-4])
@both_tiles
def test_tokens_that_nothing_asks_of_or_that_add_nothing_are_finite_with_states_in_fp16(halves, size):
    """As padding after the last document: whole chunks whose gradients are zero, others whose x is; B and C of any size."""
    spec = SSDSpec(2, 16, 24, 1, 64, dtype="float16")
    tensors = support.scan_inputs(spec, 1, 96, torch.float16)
    tensors[0][:, :32] = 0
    tensors[3], tensors[4] = tensors[3] * size, tensors[4] * size
    launch = replace(small(spec, halves=halves, num_sms=1000), fp16_states=True)

    def asked(kernel: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        names = [name for name in support.SCAN if name != "final state"]
        found = support.outcome(lambda *t: kernel(*t)[0][:, :64], tensors, dtype)
        return dict(zip(names, found, strict=False))

    ours, expected = asked(TritonSSD(spec, launch), None), asked(ReferenceSSD(spec), torch.float64)
    assert all(gradient.isfinite().all() for gradient in ours.values())
    support.assert_scans_agree(ours, expected, 1e-3)


@pytest.mark.parametrize(
    "rate, bias", [(-50.0, 3.0), pytest.param(-1e-6, -3.0, marks=pytest.mark.ci), (-1e-30, 60.0), (-16.0, 60.0)]
)
@both_tiles
def test_strong_decay_and_none_are_finite_and_right(rate, bias, halves):
    """Above the diagonal a decay would overflow; where all decays, so does 2^a from the start of the chunk to 0."""
    spec = SSDSpec(1, 16, 16, 1, 64, **FP32)
    tensors = support.scan_inputs(spec, 1, 40, torch.float32, True)
    tensors[2], tensors[6] = torch.full((1,), rate), torch.full((1,), bias)
    kernel = TritonSSD(spec, small(spec, halves=halves))
    ours, expected = support.scan_outcome(kernel, tensors), support.exact_scan(spec, tensors)
    support.assert_scans_agree(ours, expected, 1e-4)


@both_tiles
def test_the_operator_is_whole(halves):
    """Schema, fake, autograd and compilation without a graph break, with and without what is optional."""
    spec = SSDSpec(2, 16, 16, 1, 64, **FP32)
    tensors = support.scan_inputs(spec, 1, 20, torch.float32, True)
    launch = small(spec, halves=halves)
    ids = torch.zeros(1, 20, dtype=torch.int32)
    for state, documents in ((tensors[7], None), (None, ids)):
        given = leaves([*tensors[:7], state])
        support.assert_whole(ssd_forward, (*given, documents, None, 0.5, launch.dump()))
    support.assert_compiles(TritonSSD(spec, launch), tensors)
