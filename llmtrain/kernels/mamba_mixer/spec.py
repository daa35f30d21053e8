"""Specification of the inside of a Mamba-2 mixer, between its two projections, as one operation. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.conv1d import spec as conv1d
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm import spec as gated_norm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd import spec as ssd
from llmtrain.kernels.ssd.spec import SSDSpec


@dataclass(frozen=True)
class MambaMixerSpec:
    """z | xBC | dt -> x | B | C = conv1d(xBC) -> y = ssd(x, dt, B, C) -> gated_norm(y, z)."""

    conv1d: Conv1dSpec
    ssd: SSDSpec
    gated_norm: GatedNormSpec

    def __post_init__(self) -> None:
        assert self.gated_norm.dim == self.ssd.n_heads * self.ssd.head_dim
        assert self.conv1d.channels == sum(self.conv_widths)
        assert self.conv1d.dtype == self.ssd.dtype == self.gated_norm.dtype

    @property
    def dtype(self) -> str:
        return self.ssd.dtype

    @property
    def widths(self) -> list[int]:
        """Widths of z, xBC and dt."""
        return [self.gated_norm.dim, self.conv1d.channels, self.ssd.n_heads]

    @property
    def conv_widths(self) -> list[int]:
        """Widths of x, B and C."""
        d_bc = self.ssd.n_groups * self.ssd.d_state
        return [self.gated_norm.dim, d_bc, d_bc]


def refuse_triton(spec: MambaMixerSpec, platform: Platform | None) -> str | None:
    """Reason of the first of its parts that cannot serve."""
    return (
        ssd.refuse_triton_scan(spec.ssd, platform)
        or conv1d.refuse_triton_sequence(spec.conv1d, platform)
        or gated_norm.refuse_triton_rows(spec.gated_norm, platform)
    )


def preference(spec: MambaMixerSpec, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`: ours where each part's `auto` is ours too."""
    parts = (
        conv1d.preference(spec.conv1d, platform),
        ssd.preference(spec.ssd, platform),
        gated_norm.preference(spec.gated_norm, platform),
    )
    return ("triton", "reference") if all(part[0] == "triton" for part in parts) else ("reference", "triton")
