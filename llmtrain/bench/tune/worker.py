"""A process that compiles what it reads from standard input, one JSON line per task and answer; see compiling.py.

python -m llmtrain.bench.tune.worker sm90
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from llmtrain.bench.tune.compiling import compile_only, platform_of
from llmtrain.bench.tune.operations import problem


def main(arch: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print
    for line in sys.stdin:
        answers.write(json.dumps(done(arch, json.loads(line))) + "\n")
        answers.flush()


def done(arch: str, wanted: dict[str, Any]) -> dict[str, Any]:
    began, failed = time.perf_counter(), None
    with compile_only(arch) as kernels:
        try:
            one = problem(wanted["operation"], wanted["case"], "meta", platform_of(arch))
            kernels.clear()
            one.runner(wanted["part"], wanted["launch"])()
        except Exception as error:
            while error.__cause__ is not None:  # the innermost function says what is wrong
                error = error.__cause__
            failed = f"{type(error).__name__}: {error}".replace("\n", " ")[-300:]
    return {"kernels": kernels, "failed": failed, "seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    main(*sys.argv[1:])
