"""The section of a Mamba-3 block. No torch here."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from llmtrain.config.base import PositiveFloat, PositiveInt, Problem, Width, free
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.block import BlockSection, Kernel

Mamba3Backend = Literal["auto", "reference", "triton"]


class Mamba3Block(BlockSection):
    """Pre-norm Mamba-3 block with one input and output per head (SISO): x + mamba3(norm(x)), then an optional MLP. Its state is
    integrated by a trapezoid rule between the last two tokens, and turns by angles that depend on the text; no convolution."""

    implementation: ClassVar[str] = "llmtrain.models.mixers.mamba3:Mamba3"
    without_function: ClassVar[tuple[str, ...]] = ("type", "backend", "chunk_size", "dt_min", "dt_max")

    type: Literal["mamba3"]
    d_state: Width = 128
    """Channels of B and C: columns of the state of each head."""
    head_dim: Width = 64
    """Channels of a head."""
    expand: Width = 2
    """The heads together have expand * d_model channels."""
    n_groups: Width = 1
    """Groups of heads with one B and C."""
    rope_fraction: PositiveFloat = 0.5
    """Share of the channels of B and C that turn: 0.5 or 1, as the authors' module has it."""
    a_floor: PositiveFloat = 1e-4
    """Smallest rate of decay."""
    dt_min: PositiveFloat = 1e-3
    dt_max: PositiveFloat = 1e-1
    """Initial time steps, softplus(dt_bias), are log-uniform between dt_min and dt_max."""
    chunk_size: PositiveInt = free(64)
    """Tokens that the reference computes at once. Results depend on it only by rounding."""
    backend: Mamba3Backend = free("auto")

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.dt_min > self.dt_max:
            yield self.problem_at("dt_min", f"must not exceed dt_max ({self.dt_max})")
        if self.rope_fraction not in (0.5, 1.0):
            yield self.problem_at("rope_fraction", "must be 0.5 or 1.0")
        elif not self.angles:
            text = f"leaves no pair of channels to turn at rope_fraction {self.rope_fraction}"
            yield self.problem_at("d_state", text)

    def width_problems(self, d_model: int) -> Iterator[Problem]:
        inner = self.expand * d_model
        if inner % self.head_dim:
            yield self.problem_at("head_dim", f"must divide expand * d_model = {inner}")
        elif self.n_heads(d_model) % self.n_groups:
            yield self.problem_at("n_groups", f"must divide the number of heads ({self.n_heads(d_model)})")

    @property
    def angles(self) -> int:
        """Pairs of channels that turn."""
        return int(self.d_state * self.rope_fraction) // 2

    def n_heads(self, d_model: int) -> int:
        return self.expand * d_model // self.head_dim

    def spec(self, d_model: int, dtype: str = "bfloat16") -> Mamba3Spec:
        """The kernel's view of the block."""
        heads = self.n_heads(d_model)
        return Mamba3Spec(heads, self.head_dim, self.d_state, self.n_groups, self.angles, self.chunk_size, dtype)

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel:
        return Kernel("mamba3", self.spec(d_model, dtype), self.backend)

    def widths(self, d_model: int) -> list[int]:
        """Widths of z, x, B, C, dt, A, the trapezoid's weight and the angles, side by side in one projection."""
        inner, of_groups, heads = self.expand * d_model, self.n_groups * self.d_state, self.n_heads(d_model)
        return [inner, inner, of_groups, of_groups, heads, heads, heads, self.angles]

    def describe(self, d_model: int) -> str:
        groups = "" if self.n_groups == 1 else f" ({self.n_groups} groups)"
        return f"mamba3: {self.n_heads(d_model)} heads x {self.head_dim}, state {self.d_state}{groups}"

    def kept_products(self, d_model: int) -> dict[str, int]:
        return {"in_proj": sum(self.widths(d_model))}

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Input and output of the norm, in_proj's output, norms of B and C, and the gated output; in fp32 of each head seven
        tensors like C, four like x, three squares of a chunk, and per chunk three states. Our kernels keep y, and in fp32 what
        they read per token and head, and angles of every 16th token."""
        inner, heads = self.expand * d_model, self.n_heads(d_model)
        everything = width * (2 * d_model + sum(self.widths(d_model)) + 2 * self.n_groups * self.d_state + 2 * inner)
        if self.backend == "triton":
            results = width * inner + heads * (4 * self.angles / 16)
            return SavedBytes(everything + results + 4 * (3 * heads + self.angles), results)
        states = 3 * self.head_dim * self.d_state / self.chunk_size
        of_head = 7 * self.d_state + 4 * self.head_dim + 3 * self.chunk_size + states + 2 * self.angles
        return SavedBytes(everything + 4 * heads * of_head)
