"""Reading of files by a name that a user gave, or in a folder that others may write to.

Every command reads them by these functions: a pipe would block, a device never end.
"""

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 32
"""Largest file that is read whole: a shard in MDS has no more, and configs, tokenizers, results are far smaller."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file to read. Raises OSError, also for what is no regular file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb")


def require_regular(path: str | Path) -> None:
    """Open a file that a library will read by its name, and close it. Raises OSError as `open_regular`."""
    open_regular(path).close()


def read_bytes(path: str | Path) -> bytes:
    """The content of a file. Raises OSError, also for what is no regular file, or has more than MOST_BYTES."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"has more than {MOST_BYTES:,} bytes", str(path))
        return file.read()


def read_text(path: str | Path, errors: str = "strict") -> str:
    """The content of a file of UTF-8, with line breaks as Python's text files have them. Raises OSError as `read_bytes`,
    UnicodeDecodeError. errors: see bytes.decode."""
    return read_bytes(path).decode(errors=errors).replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for what is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deep", "", 0) from None


def read_json(path: str | Path) -> Any:
    """The value of a JSON file. Raises OSError as `read_bytes`, ValueError."""
    return parse_json(read_text(path))
