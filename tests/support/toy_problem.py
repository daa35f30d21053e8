"""A problem of `bench tune` whose launches fail in every way; for a process of its own, without a GPU.

Launches are numbers: 1 is slow, 2 is fast, 3 is wrong, 4 does not fit, 5 gives NaN, 6 ends the process, 7 reads where it must
not, after which the GPU answers nothing, 8 never ends.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import triton.testing

from llmtrain.bench.tune.measuring import Measured
from llmtrain.kernels.attention.triton_launch import Launch
from llmtrain.kernels.operation import Operation, Shape
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.search import Attempt, Winner

triton.testing.do_bench = lambda run, **_: run()
BROKEN = "CUDA error: an illegal memory access was encountered"


def _refuse(*_: object) -> None:
    raise RuntimeError(BROKEN)


class Toy:
    """In place of an operation of kernels/operation.py, with its search."""

    name, parts, tolerance = "toy", ("forward",), 0.01

    def sized(self, dtype: str = "bfloat16", head_dim: int = 64) -> Shape:
        return Shape(RotarySpec(head_dim, dtype), 1, 1)

    def shape(self, fields: dict[str, Any]) -> Shape:
        return Operation.shape(self, fields)  # type: ignore[arg-type]

    def refusal(self, shape: Shape) -> None:
        """Nothing is refused."""

    def search(self, shape: Shape, device: str, where: Platform) -> Toy:
        found: Any = Toy()
        found.shape, found.spec = shape, shape.spec
        return found

    def candidates(self, part: str, quick: bool) -> list[dict[str, Any]]:
        return [{"n": n} for n in range(1, 4 if quick else 8)]

    def error(self, part: str, launch: dict[str, Any]) -> float:
        torch.cuda.synchronize()
        match launch["n"]:
            case 4:
                raise RuntimeError("out of resource")
            case 6:
                os._exit(3)
            case 7:
                torch.cuda.is_available, torch.cuda.synchronize = lambda: True, _refuse
                raise RuntimeError(BROKEN)
            case 8:
                time.sleep(600)
        return {3: 0.5, 5: math.nan}.get(launch["n"], 1e-3)

    def runner(self, part: str, launch: dict[str, Any]) -> Callable[[], float]:
        return lambda: 2.0 if launch["n"] == 1 else 1.0

    def winners(
        self, best: dict[str, list[Attempt]], measurer: Callable[[str, dict[str, Any]], Measured]
    ) -> list[Winner]:
        """The fastest as a row for attention, measured once more."""
        (one, *_) = best["forward"]
        ms = measurer("forward", one.launch).ms
        return [Winner("attention.forward", Launch(64, 16 * one.launch["n"], 4, 1), ms, 100, 1e12, "tflops")]


torch.cuda.synchronize = lambda *_: None
OPERATION = Toy()
