"""A process that compiles what it is asked to; see compiling.py.

python -m llmtrain.bench.tune.worker sm90
"""

import sys
import time
from typing import Any

from llmtrain.bench.tune.compiling import compile_only, platform_of
from llmtrain.bench.tune.processes import serve
from llmtrain.kernels.operation import search


def done(arch: str, wanted: dict[str, Any]) -> dict[str, Any]:
    began, failed = time.perf_counter(), None
    with compile_only(arch) as kernels:
        try:
            one = search(wanted["operation"], wanted["case"], "meta", platform_of(arch))
            kernels.clear()
            one.runner(wanted["part"], wanted["launch"])()
        except Exception as error:
            while error.__cause__ is not None:  # the innermost function says what is wrong
                error = error.__cause__
            failed = f"{type(error).__name__}: {error}".replace("\n", " ")[-300:]
    return {"kernels": kernels, "failed": failed, "seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    serve(lambda wanted: done(sys.argv[1], wanted))
