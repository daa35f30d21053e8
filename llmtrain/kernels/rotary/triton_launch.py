"""Launch parameters of the rotary kernel, from the tuning tables."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass

from llmtrain.kernels import tuning
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec


@dataclass(frozen=True)
class Launch:
    """tokens: of a program, a power of two. heads: that a program goes through with its cosines and sines in registers."""

    tokens: int
    heads: int
    warps: int

    def dump(self) -> str:
        """As an operator takes it: the compiled graph then says how its kernels run, on any rank."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.cache
def parsed(dumped: str) -> Launch:
    return Launch(**json.loads(dumped))


def default_launch(spec: RotarySpec, platform: Platform) -> Launch:
    """What the tuning table says."""
    return tuning.select("rotary", spec.dtype, {"head_dim": spec.head_dim}, platform).launch
