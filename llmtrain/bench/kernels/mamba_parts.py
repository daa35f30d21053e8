"""Cells of the other parts of a Mamba-2 mixer: convolution with SiLU, gated norm, and the mixer without its projections."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.bench.kernels import scan
from llmtrain.bench.kernels.backends import all_backends, backends, built
from llmtrain.bench.kernels.cell import Bar, Cell, Contender, Work, device, draw, generator, leaf, run_both, wide
from llmtrain.bench.tune import ssd
from llmtrain.kernels.conv1d.reference import causal_conv1d_silu
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.reference import ReferenceGatedNorm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.mamba_mixer.reference import compose
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec

WIDTH, EPS = 4, 1e-5


@dataclass(frozen=True)
class Sizes:
    """Sizes of a mixer. d_inner = heads x head_dim channels pass the gate, conv channels the convolution."""

    heads: int = 80
    head_dim: int = 64
    d_state: int = 128
    tokens: int = 16384
    dtype: str = "bfloat16"

    @property
    def d_inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.d_inner + 2 * self.d_state

    @property
    def conv1d(self) -> Conv1dSpec:
        return Conv1dSpec(self.channels, WIDTH, self.dtype)

    @property
    def gated_norm(self) -> GatedNormSpec:
        return GatedNormSpec(self.d_inner, 1, EPS, False, self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of one number per token."""
        return self.tokens * (2 if self.dtype == "bfloat16" else 4)

    def projection(self, seq_len: int, g: torch.Generator) -> Tensor:
        """z | x B C | dt, as the mixer's first projection gives it."""
        width = self.d_inner + self.channels + self.heads
        return draw(g, self.tokens // seq_len, seq_len, width, dtype=getattr(torch, self.dtype))


TINY = Sizes(2, 16, 16, 256, "float32")


def conv_cells(tiny: bool) -> Iterator[Cell]:
    sizes = TINY if tiny else Sizes()
    for seq_len in (128,) if tiny else scan.LENGTHS:
        yield conv_cell(sizes, seq_len)


def norm_cells(tiny: bool) -> Iterator[Cell]:
    yield norm_cell(TINY if tiny else Sizes(), 128 if tiny else 4096)  # tokens are all that counts


def mixer_cells(tiny: bool, chunks: tuple[int, ...]) -> Iterator[Cell]:
    if tiny:
        yield _mixer(TINY, 128, chunks)
        return
    for heads, head_dim, d_state in scan.SHAPES:
        for seq_len in scan.LENGTHS:
            yield _mixer(Sizes(heads, head_dim, d_state), seq_len, chunks)


def conv_cell(sizes: Sizes, seq_len: int) -> Cell:
    channels = sizes.channels

    def inputs(seed: int) -> tuple[list[Tensor], Tensor]:
        g = generator(seed)
        x = sizes.projection(seq_len, g)[..., sizes.d_inner : sizes.d_inner + channels]
        weight, bias = draw(g, channels, WIDTH, dtype=x.dtype), draw(g, channels, dtype=x.dtype)
        return [leaf(x), leaf(weight), leaf(bias)], draw(g, *x.shape, dtype=x.dtype)

    def exact(leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
        return run_both(causal_conv1d_silu, wide(leaves), dy.double())

    flops = 2.0 * sizes.tokens * channels * WIDTH
    moved = channels * sizes.bytes
    return Cell(
        "conv1d", f"{channels} channels", seq_len, ("y", "dx", "dweight", "dbias"), inputs,
        lambda: all_backends("conv1d", sizes.conv1d, ("aten", "causal_conv1d")), exact,
        Work(flops, 2 * moved), Work(3 * flops, 3 * moved),
    )  # fmt: skip


def norm_cell(sizes: Sizes, seq_len: int) -> Cell:
    def inputs(seed: int) -> tuple[list[Tensor], Tensor]:
        g = generator(seed)
        z = sizes.projection(seq_len, g)[..., : sizes.d_inner]
        x, weight = draw(g, *z.shape, dtype=z.dtype), draw(g, sizes.d_inner)
        return [leaf(x), leaf(z), leaf(weight)], draw(g, *z.shape, dtype=z.dtype)

    def exact(leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
        return run_both(ReferenceGatedNorm(sizes.gated_norm), wide(leaves), dy.double())

    moved, flops = sizes.d_inner * sizes.bytes, 8.0 * sizes.tokens * sizes.d_inner
    return Cell(
        "gated_norm", f"{sizes.d_inner} channels", seq_len, ("y", "dx", "dz", "dweight"), inputs,
        lambda: all_backends("gated_norm", sizes.gated_norm, ("mamba_ssm",)), exact,
        Work(flops, 3 * moved), Work(2 * flops, 5 * moved),
    )  # fmt: skip


def _mixer(sizes: Sizes, seq_len: int, chunks: tuple[int, ...]) -> Cell:
    case = ssd.Case(sizes.heads, sizes.head_dim, sizes.d_state, 1, seq_len, sizes.dtype, sizes.tokens)
    spec = MambaMixerSpec(sizes.conv1d, case.spec, sizes.gated_norm)

    def inputs(seed: int) -> tuple[list[Tensor], Tensor]:
        g, n = generator(seed), sizes.heads
        fused = sizes.projection(seq_len, g)
        rates = -(1 + 15 * torch.rand(n, generator=g, device=fused.device))
        taps = [draw(g, *shape, dtype=fused.dtype) for shape in ((sizes.channels, WIDTH), (sizes.channels,))]
        vectors = [*taps, rates, draw(g, n), draw(g, n) - 4]
        up = draw(g, sizes.tokens // seq_len, seq_len, sizes.d_inner, dtype=fused.dtype)
        return [leaf(t) for t in (fused, *vectors, draw(g, sizes.d_inner))], up

    def exact(leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
        run = mixer(spec, causal_conv1d_silu, case.exact(), ReferenceGatedNorm(spec.gated_norm))
        return scan.by_sequence(run, leaves, dy)

    forward, backward = scan.work(case)
    conv, norm = sizes.channels * sizes.bytes, sizes.d_inner * sizes.bytes
    return Cell(
        "mixer", f"{sizes.heads}x{sizes.head_dim}, d_state {sizes.d_state}", seq_len,
        ("y", "dprojection", "dconv_weight", "dconv_bias", "dA", "dD", "ddt_bias", "dnorm_weight"), inputs,
        lambda: _mixer_contenders(spec, chunks), exact,
        # What its three parts move; fused, it would be less.
        Work(forward.flops, forward.bytes + 2 * conv + 3 * norm),
        Work(backward.flops, backward.bytes + 3 * conv + 5 * norm),
        (Bar("public", "sum", 2.0), Bar("public", "memory", 1.0)),
        scan.last_sequence,
        # dA is a number per head, and the error of each is relative to a sum that may come out small: few settle nothing.
        draws=8,
    )  # fmt: skip


def mixer(
    spec: MambaMixerSpec, conv: Callable[..., Tensor], ssd_: Callable[..., Tensor], norm: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """The second projection's input from the first's output, as three operations."""

    def run(
        fused: Tensor, weight: Tensor, bias: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor, norm_weight: Tensor
    ) -> Tensor:
        return compose(
            spec,
            fused,
            lambda xBC: conv(xBC, weight, bias),
            lambda x, dt, B, C: ssd_(x, dt, A, B, C, D, dt_bias),
            lambda y, z: norm(y, z, norm_weight),
        )

    return run


def _mixer_contenders(spec: MambaMixerSpec, chunks: tuple[int, ...]) -> list[Contender]:
    """Ours is one operator; `parts`: the same kernels, as three."""

    def parts() -> Callable[..., Tensor]:
        kernel = built("ssd", "triton", spec.ssd)
        conv, norm = built("conv1d", "triton", spec.conv1d), built("gated_norm", "triton", spec.gated_norm)
        return mixer(spec, conv, lambda *t: kernel(*t)[0], norm)

    if device() == "cpu":
        return [Contender("reference", lambda: built("mamba_mixer", "reference", spec))]
    found = []
    if "triton" in backends("mamba_mixer", spec):
        found = [Contender("triton", lambda: built("mamba_mixer", "triton", spec)), Contender("parts", parts)]
    if importlib.util.find_spec("mamba_ssm") is not None:
        found += [_public_mixer(spec, chunk) for chunk in chunks]
    return found


def _public_mixer(spec: MambaMixerSpec, chunk: int) -> Contender:
    def make() -> Callable[..., Tensor]:
        conv = "causal_conv1d" if "causal_conv1d" in backends("conv1d", spec.conv1d) else "reference"
        norm = built("gated_norm", "mamba_ssm", spec.gated_norm)
        return mixer(spec, built("conv1d", conv, spec.conv1d), scan.public(chunk), norm)

    # Its scan has the variants of the scan's own cells.
    return Contender(f"public {chunk}", make, True)
