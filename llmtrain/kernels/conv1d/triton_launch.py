"""Launch parameters of the convolution's kernels."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmtrain.errors import UserError
from llmtrain.kernels.options import Count, Flag, Options, Power, Warps

PROGRAMS_PER_SM = 4  # at least, where there are tokens enough


@dataclass(frozen=True)
class Tile(Options):
    """Channels and tokens of a program, and how it loops over the tokens.

    block_channels: channels of one program, a power of two.
    parallel_runs: runs of tokens that a program computes side by side, a power of two; their sums of weight gradients are
        added before anything is written.
    run_tokens: tokens of one run, a multiple of `step_tokens`. At both borders of a run one step's tokens are read twice.
    step_tokens: tokens of a run per iteration of the loop, at least width - 1.
    num_stages: steps prefetched through shared memory; 1: none. prefetch: the next step is loaded into registers early.
    """

    block_channels: Power
    parallel_runs: Power
    run_tokens: Count
    step_tokens: Count
    num_warps: Warps
    num_stages: Count = 1
    prefetch: Flag = False

    def refusal(self, kernel: str, arch: str, shape: Mapping[str, int]) -> str | None:
        if self.step_tokens < shape["width"] - 1:
            return f"step_tokens must be at least width - 1, {shape['width'] - 1}, not {self.step_tokens}"
        return None

    def __post_init__(self) -> None:
        if self.run_tokens % self.step_tokens:
            raise UserError(f"a run of {self.run_tokens} tokens is not made of steps of {self.step_tokens}")


@dataclass(frozen=True)
class Launch(Options):
    """min_programs: as many as keep the GPU busy; runs are halved until there are so many. None: runs stay as they are."""

    forward: Tile
    backward: Tile
    min_programs: Count | None


def narrowed(tile: Tile, channels: int) -> Tile:
    """The same tile, no wider than the channels."""
    while tile.block_channels >= 2 * channels and tile.block_channels > 16:
        tile = replace(tile, block_channels=tile.block_channels // 2)
    return tile


@functools.lru_cache(1024)
def fitted(tile: Tile, min_programs: int | None, batch: int, seq_len: int, channels: int) -> Tile:
    """The same tile with shorter runs, where programs would be too few, or longer than the sequence."""

    def shorter_is_better() -> bool:
        tokens = tile.parallel_runs * tile.run_tokens
        count = batch * -(-seq_len // tokens) * -(-channels // tile.block_channels)
        return tokens >= 2 * seq_len or count < (min_programs or 0)

    while tile.run_tokens % (2 * tile.step_tokens) == 0 and shorter_is_better():
        tile = replace(tile, run_tokens=tile.run_tokens // 2)
    return tile
