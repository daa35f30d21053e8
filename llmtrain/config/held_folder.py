"""The folder that this process works in, held open: one that is renamed or deleted meanwhile is not made anew under its name."""

import os
from pathlib import Path

_held: tuple[Path, int] | None = None


def hold_folder(folder: Path) -> None:
    """Make the folder if need be, and hold it, in place of one that was held before, until `release_folder`. Raises OSError."""
    global _held
    release_folder()
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _held = folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def release_folder() -> None:
    global _held
    if _held is not None:
        os.close(_held[1])
        _held = None


def require_in_place(path: Path) -> None:
    """Raise OSError if `path` lies in the folder that is held, and that is not where it was any more."""
    if _held is None or not path.absolute().is_relative_to(_held[0]):
        return
    folder, handle = _held
    try:
        if os.path.samestat(os.stat(folder), os.fstat(handle)):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    raise OSError(moved_text(folder, handle))


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless the held one, in which it lies, was moved. Raises OSError."""
    require_in_place(folder)
    folder.mkdir(parents=True, exist_ok=True)


def moved_text(folder: Path, handle: int) -> str:
    """A sentence about a folder that is not where it was. handle: a descriptor of it, or of a file in it."""
    try:
        now = os.readlink(f"/proc/self/fd/{handle}")
        now = os.path.dirname(now) if os.path.isfile(now) else now
    except OSError:
        now = ""
    what = f"renamed to {now}" if now and os.path.isdir(now) else "renamed or deleted"
    return f"{folder} was {what} while the run works in it: give it its name back; until then nothing is written there"
