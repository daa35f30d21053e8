"""Python's bytecode of what a run imports: kept in a folder of ours where an environment keeps none."""

import importlib.util
import os
import sys
from pathlib import Path


def keep_bytecode() -> None:
    """Have this process and those that it starts keep bytecode in ~/.cache/llmtrain/bytecode (or XDG_CACHE_HOME's) where torch has
    none and Python will write none beside it: PYTHONDONTWRITEBYTECODE, a read-only environment. Without it a start compiles
    thousands of modules, and its imports take three times as long. Nothing changes where PYTHONPYCACHEPREFIX is set, or where no
    folder can be made.
    """
    torch = importlib.util.find_spec("torch")
    if sys.pycache_prefix is not None or torch is None or torch.cached is None or torch.origin is None:
        return
    if Path(torch.cached).exists() or (not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)):
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmtrain" / "bytecode"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter: there is no home
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
