"""Launch parameters of the SSD kernels, per architecture. Not tuned yet: chosen by what compiles without spills."""

from __future__ import annotations

import functools
import json
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
class HeadsLaunch:
    """How a kernel runs that takes a chunk's heads one after the other. heads: of one program, within a group."""

    heads: int
    stages: int
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """Every launch parameter: what tuning turns.

    chunk, chunk_backward: tokens per chunk, powers of two from 16 on.
    after, before: the two kernels of the backward within chunks.
    keep_states: the backward takes the states of the forward, 2 * T * heads * head_dim * d_state / chunk bytes in bf16,
        instead of computing them again. Wants chunk == chunk_backward.
    precision: of fp32 matrix products.
    """

    chunk: int
    passing: PassLaunch
    scan: HeadsLaunch
    chunk_backward: int
    passing_backward: PassLaunch
    after: HeadsLaunch
    before: HeadsLaunch
    keep_states: bool = False
    precision: str = "ieee"

    def __post_init__(self) -> None:
        assert not self.keep_states or self.chunk == self.chunk_backward, "kept states are those of one chunk size"

    def dump(self) -> str:
        """As an operator takes it: the compiled graph then says how its kernels run, on any rank."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.cache
def parsed(dumped: str) -> Launch:
    fields = json.loads(dumped)
    fields |= {name: PassLaunch(**fields[name]) for name in ("passing", "passing_backward")}
    fields |= {name: HeadsLaunch(**fields[name]) for name in ("scan", "after", "before")}
    return Launch(**fields)


def _warps(count: int) -> dict[str, int]:
    return {"num_warps": count}


def _amd(count: int) -> dict[str, int]:
    return {"num_warps": count, "matrix_instr_nonkdim": 16}


_CDNA = Launch(
    chunk=64,
    passing=PassLaunch(rows=64, columns=64, stages=1, options=_amd(4)),
    scan=HeadsLaunch(heads=10, stages=1, options=_amd(4)),
    chunk_backward=64,
    passing_backward=PassLaunch(rows=64, columns=64, stages=1, options=_amd(4)),
    after=HeadsLaunch(heads=20, stages=1, options=_amd(8)),
    before=HeadsLaunch(heads=20, stages=1, options=_amd(8)),
)
# For bf16, d_state up to 128, head_dim up to 64.
LAUNCHES: dict[str, Launch] = {
    # compiled only
    "sm80": Launch(
        chunk=64,
        passing=PassLaunch(rows=128, columns=32, stages=3, options=_warps(4)),
        scan=HeadsLaunch(heads=10, stages=2, options=_warps(8)),
        chunk_backward=32,
        passing_backward=PassLaunch(rows=128, columns=32, stages=2, options=_warps(4)),
        after=HeadsLaunch(heads=20, stages=2, options=_warps(8)),
        before=HeadsLaunch(heads=20, stages=2, options=_warps(8)),
    ),
    # compiled only; the next to be measured
    "sm90": Launch(
        chunk=128,
        passing=PassLaunch(rows=128, columns=32, stages=3, options=_warps(4)),
        scan=HeadsLaunch(heads=10, stages=2, options=_warps(8)),
        chunk_backward=64,
        passing_backward=PassLaunch(rows=128, columns=32, stages=3, options=_warps(4)),
        after=HeadsLaunch(heads=20, stages=1, options=_warps(8)),
        before=HeadsLaunch(heads=20, stages=2, options=_warps(8)),
    ),
    # compiled only
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
}


def default_launch(spec: SSDSpec, platform: Platform) -> Launch:
    """Of this architecture, or of the nearest that is in the table; smaller tiles for wider numbers and states."""
    amd = platform.vendor == "amd"
    launch = LAUNCHES.get(platform.arch) or LAUNCHES["gfx942" if amd else "sm80"]
    wide, large = spec.dtype == "float32", spec.d_state > 128
    if wide or large or spec.head_dim > 64:
        few = _amd(8) if amd else _warps(8)
        largest = (wide or large) and spec.head_dim > 64
        launch = replace(
            launch,
            chunk=32,
            chunk_backward=32 if amd and not largest else 16,
            passing=PassLaunch(rows=64, columns=32, stages=1, options=few),
            passing_backward=PassLaunch(rows=64, columns=32, stages=1, options=few),
            scan=replace(launch.scan, stages=1, options=few),
            after=replace(launch.after, stages=1, options=few),
            before=replace(launch.before, stages=1, options=few),
        )
    # Three products in tf32 for one in fp32 have fp32's accuracy.
    return replace(launch, precision="tf32x3") if wide and not amd else launch
