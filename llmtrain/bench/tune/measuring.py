"""Runs, checks and times launches on the GPU, in a process of its own.

A launch that compiles can still read where it must not, or wait for ever. After the first, nothing that the process asks
of the GPU is answered: so the launch is recorded as failing, and a new process goes on with the next.

python -m llmtrain.bench.tune.measuring conv1d '{"channels": 5376}' cuda
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from llmtrain.bench.tune.processes import OneWorker, Worker, serve
from llmtrain.errors import named_line
from llmtrain.kernels.operation import search
from llmtrain.kernels.search import Search

START_S = 300.0
"""More for the first answer of a process: it imports, and computes what is right in float64."""


@dataclass(frozen=True)
class Measured:
    """broken: the process that says so is of no more use."""

    ms: float = float("inf")
    error: float = float("nan")
    problem: str | None = None
    broken: bool = False


class Measurer(OneWorker):
    """Measures launches of one search, one after the other."""

    def __init__(self, operation: str, case: dict[str, Any], device: str = "cuda", timeout_s: float = 60.0):
        self._arguments, self._timeout_s = (operation, json.dumps(case), device), timeout_s

    def __call__(self, part: str, launch: dict[str, Any]) -> Measured:
        limit = self._timeout_s
        if self._worker is None:
            self._worker, limit = Worker("llmtrain.bench.tune.measuring", *self._arguments), limit + START_S
        worker = self._worker
        answer = worker.ask({"part": part, "launch": launch}, limit)
        if answer is None:
            self._end()
            words = " ".join(worker.last_words().split())
            return Measured(problem=f"its process crashed, or took more than {limit:.0f} s: {words}")
        if answer["broken"]:
            self._end()
        return Measured(**answer)


def measured(search: Search, part: str, launch: dict[str, Any]) -> Measured:
    try:
        wrong = search.error(part, launch)
        if not wrong < search.tolerance:
            return Measured(error=wrong, problem=f"wrong by {wrong:.1e}")
        return Measured(milliseconds(search.runner(part, launch)), wrong)
    except Exception as error:
        return Measured(problem=named_line(error, 120), broken=broken())


def broken() -> bool:
    """True if this process can no longer use its GPU."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return torch.cuda.is_available()  # without a GPU there was none to break
    return False


def milliseconds(run: Callable[[], Any], rep: int = 60) -> float:
    """Median time of `run`."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=15, rep=rep, return_mode="median"))  # type: ignore[arg-type]


def main(operation: str, case: str, device: str) -> None:
    from llmtrain.kernels import platform

    made: list[Search] = []

    def answer(wanted: dict[str, Any]) -> dict[str, Any]:
        try:
            made.extend([] if made else [search(operation, json.loads(case), device, platform.detect(device))])
        except Exception as error:
            return asdict(Measured(problem=named_line(error, 120), broken=True))
        return asdict(measured(made[0], wanted["part"], wanted["launch"]))

    serve(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
