"""Times of every attention backend on one shape, each in a process that may break, as rows of the measured cells.

python -m llmtrain.bench.tune.backends
"""

import datetime
from dataclasses import asdict
from typing import Any

from llmtrain.bench.tune.measuring import START_S
from llmtrain.bench.tune.processes import OneWorker, Worker, serve
from llmtrain.bench.tune.search import commit
from llmtrain.errors import named_line
from llmtrain.kernels import operation
from llmtrain.kernels.attention.measured import Cell, Row
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.operation import Shape
from llmtrain.kernels.platform import Platform

REP_MS = 50.0
_SLOW = ("reference", "sdpa:efficient")
"""Backends that write or read T x T numbers for every head."""


def able(spec: AttentionSpec, here: Platform) -> list[str]:
    """Backends that are worth measuring on `spec`, third-party ones that are installed among them."""
    found = operation.operation("attention").backends(Shape(spec, 1, 1), here)
    return [name for name in found if name not in _SLOW]


class BackendMeasurer(OneWorker):
    """Measures backends, one after the other."""

    def __init__(self, here: Platform, timeout_s: float = START_S):
        self.here, self.timeout_s = here, timeout_s

    def __call__(self, shape: Shape, backend: str) -> Row | str:
        """The row, or a sentence that says why there is none."""
        if self._worker is None:
            self._worker = Worker("llmtrain.bench.tune.backends")
        worker = self._worker
        asked = {"spec": asdict(shape.spec), "seq_len": shape.seq_len, "batch": shape.batch, "backend": backend}
        answer = worker.ask(asked, self.timeout_s)
        if answer is None:
            self._end()
            return f"its process crashed, or took more than {self.timeout_s:.0f} s: {' '.join(worker.last_words().split())}"
        if answer["failed"]:
            if answer["broken"]:
                self._end()
            return answer["failed"]
        return Row(
            **asdict(Cell.of(shape.spec, shape.seq_len)), backend=backend, forward_ms=answer["forward_ms"],
            backward_ms=answer["backward_ms"], device=self.here.device_name, date=datetime.date.today().isoformat(),
            commit=commit(),
        )  # fmt: skip


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Times in ms, or `failed`: why not; broken: the process is of no more use."""
    from llmtrain.bench.kernels.cell import cell
    from llmtrain.bench.kernels.measure import Ceilings, measure
    from llmtrain.bench.tune.measuring import broken

    one, shape = (
        operation.operation("attention"),
        Shape(AttentionSpec(**asked["spec"]), asked["batch"], asked["seq_len"]),
    )
    try:
        made = cell(one, shape, backends=[asked["backend"]])
        [result] = measure(made, made.contenders(), Ceilings(1.0, 1.0), rep_ms=REP_MS)
    except Exception as error:
        return {"failed": named_line(error), "broken": broken()}
    failed, allowed = result.failed, one.tolerance(shape.spec.dtype)
    if failed is None and not result.error < allowed:
        failed = f"wrong by {result.error:.1e}, allowed {allowed:.0e}"
    return {
        "forward_ms": round(result.forward_ms, 4),
        "backward_ms": round(result.backward_ms, 4),
        "failed": failed,
        "broken": failed is not None and broken(),
    }


if __name__ == "__main__":
    serve(answer)
