"""Launch parameters of the SSD kernels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmtrain.kernels.options import LEAST_SIDE, Count, Flag, Options, Power, Side, TritonOptions


@dataclass(frozen=True)
class StatePassingLaunch(Options):
    """Launch of state passing. A program's tile of a state is [block_dstate, block_headdim].

    options: Triton's own. programs_per_sm: programs that run at once on a multiprocessor. use_tma: as in SequentialScanLaunch.
    tile: tokens that the forward reads at a time, a part of a chunk; None: a chunk.
    """

    block_dstate: Side
    block_headdim: Side
    num_stages: Count
    options: TritonOptions = field(default_factory=dict)
    programs_per_sm: Count = 1
    use_tma: Flag = False
    tile: Side | None = None

    def tiles(self, d_state: int, head_dim: int) -> int:
        return math.ceil(d_state / self.block_dstate) * math.ceil(head_dim / self.block_headdim)


@dataclass(frozen=True)
class SequentialScanLaunch(Options):
    """Launch of the sequential chunk scan. block_headdim: columns of head_dim per program.

    use_tma: load and store tiles through tensor descriptors by Hopper's TMA where the tensors allow it.
    programs_per_sm: programs that run at once on a multiprocessor.
    state_first: the state's part of the output before that of the pairs within the chunk, which takes fewer registers if
        there are no documents.
    """

    block_headdim: Side
    num_stages: Count
    options: TritonOptions = field(default_factory=dict)
    use_tma: Flag = False
    programs_per_sm: Count = 1
    state_first: Flag = False


@dataclass(frozen=True)
class HeadLoopLaunch(Options):
    """Launch of a kernel whose programs loop over heads of one chunk.

    programs_per_sm: programs per multiprocessor, at least, where there are heads enough. use_tma: as in
    SequentialScanLaunch.
    keep_cb: C B^T is computed once per program and held in registers; else for every head (chunk_scan, intra_chunk_bwd).
    dstate_blocks: programs that share d_state, each with the sums of its own columns of dB and dC (inter_chunk_bwd).
    """

    programs_per_sm: Count
    num_stages: Count
    options: TritonOptions = field(default_factory=dict)
    use_tma: Flag = False
    keep_cb: Flag = False
    dstate_blocks: Power = 1

    def heads(self, per_group: int, chunk_groups: int, num_sms: int) -> int:
        """Heads per program: all of a group if the chunks alone make enough programs, so that sums over heads stay in
        registers; else fewer. chunk_groups: chunks * groups * rows of the batch.
        """
        wanted = 0.9 * self.programs_per_sm * num_sms  # a little less than a whole wave is as good
        blocks = min(per_group, max(1, math.ceil(wanted / chunk_groups)))
        return math.ceil(per_group / blocks)


@dataclass(frozen=True)
class Launch(Options):
    """Launch parameters of all kernels of the scan.

    chunk_size, chunk_size_bwd: tokens per chunk, powers of two from 16 on.
    sequential_scan, or sequential_scan_shared_sm where two programs share a multiprocessor: one form of the forward; None: never.
    state_passing, chunk_scan: the two kernels of the other form.
    state_passing_bwd, or state_passing_bwd_wide where its larger tiles fill the device: states and their gradients.
    intra_chunk_bwd, inter_chunk_bwd: the backward's kernels within chunks and from and to the states at their borders.
    intra_chunk_halves_bwd: if there is one, a program of the backward takes half a chunk at a time, and this kernel adds
        what passes from half to half; else a program takes a whole chunk.
    fp16_states: states and their gradients in block-scaled fp16, not in bf16 (for 16-bit inputs).
    split_headdim: heads of more columns are scanned as several of at most as many (split_heads.py).
    input_precision: of fp32 matrix products. num_sms: multiprocessors of the device; no row has it.
    """

    chunk_size: Side
    sequential_scan: SequentialScanLaunch | None
    chunk_scan: HeadLoopLaunch
    chunk_size_bwd: Side
    state_passing: StatePassingLaunch
    state_passing_bwd: StatePassingLaunch
    intra_chunk_bwd: HeadLoopLaunch
    inter_chunk_bwd: HeadLoopLaunch
    input_precision: Literal["ieee", "tf32x3"] = "ieee"
    num_sms: Count = 1
    intra_chunk_halves_bwd: HeadLoopLaunch | None = None
    fp16_states: Flag = False
    sequential_scan_shared_sm: SequentialScanLaunch | None = None
    state_passing_bwd_wide: StatePassingLaunch | None = None
    split_headdim: Count | None = None

    def refusal(self, kernel: str, arch: str, shape: Mapping[str, int]) -> str | None:
        passing, blocks = self.state_passing.tile, self.inter_chunk_bwd.dstate_blocks
        if passing is not None and passing > self.chunk_size:
            return f"state_passing: tile is a part of a chunk, and {passing} is above chunk_size, {self.chunk_size}"
        for name in ("state_passing_bwd", "state_passing_bwd_wide"):
            if (launch := getattr(self, name)) is not None and launch.tile is not None:
                return f"{name}: tile is of state_passing alone; leave it out"
        if self.tile < LEAST_SIDE:
            return f"intra_chunk_halves_bwd takes halves of chunks: chunk_size_bwd must be at least {2 * LEAST_SIDE}"
        if blocks > 1 and blocks * LEAST_SIDE > 1 << (shape["d_state"] - 1).bit_length():
            return f"inter_chunk_bwd: dstate_blocks {blocks} leaves a program less than {LEAST_SIDE} of d_state {shape['d_state']}"
        return None

    def head_parts(self, head_dim: int) -> int:
        """Equal parts that a head is cut into."""
        least = 1 if self.split_headdim is None else math.ceil(head_dim / self.split_headdim)
        return next(parts for parts in range(least, head_dim + 1) if head_dim % parts == 0)

    @property
    def tile(self) -> int:
        """Tokens of a tile of the backward."""
        return self.chunk_size_bwd // (2 if self.intra_chunk_halves_bwd else 1)

    def sequential_scan_for(self, heads: int, head_dim: int) -> SequentialScanLaunch | None:
        """The launch of the sequential scan, with one program per head of all sequences, if it leaves few multiprocessors
        idle: its last wave of programs is nearly full, or its only one more than half full.

        None otherwise: states are passed first, then all chunks are scanned in parallel, which moves more bytes but fills
        any device.
        """
        parts, found = self.head_parts(head_dim), None
        heads, head_dim = heads * parts, head_dim // parts
        for scan in (self.sequential_scan, self.sequential_scan_shared_sm):
            if scan is not None:
                waves = heads * math.ceil(head_dim / scan.block_headdim) / (scan.programs_per_sm * self.num_sms)
                if _full(waves) or 0.55 < waves <= 1:
                    found = scan
        return found

    def state_passing_bwd_for(self, heads: int, d_state: int, head_dim: int) -> StatePassingLaunch:
        """The launch of the backward's state passing for so many heads of all sequences, split ones as their parts."""
        wide = self.state_passing_bwd_wide
        if wide is not None:
            waves = 2 * heads * wide.tiles(d_state, head_dim) / (wide.programs_per_sm * self.num_sms)
            if _full(waves):
                return wide
        return self.state_passing_bwd


def _full(waves: float) -> bool:
    """True if the last wave of programs, as many as run at once, leaves few places empty."""
    return waves / math.ceil(waves) > 0.8
