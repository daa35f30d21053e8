"""The section of a Mamba-2 block. No torch here."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from llmtrain.config.base import NonNegativeFloat, PositiveFloat, Problem, Width, free
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.block import BlockSection, Divided, Kernel
from llmtrain.models.sections.layers import NormConfig

SSDBackend = Literal["auto", "reference", "triton", "mamba_ssm"]


class Mamba2Block(BlockSection):
    """Pre-norm Mamba-2 block (Dao & Gu, arXiv:2405.21060): x + mamba2(norm(x)), then an optional MLP."""

    implementation: ClassVar[str] = "llmtrain.models.mixers.mamba2:Mamba2"

    without_function: ClassVar[tuple[str, ...]] = (
        *("type", "backend", "chunk_size", "expand"),  # d_inner resolves expand
        *("dt_min", "dt_max", "a_init_range"),  # of fresh weights
    )

    type: Literal["mamba2"]
    d_state: Width = 128
    head_dim: Width = 64
    expand: Width = 2
    """d_inner = expand * d_model; n_heads = d_inner / head_dim."""
    d_inner: Width | None = None
    """Channels of the scan; takes the place of expand."""
    n_groups: Width = 1
    """Groups that share B and C."""
    d_conv: Width = 4
    """Kernel width of the causal depthwise convolution."""
    chunk_size: Width = free(256)
    dt_min: PositiveFloat = 1e-3
    dt_max: PositiveFloat = 1e-1
    """Initial time steps are log-uniform between dt_min and dt_max."""
    dt_limit: tuple[NonNegativeFloat, NonNegativeFloat | None] | None = None
    """Clamp softplus(dt + dt_bias) to this range; [low, null] has no upper limit."""
    a_init_range: tuple[PositiveFloat, PositiveFloat] = (1.0, 16.0)
    """-A is drawn uniformly from this range."""
    conv_bias: bool = True
    proj_bias: bool = False
    projection_multipliers: tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat] = (
        1.0, 1.0, 1.0, 1.0, 1.0,
    )  # fmt: skip
    """Factors of the parts of the first projection's output: gate z, x, B, C, dt (Falcon-H1)."""
    gated_norm: bool = True
    """Normalise the scan's output beside its gate; false: x * silu(z) alone."""
    norm_before_gate: bool = False
    """Gated norm: norm(x * silu(z)) when false, norm(x) * silu(z) when true."""
    gated_norm_eps: PositiveFloat | None = None
    """Default: the norm's eps."""
    backend: SSDBackend = free("auto")
    """Backend of the scan; also of the convolution and the gated norm, where they have one of that name that can serve."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.dt_min > self.dt_max:
            yield self.problem_at("dt_min", f"must not exceed dt_max ({self.dt_max})")
        low, high = self.dt_limit or (0.0, None)
        if not 0 <= low < (math.inf if high is None else high):
            yield Problem("dt_limit", [low, high], "must be [low, high] with 0 <= low < high, or [low, null]")
        if not 0 < self.a_init_range[0] <= self.a_init_range[1]:
            yield Problem("a_init_range", list(self.a_init_range), "must be [low, high] with 0 < low <= high")

    def function(self, d_model: int, norm: NormConfig) -> dict[str, Any]:
        limit = None if self.dt_limit == (0.0, None) else self.dt_limit  # softplus is positive
        resolved: dict[str, Any] = {"dt_limit": limit, "d_inner": self.inner_width(d_model)}
        if self.gated_norm:
            resolved["gated_norm_eps"] = self.gated_norm_eps or (self.norm or norm).eps
        else:
            resolved |= {"gated_norm_eps": None, "norm_before_gate": False}
        return super().function(d_model, norm) | resolved

    def inner_width(self, d_model: int) -> int:
        """Channels of the scan: its heads times their width."""
        return self.d_inner or self.expand * d_model

    def spec(self, d_model: int, dtype: str = "bfloat16") -> SSDSpec:
        """The scan kernel's view of the block."""
        return SSDSpec(
            n_heads=self.inner_width(d_model) // self.head_dim,
            head_dim=self.head_dim,
            d_state=self.d_state,
            n_groups=self.n_groups,
            chunk_size=self.chunk_size,
            dt_limit=self.dt_limit,
            dtype=dtype,
        )

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel:
        return Kernel("ssd", self.spec(d_model, dtype), self.backend)

    def kernels(
        self, d_model: int, norm: NormConfig, dtype: str = "bfloat16", documents: bool = False
    ) -> Iterator[Kernel]:
        yield from super().kernels(d_model, norm, dtype, documents)
        d_inner = self.inner_width(d_model)
        channels = d_inner + 2 * self.n_groups * self.d_state
        yield Kernel("conv1d", Conv1dSpec(channels, self.d_conv, dtype, documents), self.backend)
        if self.gated_norm:
            eps = self.gated_norm_eps or (self.norm or norm).eps
            yield Kernel(
                "gated_norm", GatedNormSpec(d_inner, self.n_groups, eps, self.norm_before_gate, dtype), self.backend
            )

    def segments_refusal(self, d_model: int, documents: bool = False) -> None:
        """No reason: each segment is a sequence of its own for the kernels."""

    def divided(self, d_model: int) -> list[Divided]:
        heads = self.inner_width(d_model) // self.head_dim
        return [Divided("heads", heads), Divided("n_groups", self.n_groups, repeats=True)]

    def gathered_bytes(self, d_model: int, width: int, seq_len: int, context: int) -> float:
        """Per segment of the others its state and total decays in fp32, and the convolution's inputs at its end."""
        d_inner, n_heads = self.inner_width(d_model), self.inner_width(d_model) // self.head_dim
        ends = width * (self.d_conv - 1) * (d_inner + 2 * self.n_groups * self.d_state)
        return 2 * (context - 1) * (ends + 4 * (d_inner * self.d_state + n_heads))

    def width_problems(self, d_model: int) -> Iterator[Problem]:
        d_inner, name = self.inner_width(d_model), "d_inner" if self.d_inner else "expand * d_model"
        if d_inner % self.head_dim:
            yield self.problem_at("head_dim", f"must divide {name} = {d_inner}")
        elif (d_inner // self.head_dim) % self.n_groups:
            heads = d_inner // self.head_dim
            yield self.problem_at("n_groups", f"must divide the {heads} heads ({name} / head_dim)")

    def describe(self, d_model: int) -> str:
        heads = self.inner_width(d_model) // self.head_dim
        return f"mamba2: {heads} heads x {self.head_dim}, d_state {self.d_state}, groups {self.n_groups}"

    def kept_products(self, d_model: int) -> dict[str, int]:
        d_inner = self.inner_width(d_model)
        return {"in_proj": 2 * d_inner + 2 * self.n_groups * self.d_state + d_inner // self.head_dim}

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Input and output of the norm, in_proj's output, the convolution's, y and the gated norm's output; in fp32 per
        chunk the state and C B^T.

        With `backend: triton` the inside of the mixer is one operator (kernels/mamba_mixer/triton.py): states and C B^T
        are computed again rather than kept, and of the norm there is one fp32 number per group more.
        """
        d_inner, d_bc = self.inner_width(d_model), self.n_groups * self.d_state
        elements = 2 * d_model + self.kept_products(d_model)["in_proj"] + (d_inner + 2 * d_bc) + 2 * d_inner
        if self.backend == "triton":
            in_fp32 = self.n_groups
        else:
            in_fp32 = d_inner * self.d_state / self.chunk_size + self.n_groups * self.chunk_size
        return SavedBytes(width * elements + 4 * in_fp32)
