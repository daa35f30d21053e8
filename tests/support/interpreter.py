"""Triton's interpreter: tests of kernels in a process in which it serves, faster than it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_interpreted(operation: str, cases: str = "not slow", timeout: float = 900) -> None:
    """Runs tests/numerics/interpreted_OPERATION.py, in a process of its own: Triton reads TRITON_INTERPRET when it is imported.

    cases: as for pytest's -m. timeout: in seconds. Raises AssertionError with what was printed if a case fails or is skipped.
    """
    file = ROOT / "tests" / "numerics" / f"interpreted_{operation}.py"
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", *plugins, "-m", cases, str(file)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout


def speed_up() -> None:
    """To be called once in a process that interprets kernels (TRITON_INTERPRET=1), before the first of them.

    - Every call of a device function replaces the whole of `triton.language` anew. The launch has done that already.
    - Every integer sum is computed a second time in 64 bits, to see whether it overflows: not at the sizes of a test.
    """
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    replace = interpreter._patch_lang
    replaced: set[tuple[str, ...]] = set()

    def replace_once(fn: Any) -> Any:
        languages = _languages(fn, interpreter)
        if languages in replaced:
            return interpreter._LangPatchScope()  # with nothing to restore
        scope = replace(fn)
        replaced.add(languages)
        restore = scope.restore

        def forget() -> None:
            restore()
            replaced.clear()

        scope.restore = forget
        return scope

    interpreter._patch_lang = replace_once


def _languages(fn: Any, interpreter: Any) -> tuple[str, ...]:
    """Under which of its modules `fn` sees the language."""
    seen = fn.__globals__.values()
    return tuple(module.__name__ for module in (interpreter.tl, interpreter.tl.core) if any(v is module for v in seen))
