"""Launch parameters of the SSD kernels, per architecture. Not tuned yet: chosen by what compiles without spills."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, field, replace

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec


@dataclass(frozen=True)
class PassLaunch:
    """How states are passed. rows x columns of [d_state, head_dim] per program; options: Triton's own."""

    rows: int
    columns: int
    stages: int
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WalkLaunch:
    """How the forward walks. columns of head_dim per program; described: let Hopper's copy engine fetch the tiles (through
    tensor descriptors) where the tensors allow it.
    """

    columns: int
    stages: int
    options: dict[str, int] = field(default_factory=dict)
    described: bool = False


@dataclass(frozen=True)
class HeadsLaunch:
    """How a kernel runs that takes a chunk's heads one after the other. programs: per processor, at least, where there are
    heads enough; described: as of WalkLaunch.
    """

    programs: int
    stages: int
    options: dict[str, int] = field(default_factory=dict)
    described: bool = False

    def heads(self, per_group: int, groups_of_heads: int, processors: int) -> int:
        """Of one program: all of a group if the chunks alone make enough programs, for each sums over its heads in
        registers; else fewer. groups_of_heads: chunks * groups * rows of the batch.
        """
        wanted = 0.9 * self.programs * processors  # a little less than a whole wave is as good
        blocks = min(per_group, max(1, math.ceil(wanted / groups_of_heads)))
        return math.ceil(per_group / blocks)


@dataclass(frozen=True)
class Launch:
    """Every launch parameter: what tuning turns.

    chunk, chunk_backward: tokens per chunk, powers of two from 16 on.
    walk; passing, scan: the two forms of the forward. pairs, states: the two kernels of the backward within chunks.
    keep_states: the backward takes the states of the forward, 2 * T * heads * head_dim * d_state / chunk bytes in bf16,
        instead of computing them again. Wants chunk == chunk_backward.
    precision: of fp32 matrix products. processors: of the device.
    """

    chunk: int
    walk: WalkLaunch
    scan: HeadsLaunch
    chunk_backward: int
    passing: PassLaunch
    pairs: HeadsLaunch
    states: HeadsLaunch
    keep_states: bool = False
    precision: str = "ieee"
    processors: int = 1

    def __post_init__(self) -> None:
        assert not self.keep_states or self.chunk == self.chunk_backward, "kept states are those of one chunk size"

    def walks(self, programs: int) -> bool:
        """Whether the forward is one walk per head: if its last wave, one program per processor, is nearly full.

        Otherwise states are passed first, then all chunks scanned at once, which moves more bytes but fills any device.
        """
        waves = programs / self.processors
        return waves / math.ceil(waves) > 0.85

    def dump(self) -> str:
        """As an operator takes it: the compiled graph then says how its kernels run, on any rank."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.cache
def parsed(dumped: str) -> Launch:
    fields = json.loads(dumped)
    kinds = {
        "walk": WalkLaunch,
        "scan": HeadsLaunch,
        "passing": PassLaunch,
        "pairs": HeadsLaunch,
        "states": HeadsLaunch,
    }
    return Launch(**fields | {name: kind(**fields[name]) for name, kind in kinds.items()})


def _warps(count: int) -> dict[str, int]:
    return {"num_warps": count}


def _amd(count: int) -> dict[str, int]:
    return {"num_warps": count, "matrix_instr_nonkdim": 16}


_CDNA = Launch(
    chunk=64,
    walk=WalkLaunch(columns=64, stages=1, options=_amd(4)),
    scan=HeadsLaunch(programs=2, stages=1, options=_amd(4)),
    chunk_backward=64,
    passing=PassLaunch(rows=64, columns=64, stages=1, options=_amd(4)),
    pairs=HeadsLaunch(programs=2, stages=1, options=_amd(8)),
    states=HeadsLaunch(programs=2, stages=1, options=_amd(8)),
)
# For bf16, d_state up to 128, head_dim up to 64.
LAUNCHES: dict[str, Launch] = {
    # compiled only
    "sm80": Launch(
        chunk=64,
        walk=WalkLaunch(columns=32, stages=2, options=_warps(4)),
        scan=HeadsLaunch(programs=2, stages=2, options=_warps(4)),
        chunk_backward=32,
        passing=PassLaunch(rows=64, columns=64, stages=2, options=_warps(4)),
        pairs=HeadsLaunch(programs=2, stages=2, options=_warps(4)),
        states=HeadsLaunch(programs=2, stages=2, options=_warps(8)),
    ),
    # measured on an H200, 2026-11-21: 80 heads of 64, d_state 128, 16,384 tokens
    "sm90": Launch(
        chunk=64,
        walk=WalkLaunch(columns=64, stages=3, options=_warps(4), described=True),
        scan=HeadsLaunch(programs=2, stages=3, options=_warps(4), described=True),
        chunk_backward=64,
        passing=PassLaunch(rows=64, columns=64, stages=3, options=_warps(4)),
        pairs=HeadsLaunch(programs=2, stages=2, options=_warps(4), described=True),
        states=HeadsLaunch(programs=2, stages=3, options=_warps(8), described=True),
    ),
    # compiled only
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
}


def default_launch(spec: SSDSpec, platform: Platform) -> Launch:
    """Of this architecture, or of the nearest that is in the table; smaller tiles for wider numbers and states."""
    amd = platform.vendor == "amd"
    launch = LAUNCHES.get(platform.arch) or LAUNCHES["gfx942" if amd else "sm80"]
    launch = replace(launch, processors=platform.processors)
    wide, large = spec.dtype == "float32", spec.d_state > 128
    if wide or large or spec.head_dim > 64:
        few = _amd(8) if amd else _warps(8)
        largest = (wide or large) and spec.head_dim > 64
        launch = replace(
            launch,
            chunk=32,
            chunk_backward=32 if amd and not largest else 16,
            walk=replace(launch.walk, columns=32, stages=1, options=few),
            scan=replace(launch.scan, stages=1, options=few),
            passing=PassLaunch(rows=64, columns=32, stages=1, options=few),
            pairs=replace(launch.pairs, stages=1, options=few),
            states=replace(launch.states, stages=1, options=few),
        )
    # Three products in tf32 for one in fp32 have fp32's accuracy.
    return replace(launch, precision="tf32x3") if wide and not amd else launch
