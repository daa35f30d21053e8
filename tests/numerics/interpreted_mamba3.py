"""Cases of test_mamba3_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from llmtrain.kernels.mamba3 import keys_bwd, rotations
from llmtrain.kernels.mamba3.reference import ReferenceMamba3
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.mamba3.step import ReferenceMamba3Step
from llmtrain.kernels.mamba3.step_triton import TritonMamba3Step
from llmtrain.kernels.mamba3.triton import TritonMamba3, build
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.triton import default_launch
from llmtrain.kernels.ssd.triton_launch import Launch
from tests.support import kernels as support
from tests.support.mamba3 import NAMES, flat, state_of

GPU = Platform("nvidia", "sm90", "", 1 << 36, 132)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(rotations, "TILE", 16)
    monkeypatch.setattr(keys_bwd, "_ROWS", 16)
    monkeypatch.setattr(keys_bwd, "_HEADS_PER_PROGRAM", 2)


def small(spec: Mamba3Spec, num_sms: int = 1, split: int | None = None) -> Launch:
    """Several chunks in a small problem; see interpreted_ssd.py."""
    launch = default_launch(spec.scan, GPU)
    assert launch.sequential_scan is not None
    return replace(
        launch,
        chunk_size=32,
        chunk_size_bwd=16,
        intra_chunk_halves_bwd=None,
        sequential_scan=replace(launch.sequential_scan, block_headdim=16),
        num_sms=num_sms,
        split_headdim=split,
    )


def assert_agrees(spec: Mamba3Spec, tensors: list[Tensor], launch: Launch, ids: Tensor | None = None) -> None:
    """y, the last state, and every gradient."""
    found = support.outcome(flat(TritonMamba3(launch), ids), tensors)
    expected = support.outcome(flat(ReferenceMamba3(16), ids), tensors, torch.float64)
    for name, one, value in zip(NAMES, found, expected, strict=False):
        assert one.dtype == torch.float32 and one.isfinite().all(), name
        assert (one.double() - value).norm() <= 2e-5 * value.norm() + 1e-6, name


# heads, head_dim, d_state, groups, angles; batch, tokens; first tokens of documents; a state; how it is launched.
CASES = {
    "ragged, odd sizes, groups, a state": ((4, 20, 14, 2, 3), (2, 37), (), True, {}),
    "all channels rotate, many multiprocessors": ((4, 16, 16, 1, 8), (1, 70), (), False, {"num_sms": 1000}),
    "as many groups as heads, a state": ((2, 16, 24, 2, 6), (1, 50), (), True, {}),
    "split heads": ((2, 32, 16, 1, 4), (1, 40), (17,), True, {"split": 16, "num_sms": 1000}),
    "documents, at borders of tiles and chunks": ((2, 16, 16, 1, 4), (2, 66), (1, 16, 32, 33, 65), True, {}),
    "the same of states that are passed": (
        (2, 16, 16, 1, 4), (1, 66), (1, 16, 32, 33, 65), True, {"num_sms": 1000},
    ),
    "every token a document": ((2, 16, 8, 1, 2), (1, 20), tuple(range(1, 20)), True, {}),
    "one token": ((2, 16, 16, 1, 4), (3, 1), (), True, {}),
    "one token without a state": ((3, 16, 7, 1, 3), (1, 1), (), False, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_the_references(case):
    sizes, (batch, seq_len), starts, with_state, how = CASES[case]
    spec = Mamba3Spec(*sizes, dtype="float32")
    tensors = support.inputs("mamba3", spec, batch, seq_len, state=with_state)
    ids = None
    if starts:
        ids = torch.zeros(batch, seq_len, dtype=torch.int64)
        ids[:, list(starts)] = 1
        ids = ids.cumsum(1)
    assert_agrees(spec, tensors, small(spec, **how), ids)


@pytest.mark.parametrize("decay", [0.0, -1e-9, -50.0, -1e4])
@pytest.mark.parametrize("later", [0.0, 1.0])
def test_extreme_decays_and_weights(decay, later):
    """Every third token has the decay, among others; what is divided by a decay would not be finite."""
    spec = Mamba3Spec(2, 16, 16, 1, 4, dtype="float32")
    tensors = support.inputs("mamba3", spec, 1, 45, state=True)
    tensors[3][:, ::3], tensors[5][:] = decay, later
    assert_agrees(spec, tensors, small(spec))


def test_rounding_of_16_bits_does_not_add_up_over_later_tokens():
    """A rate acts on all later tokens, whose gradients cancel but for pairs with earlier ones; see keys_bwd.py."""
    spec = Mamba3Spec(2, 64, 128, 1, 32, dtype="float16")
    tensors, launch = (
        support.inputs("mamba3", spec, 1, 512),
        replace(Launch.parse(build(spec, GPU, "").options), num_sms=1),
    )
    found = support.outcome(flat(TritonMamba3(launch)), tensors)
    expected = support.outcome(flat(ReferenceMamba3(64)), tensors, torch.float64)
    for name, one, value in zip(NAMES, found, expected, strict=False):
        assert (one.double() - value).norm() <= 8e-4 * value.norm() + 1e-6, name


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e7])
def test_scaled_keys_are_the_rotated_ones_rounded_to_fp16(size):
    """In its range, whatever their size, in blocks of two tiles, of which the last is not whole."""
    spec = Mamba3Spec(2, 16, 24, 1, 6, dtype="float32")
    q, k, _, _, dt, later, rate, q_bias, k_bias, D = support.inputs("mamba3", spec, 2, 70)
    q, k, q_bias, k_bias = (size * t for t in (q, k, q_bias, k_bias))
    given = (q, k, dt, later, rate, q_bias, k_bias, D, None, rotations.rotation_sums(rate, dt), 1)
    exact, found = rotations.rotate(*given)[0], rotations.rotate(*given, 32)[0]
    assert found.exponents is not None
    for wanted, halves, exponents in zip(exact[:2], found[:2], found.exponents, strict=True):
        assert halves.dtype == torch.float16 and 1 << 11 < halves.abs().max() < 1 << 15
        scales = exponents.exp2().repeat_interleave(32, 1)[:, :70, :, None]
        torch.testing.assert_close(halves * scales, wanted, rtol=2**-10, atol=2**-24 * size)


def test_angles_of_a_long_text_stay_exact():
    spec = Mamba3Spec(1, 16, 16, 1, 8, dtype="float32")
    tensors = support.inputs("mamba3", spec, 1, 600)
    tensors[4] += 30.0
    launch = small(spec)
    y, _ = TritonMamba3(launch)(*tensors)
    expected, _ = ReferenceMamba3(64)(*(t.double() for t in tensors))
    assert (y.double() - expected).norm() < 2e-4 * expected.norm()


@pytest.mark.parametrize("sizes", [(4, 20, 14, 2, 3), (2, 16, 16, 1, 8), (2, 64, 256, 1, 64)], ids=str)
def test_a_step_is_the_references(sizes):
    """The last has a head in two tiles."""
    spec = Mamba3Spec(*sizes, dtype="float32")
    *tensors, h, angle, k, v = support.inputs("mamba3", spec, 3, 1, state=True)
    ours, exact = ([t.to(dtype, copy=True) for t in (h, angle, k, v)] for dtype in (torch.float32, torch.float64))
    kernel, found = TritonMamba3Step(spec, GPU), []
    for step, state, dtype in ((kernel, ours, torch.float32), (ReferenceMamba3Step(), exact, torch.float64)):
        now = state_of([*tensors, *state])
        of_token, parameters = (t.to(dtype)[:, 0] for t in tensors[:7]), (t.to(dtype) for t in tensors[7:])
        found.append([cast("Any", step)(*of_token, *parameters, now), *state])
    for one, value in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), value, atol=1e-5, rtol=1e-5)
