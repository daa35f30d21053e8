"""Whether a folder can be written to, known before it is. No torch here."""

from __future__ import annotations

import os
from pathlib import Path


def unwritable(folder: str | Path) -> str | None:
    """Why nothing can be written into `folder`, which need not exist yet; None if it can."""
    path = Path(folder).expanduser().absolute()
    there = next(path for path in (path, *path.parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file, not a folder; choose another"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written to; choose another"
    return None
