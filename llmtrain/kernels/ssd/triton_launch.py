"""Launch parameters of the SSD kernels, from the tuning tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from llmtrain.kernels import tuning
from llmtrain.kernels.options import Options
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec


@dataclass(frozen=True)
class StatePassingLaunch:
    """How states are passed. rows x columns of [d_state, head_dim] per program; options: Triton's own; share: programs that run
    side by side on a processor.
    """

    block_dstate: int
    block_headdim: int
    num_stages: int
    options: dict[str, int] = field(default_factory=dict)
    programs_per_sm: int = 1

    def tiles(self, d_state: int, head_dim: int) -> int:
        return math.ceil(d_state / self.block_dstate) * math.ceil(head_dim / self.block_headdim)


@dataclass(frozen=True)
class SequentialScanLaunch:
    """How the forward walks. columns of head_dim per program; described: let Hopper's copy engine fetch the tiles (through
    tensor descriptors) where the tensors allow it; share: programs that run side by side on a processor; state_first: what
    comes from the state before what comes from pairs, which takes fewer registers if there are no documents.
    """

    block_headdim: int
    num_stages: int
    options: dict[str, int] = field(default_factory=dict)
    use_tma: bool = False
    programs_per_sm: int = 1
    state_first: bool = False


@dataclass(frozen=True)
class HeadLoopLaunch:
    """How a kernel runs that takes a chunk's heads one after the other. programs: per processor, at least, where there are
    heads enough; described: as of WalkLaunch.
    """

    programs_per_sm: int
    num_stages: int
    options: dict[str, int] = field(default_factory=dict)
    use_tma: bool = False

    def heads(self, per_group: int, chunk_groups: int, num_sms: int) -> int:
        """Of one program: all of a group if the chunks alone make enough programs, for each sums over its heads in
        registers; else fewer. groups_of_heads: chunks * groups * rows of the batch.
        """
        wanted = 0.9 * self.programs_per_sm * num_sms  # a little less than a whole wave is as good
        blocks = min(per_group, max(1, math.ceil(wanted / chunk_groups)))
        return math.ceil(per_group / blocks)


@dataclass(frozen=True)
class Launch(Options):
    """Every launch parameter: what tuning turns.

    chunk, chunk_backward: tokens per chunk, powers of two from 16 on.
    halves: if there is one, a program of the backward takes half a chunk at a time, and so runs the kernel of what passes
        from half to half; else a whole chunk.
    walk, or pair where more programs shall share a processor; passing, scan: the two forms of the forward.
    both, or wide where that fills the device: how the backward passes states and their gradients. pairs, states: its kernels
        within chunks.
    half: states and their gradients in fp16 with powers of two, not in bf16 (of what is in 16 bits).
    precision: of fp32 matrix products. processors: of the device; no row has it.
    """

    chunk_size: int
    sequential_scan: SequentialScanLaunch
    chunk_scan: HeadLoopLaunch
    chunk_size_bwd: int
    state_passing: StatePassingLaunch
    state_passing_bwd: StatePassingLaunch
    intra_chunk_bwd: HeadLoopLaunch
    inter_chunk_bwd: HeadLoopLaunch
    input_precision: str = "ieee"
    num_sms: int = 1
    intra_chunk_halves_bwd: HeadLoopLaunch | None = None
    fp16_states: bool = False
    sequential_scan_shared_sm: SequentialScanLaunch | None = None
    state_passing_bwd_wide: StatePassingLaunch | None = None

    @property
    def tile(self) -> int:
        """Tokens that a program of the backward takes at a time."""
        return self.chunk_size_bwd // (2 if self.intra_chunk_halves_bwd else 1)

    def sequential_scan_for(self, heads: int, head_dim: int) -> SequentialScanLaunch | None:
        """How the forward walks, once per head of all sequences, if so it leaves few processors idle at its end: its last wave
        is nearly full, or its only one more than half full.

        Otherwise states are passed first, then all chunks scanned at once, which moves more bytes but fills any device.
        """
        found = None
        for scan in (self.sequential_scan, self.sequential_scan_shared_sm):
            if scan is not None:
                waves = heads * math.ceil(head_dim / scan.block_headdim) / (scan.programs_per_sm * self.num_sms)
                if _full(waves) or 0.55 < waves <= 1:
                    found = scan
        return found

    def state_passing_bwd_for(self, heads: int, d_state: int, head_dim: int) -> StatePassingLaunch:
        """How the backward passes states of so many heads of all sequences, and their gradients."""
        if self.state_passing_bwd_wide is not None:
            waves = 2 * heads * self.state_passing_bwd_wide.tiles(d_state, head_dim) / (self.state_passing_bwd_wide.programs_per_sm * self.num_sms)
            if _full(waves):
                return self.state_passing_bwd_wide
        return self.state_passing_bwd


def _full(waves: float) -> bool:
    """Whether the last wave of programs, as many as run at once, leaves few places empty."""
    return waves / math.ceil(waves) > 0.8


def default_launch(spec: SSDSpec, platform: Platform) -> Launch:
    """What the tuning table says, for this device's number of processors."""
    shape = {"head_dim": spec.head_dim, "d_state": spec.d_state}
    return replace(tuning.select("ssd", spec.dtype, shape, platform).launch, num_sms=platform.num_sms)
