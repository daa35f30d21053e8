"""The section of a Mamba-2 block. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmtrain.config.base import PositiveInt, Problem, free
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.block import BlockSection, Kernel

SSDBackend = Literal["auto", "reference", "triton", "mamba_ssm"]


class Mamba2Block(BlockSection):
    """Pre-norm Mamba-2 block (Dao & Gu, arXiv:2405.21060): x + mamba2(norm(x)), then an optional MLP."""

    implementation: ClassVar[str] = "llmtrain.models.mixers.mamba2:Mamba2"

    type: Literal["mamba2"]
    d_state: PositiveInt = 128
    head_dim: PositiveInt = 64
    expand: PositiveInt = 2
    """d_inner = expand * d_model; n_heads = d_inner / head_dim."""
    n_groups: PositiveInt = 1
    """Groups that share B and C."""
    d_conv: PositiveInt = 4
    """Kernel width of the causal depthwise convolution."""
    chunk_size: PositiveInt = free(256)
    dt_min: Annotated[float, Field(gt=0)] = 1e-3
    dt_max: Annotated[float, Field(gt=0)] = 1e-1
    """Initial time steps are log-uniform between dt_min and dt_max."""
    dt_limit: tuple[float, float | None] | None = None
    """Clamp softplus(dt + dt_bias) to this range; [low, null] has no upper limit."""
    a_init_range: tuple[float, float] = (1.0, 16.0)
    """-A is drawn uniformly from this range."""
    conv_bias: bool = True
    proj_bias: bool = False
    norm_before_gate: bool = False
    """Gated norm: norm(x * silu(z)) when false, norm(x) * silu(z) when true."""
    gated_norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Default: the norm's eps."""
    backend: SSDBackend = free("auto")
    """Backend of the scan; also of the convolution and the gated norm, where they have one of that name that can serve."""

    def problems(self) -> Iterator[Problem]:
        if self.dt_min > self.dt_max:
            yield Problem("dt_min", self.dt_min, f"must not exceed dt_max ({self.dt_max})")
        low, high = self.dt_limit or (0.0, None)
        if not 0 <= low < (math.inf if high is None else high):
            yield Problem("dt_limit", [low, high], "must be [low, high] with 0 <= low < high, or [low, null]")
        if not 0 < self.a_init_range[0] <= self.a_init_range[1]:
            yield Problem("a_init_range", list(self.a_init_range), "must be [low, high] with 0 < low <= high")

    def spec(self, d_model: int, dtype: str = "bfloat16") -> SSDSpec:
        """The scan kernel's view of the block."""
        return SSDSpec(
            n_heads=self.expand * d_model // self.head_dim,
            head_dim=self.head_dim,
            d_state=self.d_state,
            n_groups=self.n_groups,
            chunk_size=self.chunk_size,
            dt_limit=self.dt_limit,
            dtype=dtype,
        )

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel:
        return Kernel("ssd", self.spec(d_model, dtype), self.backend)

    def width_problems(self, d_model: int) -> Iterator[Problem]:
        d_inner = self.expand * d_model
        if d_inner % self.head_dim:
            yield Problem("head_dim", self.head_dim, f"must divide expand * d_model = {d_inner}")
        elif (d_inner // self.head_dim) % self.n_groups:
            heads = d_inner // self.head_dim
            yield Problem("n_groups", self.n_groups, f"must divide the {heads} heads (expand * d_model / head_dim)")

    def describe(self, d_model: int) -> str:
        heads = self.expand * d_model // self.head_dim
        return f"mamba2: {heads} heads x {self.head_dim}, d_state {self.d_state}, groups {self.n_groups}"

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Input and output of the norm, in_proj's output, the convolution's, y and the gated norm's output; in fp32 per
        chunk the state and C B^T.

        With `backend: triton` the inside of the mixer is one operator (kernels/mamba_mixer/triton.py): states and C B^T
        are computed again rather than kept, and of the norm there is one fp32 number per group more. Selective
        checkpointing keeps in_proj's output, not out_proj's.
        """
        d_inner, d_bc = self.expand * d_model, self.n_groups * self.d_state
        in_proj = 2 * d_inner + 2 * d_bc + d_inner // self.head_dim
        elements = 2 * d_model + in_proj + (d_inner + 2 * d_bc) + 2 * d_inner
        if self.backend == "triton":
            in_fp32 = self.n_groups
        else:
            in_fp32 = d_inner * self.d_state / self.chunk_size + self.n_groups * self.chunk_size
        return SavedBytes(width * elements + 4 * in_fp32, width * in_proj)
