"""Launch parameters of the convolution's kernels, from the tuning tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmtrain.kernels import tuning
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.options import Options
from llmtrain.kernels.platform import Platform

PROGRAMS_PER_SM = 4  # per processor, at least, where there are tokens enough


@dataclass(frozen=True)
class Tile:
    """How a program goes through its tokens.

    channels: of one program, a power of two. walkers: how many runs of tokens a program goes through at once, a power of
        two; they add up their sums of weight gradients before anything is written.
    run: tokens of one walker, a multiple of `group`. At its borders a group is read twice.
    group: tokens in flight at once, at least width - 1.
    stages: groups fetched ahead through shared memory; 1: none.
    ahead: whether the next group is fetched into registers.
    """

    channels: int
    parallel_runs: int
    run_tokens: int
    step_tokens: int
    num_warps: int
    num_stages: int = 1
    prefetch: bool = False

    def __post_init__(self) -> None:
        assert self.run_tokens % self.step_tokens == 0, f"a run of {self.run} tokens is not made of groups of {self.group}"


@dataclass(frozen=True)
class Launch(Options):
    """programs: as many as keep the GPU busy; runs are halved until there are so many. None: runs stay as they are."""

    forward: Tile
    backward: Tile
    min_programs: int | None


def default_launch(spec: Conv1dSpec, platform: Platform) -> Launch:
    """What the tuning table says, no wider than the channels."""
    rows = (
        tuning.select(f"conv1d.{kernel}", spec.dtype, {"width": spec.width}, platform)
        for kernel in ("forward", "backward")
    )
    forward, backward = (narrowed(row.launch, spec.channels) for row in rows)
    return Launch(forward, backward, PROGRAMS_PER_SM * platform.num_sms)


def narrowed(tile: Tile, channels: int) -> Tile:
    while tile.channels >= 2 * channels and tile.channels > 16:
        tile = replace(tile, channels=tile.channels // 2)
    return tile


def fitted(tile: Tile, programs: int | None, batch: int, seq_len: int, channels: int) -> Tile:
    """The same with shorter runs, where programs would be too few, or longer than the sequence."""

    def shorter_is_better() -> bool:
        tokens = tile.parallel_runs * tile.run_tokens
        count = batch * -(-seq_len // tokens) * -(-channels // tile.channels)
        return tokens >= 2 * seq_len or count < (programs or 0)

    while tile.run_tokens % (2 * tile.step_tokens) == 0 and shorter_is_better():
        tile = replace(tile, run_tokens=tile.run_tokens // 2)
    return tile
