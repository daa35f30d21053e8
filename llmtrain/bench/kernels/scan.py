"""The cells of the scan, beside the kernels of state-spaces/mamba and of flash-linear-attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from llmtrain.bench.kernels import autotuned
from llmtrain.bench.kernels.backends import backends, built
from llmtrain.bench.kernels.cell import Bar, Cell, Contender, Work, device, leaf, run_both, wide
from llmtrain.bench.tune.ssd import Case

LENGTHS = (2048, 4096, 8192)
SHAPES = ((80, 64, 128), (80, 64, 64), (64, 64, 128))
BARS = (
    Bar("mamba_ssm", "sum", 2.0),
    Bar("mamba_ssm", "forward", 1.8),
    Bar("mamba_ssm", "backward", 2.0),
    Bar("mamba_ssm", "memory", 1.0),
)


def cells(tiny: bool, chunks: tuple[int, ...]) -> Iterator[Cell]:
    """chunks: of the public kernels."""
    if tiny:
        yield cell(Case(2, 16, 16, 1, 128, "float32", 256), (), ())
        return
    for shape in SHAPES:
        for seq_len in LENGTHS:
            yield cell(Case(*shape, seq_len=seq_len), BARS, chunks)


def cell(case: Case, bars: tuple[Bar, ...], chunks: tuple[int, ...]) -> Cell:
    def inputs(seed: int) -> tuple[list[Tensor], Tensor]:
        *tensors, dy = case.tensors(device(), seed)
        return [leaf(t) for t in tensors], dy

    forward, backward = work(case)
    return Cell(
        "ssd", f"{case.heads}x{case.head_dim}, d_state {case.d_state}", case.seq_len,
        ("y", *(f"d{name}" for name in ("x", "dt", "A", "B", "C", "D", "dt_bias"))),
        inputs, lambda: _contenders(case, chunks), lambda leaves, dy: by_sequence(case.exact(), leaves, dy),
        forward, backward, bars, last_sequence,
    )  # fmt: skip


def work(case: Case) -> tuple[Work, Work]:
    """Bytes: x, y, dt, B and C, and in the backward dy and all gradients, once each."""
    tokens, size = case.batch * case.seq_len, 4 if case.dtype == "float32" else 2
    x, bc, dt = (tokens * n * size for n in (case.heads * case.head_dim, 2 * case.groups * case.d_state, case.heads))
    forward, backward = case.flops()
    return Work(forward, 2 * x + bc + dt), Work(backward, 3 * x + 2 * bc + 2 * dt)


def _contenders(case: Case, chunks: tuple[int, ...]) -> list[Contender]:
    names = [name for name in backends("ssd", case.spec) if name != "mamba_ssm"]
    if device() == "cuda" and case.seq_len != 4096:
        names = [name for name in names if name != "reference"]  # compiles for many seconds, and is far behind
    found = [Contender(name, lambda name=name: _ours(case, name)) for name in names]
    if device() == "cuda" and importlib.util.find_spec("mamba_ssm") is not None:
        for chunk in chunks:

            def warm(k: int, n: int, chunk: int = chunk) -> None:
                *tensors, dy = case.tensors(device())
                with autotuned.compile_share(k, n):
                    run_both(public(chunk), [leaf(t) for t in tensors], dy)

            found.append(Contender(f"mamba_ssm {chunk}", lambda chunk=chunk: public(chunk), True, warm))
    if device() == "cuda" and importlib.util.find_spec("fla") is not None:
        found.append(Contender("fla", fla, True))
    return found


def _ours(case: Case, name: str) -> Callable[..., Tensor]:
    kernel = built("ssd", name, case.spec)
    return lambda *leaves: kernel(*leaves)[0]


def public(chunk: int) -> Callable[..., Tensor]:
    """mamba_ssm's scan, which times its variants on its first call."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-not-found]

    autotuned.hasten()

    def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        return mamba_chunk_scan_combined(x, dt, A, B, C, chunk, D=D, dt_bias=dt_bias, dt_softplus=True)

    return run


def fla() -> Callable[..., Tensor]:
    """flash-linear-attention's gated linear attention with a scalar gate per head, of which Mamba-2's scan is a case: q, k, v
    and the logarithm of the gate are C, B, dt x and dt A. It has no groups: B and C are repeated for each head.
    """
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]

    @torch.compile(dynamic=False)
    def before(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor) -> tuple[Tensor, ...]:
        dt = torch.nn.functional.softplus(dt.float() + dt_bias)
        repeats = x.shape[2] // B.shape[2]
        B, C = (t.repeat_interleave(repeats, dim=2) for t in (B, C))
        return C, B, (x * dt[..., None]).to(x.dtype), dt * A

    @torch.compile(dynamic=False)
    def behind(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
        return (y + D[:, None] * x).to(x.dtype)

    def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        q, k, v, gate = before(x, dt, A, B, C, dt_bias)
        return behind(chunk_simple_gla(q, k, v, gate, scale=1.0)[0], x, D)

    return run


def last_sequence(found: Sequence[Tensor]) -> list[Tensor]:
    """The last sequence of per-token tensors; vectors (A, D, dt_bias, ...) whole: their gradients are sums over sequences."""
    return [t[-1:] if t.ndim >= 3 else t for t in found]


def by_sequence(function: Callable[..., Tensor], leaves: list[Tensor], up: Tensor) -> list[Tensor]:
    """`last_sequence` of the output and gradients in float64, one sequence after the other, for they take much memory."""
    found: list[Tensor] = []
    for i in range(len(up)):
        pieces = wide(leaves, lambda t, i=i: t[i : i + 1] if t.ndim >= 3 else t)
        new = run_both(function, pieces, up[i : i + 1].double())
        found = [b if b.ndim >= 3 else a + b for a, b in zip(found or map(torch.zeros_like, new), new, strict=True)]
    return found
