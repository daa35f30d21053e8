"""Processes that answer questions, one JSON line each: for work that can hang, crash, or leave its process useless."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, Self


class Worker:
    """One process, `python -m MODULE ARGUMENTS`, whose main calls serve()."""

    def __init__(self, module: str, *arguments: str, **environment: str):
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """None where no answer came: the process crashed, or was killed because it took longer."""
        timer = threading.Timer(timeout_s, self.kill)
        timer.start()
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            return json.loads(answer) if answer.endswith("\n") else None
        except (OSError, ValueError):
            return None
        finally:
            timer.cancel()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-300:]


class OneWorker:
    """Base of what asks one process, and begins another when that is of no more use. Use as a context manager."""

    _worker: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = None


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Reads questions from standard input until it ends. Compilers print: what else goes to standard output does not."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
