"""Files that appear whole."""

import re
from pathlib import Path

from llmtrain.config.output_folder import replace_file


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically."""
    replace_file(path, content)
    return path


def write_text(path: Path, text: str) -> Path:
    return write_file(path, text.encode(errors="backslashreplace"))


def file_name(text: str) -> str:
    """The text, with `_` for what does not belong in a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)
