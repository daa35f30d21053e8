"""Files of token ids among others, recognised by their names and what lies beside them; see token_files."""

import os
from collections.abc import Callable
from typing import Literal

from llmtrain.config.addresses import is_remote
from llmtrain.data.sources.storage import open_file
from llmtrain.errors import RunError

TokenKind = Literal["megatron", "datatrove", "npy"]

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
NUMPY_MAGIC = b"\x93NUMPY"
_SIDE_FILES = {".idx": ".bin", ".ds.index": ".ds", ".ds.metadata": ".ds", ".ds.loss": ".ds", ".csv.gz": ".npy"}


def token_kind(path: str, from_folder: bool) -> TokenKind | None:
    """The format of a token file; None for any other file. from_folder: found, not named: then a .npy with a header of numpy is
    taken for an array of something else."""
    stem, extension = os.path.splitext(path)
    if extension == ".bin":
        return "megatron" if _head(f"{stem}.idx", len(MEGATRON_MAGIC)) == MEGATRON_MAGIC else None
    if extension == ".ds":
        return "datatrove" if _head(f"{path}.index", 1) is not None else None
    if extension != ".npy":
        return None
    return None if from_folder and (_head(path, len(NUMPY_MAGIC)) or b"").startswith(NUMPY_MAGIC) else "npy"


def main_file(path: str) -> str | None:
    """The token file that a file beside it describes, by its name; None for any other name."""
    for ending, of in _SIDE_FILES.items():
        if path.endswith(ending):
            return path.removesuffix(ending) + of
    return None


def side_file(path: str) -> str | None:
    """The file without which a token file cannot be read; None where there is none."""
    stem, extension = os.path.splitext(path)
    return {".bin": f"{stem}.idx", ".ds": f"{path}.index"}.get(extension)


def loss_mask(path: str) -> str | None:
    """The file that says which tokens of a file of datatrove have no loss; None where there is none."""
    mask = f"{path}.loss"
    return None if _head(mask, 1) is None else mask


def _head(path: str, size: int) -> bytes | None:
    try:
        with open_file(path) as stream:
            return stream.read(size)
    except OSError:
        return None
    except RunError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def mark_of_side_file(path: str, digest: Callable[[str], str], by_content: bool) -> str:
    """A mark of the content of the file beside a token file; empty where there is none."""
    beside = side_file(path)
    if beside is None or token_kind(path, from_folder=False) is None:
        return ""
    if by_content or is_remote(beside):
        return f" {digest(beside)}"
    stat = os.stat(beside)
    return f" {stat.st_size} {stat.st_mtime_ns}"
