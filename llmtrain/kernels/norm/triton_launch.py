"""Launch parameters of the norm's kernels, from the tuning tables."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass

from llmtrain.kernels import tuning
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.row_tiles import Tile, narrowed


@dataclass(frozen=True)
class Launch:
    """processors: of the GPU; 0: runs stay as they are."""

    forward: Tile
    backward: Tile
    processors: int

    def dump(self) -> str:
        """As an operator takes it: the compiled graph then says how its kernels run, on any rank."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.cache
def parsed(dumped: str) -> Launch:
    fields = json.loads(dumped)
    return Launch(Tile(**fields["forward"]), Tile(**fields["backward"]), fields["processors"])


def default_launch(spec: NormSpec, platform: Platform) -> Launch:
    """What the tuning table says, no wider than a row."""
    rows = (
        tuning.select(f"norm.{kernel}", spec.dtype, {"dim": spec.dim}, platform) for kernel in ("forward", "backward")
    )
    forward, backward = (narrowed(row.launch, spec.dim) for row in rows)
    return Launch(forward, backward, platform.processors)
