"""Inputs (of kernels/OPERATION/operation.py), outcomes and comparisons of kernels, shared by the tests on a CPU, in Triton's
interpreter and on a GPU."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.mamba_mixer.operation import OPERATION as MIXER
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.operation import operation, relative_error
from llmtrain.kernels.rotary.operation import OPERATION as ROTARY
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.ssd.reference import ReferenceSSD
from llmtrain.kernels.ssd.spec import SSDSpec

SCAN = ("y", "final state", "x", "dt", "A", "B", "C", "D", "dt_bias", "initial state")
"""Names of the outcome of a scan."""


def inputs(name: str, spec: Any, batch: int, seq_len: int, device: str = "cpu", **options: Any) -> list[Any]:
    """Inputs of an operation, other ones for each length."""
    return operation(name).inputs(spec, batch, seq_len, device, seq_len, **options)[0]


def conv_inputs(
    batch: int, seq_len: int, channels: int, width: int, biased: bool, dtype: torch.dtype, device: str = "cpu"
) -> list[Any]:
    return inputs("conv1d", Conv1dSpec(channels, width, named(dtype)), batch, seq_len, device, biased=biased)


def norm_inputs(leading: Sequence[int], dim: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """x, z [*leading, dim] and weight of the gated norm."""
    batch, spec = leading[0] if len(leading) > 1 else 1, GatedNormSpec(dim, 1, 1e-5, False, named(dtype))
    x, z, weight = inputs("gated_norm", spec, batch, leading[-1], device)
    return [x, z, weight] if len(leading) > 1 else [x[0], z[0], weight]


def residual_inputs(
    leading: Sequence[int], dim: int, summed: bool, biased: bool, dtype: torch.dtype, device: str = "cpu"
) -> list[Any]:
    """x, delta [*leading, dim] or None, weight and bias or None of the residual norm."""
    batch, spec = leading[0] if len(leading) > 1 else 1, NormSpec(dim, bias=biased, dtype=named(dtype))
    x, delta, *weights = inputs("norm", spec, batch, leading[-1], device, summed=summed)
    return [None if t is None else t.view(*leading, dim) for t in (x, delta)] + weights


def rotary_inputs(
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Tensor]:
    """q and k."""
    return inputs("rotary", RotarySpec(head_dim, named(dtype)), batch, seq_len, device, heads=heads, kv_heads=kv_heads)


def rotated(kernel: Any, head_dim: int, *leading: int, device: str = "cpu") -> Callable[..., Tensor]:
    """Function of q and k, with tables for T or batch and T."""
    return ROTARY.joined(kernel, *ROTARY.tables(RotarySpec(head_dim), *leading, device=device))  # type: ignore[return-value]


def scan_inputs(
    spec: SSDSpec, batch: int, seq_len: int, dtype: torch.dtype, with_state: bool = False, device: str = "cpu"
) -> list[Tensor]:
    """Time steps from 1e-4 to 1, decays per token from none to all."""
    return inputs("ssd", replace(spec, dtype=named(dtype)), batch, seq_len, device, spread=True, state=with_state)


def mixer_spec(
    heads: int, head_dim: int, d_state: int, dtype: torch.dtype = torch.float32, **more: Any
) -> MambaMixerSpec:
    return MIXER.of_sizes(heads, head_dim, d_state, named(dtype), **{"chunk_size": 64, **more})


def mixer_inputs(
    spec: MambaMixerSpec, batch: int, seq_len: int, biased: bool = True, with_state: bool = False, device: str = "cpu"
) -> list[Any]:
    return inputs("mamba_mixer", spec, batch, seq_len, device, biased=biased, state=with_state)


def outcome(function: Callable[..., Any], tensors: Sequence[Any], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The output, or outputs, and the gradients of a random projection of them, in order; all computed in `dtype`, if given."""
    leaves = [t if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    y = function(*leaves)
    outputs = y if isinstance(y, tuple) else (y,)
    g = torch.Generator().manual_seed(3)
    # The same numbers for all, those that the inputs' dtype can hold.
    up = [torch.randn(t.shape, generator=g).to(tensors[0].dtype).to(t) for t in outputs]
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, [t for t in leaves if t is not None], up)]


def scan_outcome(kernel: Callable[..., Any], tensors: Sequence[Tensor], wide: bool = False) -> dict[str, Tensor]:
    """y, the final state, and the gradients by their names; with `wide`, all in float64."""
    return dict(zip(SCAN, outcome(kernel, tensors, torch.float64 if wide else None), strict=False))


def exact_scan(spec: SSDSpec, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The reference in float64."""
    return scan_outcome(ReferenceSSD(spec), tensors, wide=True)


def peak_bytes(function: Callable[..., Tensor], tensors: Sequence[Any]) -> int:
    """Peak of a GPU's memory, above the inputs and the gradient of the output, while it runs forward and backward."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    wanted = [t for t in leaves if t is not None]
    up = torch.ones_like(function(*leaves))
    for _ in range(2):  # first, kernels are compiled
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = function(*leaves)
        torch.autograd.grad(y, wanted, up)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del y
    return peak


def assert_agrees(ours: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float = 1e-4) -> None:
    for i, (a, b) in enumerate(zip(ours, exact, strict=True)):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance, msg=lambda m, i=i: f"tensor {i}: {m}")


def assert_scans_agree(ours: dict[str, Tensor], exact: dict[str, Tensor], limit: float) -> None:
    """Tensor by tensor: where a decay is strong (-144 for a unit of time here), single elements cancel, and PyTorch in fp32 is
    off by 4e-4 too."""
    assert ours.keys() == exact.keys()
    assert not {name: error for name, error in scan_errors(ours, exact).items() if not error < limit}


def assert_as_exact(names: Sequence[str], ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Errors at most 1.1 times those of the reference in the same dtype. 7e-4 is the rounding of bf16 itself, which no kernel can
    go below: 2^-9, a third of it on average. A number per head is a sum over all tokens, whose terms cancel, and with few heads the
    reference's own error is left to chance: ours is at most twice its largest error of any tensor."""
    worse = {
        name: (a, b)
        for name, a, b in zip(names, ours, theirs, strict=True)
        if not a <= (2.0 * max(theirs) if name in ("A", "D", "dt_bias") else 1.1 * max(b, 7e-4))
    }
    assert not worse


def assert_equal(*runs: Sequence[Tensor]) -> None:
    """Bit by bit."""
    first, *others = runs
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def assert_whole(operator: Any, arguments: Sequence[Any]) -> None:
    """Schema, fake implementation and autograd of an operator."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, tuple(arguments), test_utils=checks)


def assert_compiles(kernel: Any, tensors: Sequence[Any]) -> None:
    """Without a graph break, to equal results."""
    call = kernel if hasattr(kernel, "__code__") else kernel.__call__
    assert_equal(outcome(torch.compile(call, fullgraph=True, backend="aot_eager"), tensors), outcome(kernel, tensors))


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Relative, in the norm of a whole tensor. NaN where there is one in what is found."""
    return [relative_error(a, b) for a, b in zip(found, exact, strict=True)]


def scan_errors(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return dict(zip(exact, errors([ours[name] for name in exact], list(exact.values())), strict=True))


def documents(lengths: Sequence[int], batch: int = 1, device: str = "cpu") -> Tensor:
    """Ids [batch, T] of documents of these lengths."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(batch, -1).to(device)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
