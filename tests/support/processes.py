"""Commands in processes of their own, which must succeed; and scripts as modules."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

LLMTRAIN = (sys.executable, "-m", "llmtrain.cli")


def output_of(
    *command: str, cwd: Path | None = None, given: str | None = None, seconds: float = 1800, **more: str
) -> str:
    """Standard output of a command on one thread. given: its standard input; more: variables of its environment. Raises
    AssertionError with all that it printed where its status is not 0."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = kept | {"OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(
        command, cwd=cwd, env=environment, input=given, timeout=seconds, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def modules_after(program: str, *words: str, cwd: Path | None = None) -> set[str]:
    """Names of modules that are loaded when a program has ended, without those that Python begins with."""
    program = f"import sys; before = {{*sys.modules}}\n{program}\nprint(*sorted({{*sys.modules}} - before))"
    return set(output_of(sys.executable, "-c", program, *words, cwd=cwd).splitlines()[-1].split())


def module_of(script: Path) -> ModuleType:
    """A script of no package, imported."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
