"""A small forward and backward of every backend against float64, in a second or so each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.tune.operations import relative_error
from llmtrain.kernels import registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.ssd.spec import SSDSpec

BATCH, SEQ_LEN = 2, 192
TOLERANCE = {"bfloat16": 0.02, "float16": 0.004, "float32": 2e-4}
"""Largest relative error, in the norm of a whole tensor, that passes."""


@dataclass(frozen=True)
class Exam:
    """One operation as the doctor asks for it. inputs: what the kernel is called with, float32 leaves last to first;
    narrow: how many of them, from the first, take the dtype under test.
    """

    operation: registry.Operation
    what: str
    spec: Any
    shapes: tuple[tuple[int, ...], ...]
    narrow: int


def exams(dtype: str) -> Iterator[Exam]:
    T, H, P, N = SEQ_LEN, 4, 64, 64

    def attention(**more: Any) -> AttentionSpec:
        return AttentionSpec(H, H, P, P**-0.5, dtype=dtype, **more)

    qkv = ((BATCH, T, H, P),) * 3
    yield Exam("attention", "causal", attention(), qkv, 3)
    yield Exam("attention", "ALiBi, window", attention(alibi_max_bias=8.0, sliding_window=64), qkv, 3)
    scan = ((BATCH, T, H, P), (BATCH, T, H), (H,), (BATCH, T, 1, N), (BATCH, T, 1, N), (H,), (H,))
    of_scan = SSDSpec(H, P, N, 1, 64, dtype=dtype)
    yield Exam("ssd", "scan", of_scan, scan, 2)
    keys = (BATCH, T, 2, N)
    rule = (keys, keys, (BATCH, T, H, P), (BATCH, T, H), (BATCH, T, H))
    yield Exam("gated_delta", "2 key heads", GatedDeltaSpec(H, 2, N, P, dtype), rule, 3)
    yield Exam("conv1d", "width 4", Conv1dSpec(256, 4, dtype), ((BATCH, T, 256), (256, 4), (256,)), 3)
    of_norm = GatedNormSpec(H * P, 1, 1e-5, False, dtype)
    yield Exam("gated_norm", "gate first", of_norm, ((BATCH, T, 256), (BATCH, T, 256), (256,)), 2)
    whole = MambaMixerSpec(Conv1dSpec(384, 4, dtype), of_scan, of_norm)
    mixer = ((BATCH, T, sum(whole.widths)), (384, 4), (384,), (H,), (H,), (H,), (256,))
    yield Exam("mamba_mixer", "conv, scan, norm", whole, mixer, 3)
    row = (BATCH, 24, 256)  # few: on a CPU, PyTorch adds up LayerNorm's gradients of weights in bf16
    yield Exam("norm", "sum, RMSNorm", NormSpec(256, dtype=dtype), (row, row, (256,)), 3)
    yield Exam("norm", "sum, LayerNorm", NormSpec(256, "layernorm", True, dtype=dtype), (row, row, (256,), (256,)), 4)
    yield Exam("rotary", "positions", RotarySpec(P, dtype), ((BATCH, T, H, P), (BATCH, T, 2, P)), 2)


def leaves(exam: Exam, device: str) -> list[Tensor]:
    """The same numbers on every device."""
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=g) for shape in exam.shapes]
    narrow = set(range(exam.narrow))
    if exam.operation in ("ssd", "mamba_mixer"):
        A, dt_bias = (2, 6) if exam.operation == "ssd" else (3, 5)
        made[A] = -(1 + 15 * torch.rand(exam.shapes[A], generator=g))
        made[dt_bias] = made[dt_bias] - 4
        narrow = {0, 1, 3, 4} if exam.operation == "ssd" else narrow
    if exam.operation == "gated_delta":
        made[1] = torch.nn.functional.normalize(made[1], dim=-1)
        made[3], made[4] = -torch.nn.functional.softplus(made[3] - 2), made[4].sigmoid()
    dtype = getattr(torch, exam.spec.dtype)
    return [t.to(device, dtype if i in narrow else torch.float32).requires_grad_() for i, t in enumerate(made)]


def error(exam: Exam, backend: str, here: Platform) -> float:
    """Largest relative error of output and gradients against the reference in float64. Raises whatever the backend does."""
    device = here.device_type
    tensors = leaves(exam, device)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    found = _run(_function(exam, backend, here), tensors)
    exact = _run(_function(exam, "reference", here), wide)
    return max(relative_error(a, b) for a, b in zip(found, exact, strict=True))


def _function(exam: Exam, backend: str, here: Platform) -> Callable[..., Tensor]:
    kernel: Any = registry.resolve(exam.operation, backend, exam.spec, here).build(exam.spec, here)
    if exam.operation == "attention":
        context = kernel.prepare(SEQ_LEN, torch.device(here.device_type))
        return lambda q, k, v: kernel(q, k, v, context)
    if exam.operation == "rotary":
        angle = torch.arange(SEQ_LEN, device=here.device_type)[:, None, None] * torch.linspace(
            0.01, 1, exam.spec.head_dim // 2
        ).to(here.device_type)
        return lambda q, k: torch.cat([t.flatten() for t in kernel(q, k, angle.cos(), angle.sin())])
    if exam.operation in ("ssd", "gated_delta"):
        return lambda *tensors: kernel(*tensors)[0]
    if exam.operation == "norm":
        return lambda *tensors: torch.cat(kernel(*tensors), -1)
    return kernel


def _run(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    y = function(*tensors)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    # Numbers that the narrow dtype can hold, so that both see the same.
    up = up.to(torch.bfloat16).to(y.device, y.dtype)
    return [y.detach(), *torch.autograd.grad(y, tensors, up)]
