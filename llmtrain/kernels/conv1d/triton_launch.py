"""Launch parameters of the convolution's kernels, per architecture. Not tuned yet."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace

from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Walk:
    """How a program goes through its tokens.

    channels: of one program, a power of two. walkers: how many runs of tokens a program goes through at once, a power of
        two; they add up their sums of weight gradients before anything is written.
    run: tokens of one walker, a multiple of `group`. At its borders a group is read twice.
    group: tokens in flight at once, at least width - 1.
    stages: groups fetched ahead through shared memory; 1: none.
    """

    channels: int
    walkers: int
    run: int
    group: int
    warps: int
    stages: int = 1

    def __post_init__(self) -> None:
        assert self.run % self.group == 0, f"a run of {self.run} tokens is not made of groups of {self.group}"


@dataclass(frozen=True)
class Launch:
    """programs: as many as keep the GPU busy; runs are halved until there are so many."""

    forward: Walk
    backward: Walk
    programs: int

    def dump(self) -> str:
        """As an operator takes it: the compiled graph then says how its kernels run, on any rank."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.cache
def parsed(dumped: str) -> Launch:
    fields = json.loads(dumped)
    return Launch(Walk(**fields["forward"]), Walk(**fields["backward"]), fields["programs"])


# A thread of the forward holds 8 neighbouring channels, 16 bytes of two-byte numbers; of the backward, which needs about
# 30 registers for each, 4.
LAUNCHES: dict[str, Launch] = {
    # compiled only
    "sm80": Launch(Walk(256, 4, 64, 4, 4), Walk(128, 4, 96, 3, 4), 108 * 4),
    # compiled only; the next to be measured
    "sm90": Launch(Walk(256, 4, 64, 4, 4), Walk(128, 4, 64, 4, 4), 132 * 4),
    # compiled only
    "gfx90a": Launch(Walk(512, 4, 64, 4, 4), Walk(256, 4, 64, 4, 4), 104 * 4),
    "gfx942": Launch(Walk(512, 4, 64, 4, 4), Walk(256, 4, 64, 4, 4), 304 * 4),
}


def default_launch(spec: Conv1dSpec, platform: Platform) -> Launch:
    """Of this architecture, or of the nearest that is in the table; with 4 channels a thread for numbers of 4 bytes."""
    launch = LAUNCHES.get(platform.arch) or LAUNCHES["gfx942" if platform.vendor == "amd" else "sm80"]
    if spec.dtype == "float32":
        launch = replace(launch, forward=replace(launch.forward, channels=launch.forward.channels // 2))
    return launch


def fitted(walk: Walk, programs: int, batch: int, seq_len: int, channels: int) -> Walk:
    """The same for a problem of this size: no wider than it, and shorter runs where programs would be too few."""
    while walk.channels >= 2 * channels and walk.channels > 16:
        walk = replace(walk, channels=walk.channels // 2)

    def shorter_is_better() -> bool:
        tokens = walk.walkers * walk.run
        count = batch * -(-seq_len // tokens) * -(-channels // walk.channels)
        return tokens >= 2 * seq_len or count < programs

    while walk.run % (2 * walk.group) == 0 and shorter_is_better():
        walk = replace(walk, run=walk.run // 2)
    return walk
