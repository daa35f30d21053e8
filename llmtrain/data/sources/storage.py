"""Source files where they lie: on this machine, in an S3-compatible store (`s3://`), or on the Hugging Face hub (`hf://`).

Objects are read by ranges, so a part of a large one costs no more than itself. Credentials and endpoint are those of
checkpoints: AWS_*, S3_ENDPOINT_URL; HF_TOKEN.
"""

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from llmtrain.config.addresses import is_remote
from llmtrain.config.regular_file import open_regular
from llmtrain.errors import RunError, named_line

SCHEMES = ("s3", "hf")
_BUFFER_BYTES = 1 << 20
_ATTEMPTS, _CONNECT_SECONDS, _READ_SECONDS = 8, 10, 60


@dataclass(frozen=True)
class StoredObject:
    """One remote file. address: whole, with its scheme; mtime_ns: 0 where the store tells none."""

    address: str
    size: int
    mtime_ns: int


def open_file(path: str) -> BinaryIO:
    """Open a path or an address to read, from any position. Raises OSError for a path; for an address RunError, also while it
    is read: a store that fails says nothing of the data."""
    if not is_remote(path):
        return open_regular(Path(path))
    return cast(BinaryIO, io.BufferedReader(_Remote(path), _BUFFER_BYTES))


class _Remote(io.RawIOBase):
    """An object in a store."""

    def __init__(self, address: str) -> None:
        self._address = address
        scheme, _, rest = address.partition("://")
        with self._errors():
            self._file: Any = (
                _s3().open_input_file(rest) if scheme == "s3" else _hub().open(rest, "rb", block_size=8 * _BUFFER_BYTES)
            )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._errors():
            return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with self._errors():
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if not self.closed and hasattr(self, "_file"):
            self._file.close()
        super().close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the hub's client raises its HTTP library's own
            raise RunError(
                f"{self._address} could not be read from its store ({named_line(error, None)}); the same command goes on from "
                "what is finished"
            ) from error


def has_pattern(text: str) -> bool:
    """True for a glob: `*`, `?` or `[...]` in it."""
    return any(character in text for character in "*?[")


def fixed_folder(pattern: str) -> str:
    """The folder above the first part of a glob that has a wildcard."""
    return re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]


def list_remote(address: str) -> Iterator[StoredObject]:
    """The objects of an address: one object, all below a folder, or those that a glob matches (`**`: any folders).

    Raises OSError where the store cannot be reached, or refuses.
    """
    scheme, _, rest = address.partition("://")
    wanted = re.compile(_translate(rest)) if has_pattern(rest) else None
    root = fixed_folder(rest).rstrip("/") if wanted else rest.rstrip("/")
    try:
        found = list(_list_s3(root) if scheme == "s3" else _list_hub(root))
    except OSError:
        raise
    except Exception as error:  # the hub's client raises its HTTP library's own, and many for what is no address of it
        raise OSError(named_line(error, None)) from error
    for path, size, mtime_ns in found:
        if wanted is None or wanted.fullmatch(path):
            yield StoredObject(f"{scheme}://{path}", size, mtime_ns)


def _translate(pattern: str) -> str:
    """A regular expression in which `*` does not cross a slash, and `**/` matches any number of folders."""
    parts = re.split(r"(\*\*/?)", pattern)
    plain = (translate(part)[4:-3].replace(".*", "[^/]*") for part in parts)  # between (?s: and )\Z
    return "".join(
        ".*" if part == "**" else "(?:.*/)?" if part == "**/" else text for part, text in zip(parts, plain, strict=True)
    )


def _list_s3(root: str) -> Iterator[tuple[str, int, int]]:
    from pyarrow.fs import FileSelector, FileType

    store = _s3()
    one = store.get_file_info(root)
    infos = [one] if one.type == FileType.File else store.get_file_info(FileSelector(root, recursive=True))
    for info in infos:
        if info.type == FileType.File:
            yield info.path, info.size, info.mtime_ns or 0


def _list_hub(root: str) -> Iterator[tuple[str, int, int]]:
    for path, info in _hub().find(root, detail=True).items():
        yield path, int(info["size"]), int(str(info.get("blob_id") or "0")[:15], 16)


@cache
def _s3() -> Any:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    endpoint = os.environ.get("S3_ENDPOINT_URL")
    parts = urlsplit(endpoint) if endpoint else None
    return S3FileSystem(
        **({"endpoint_override": parts.netloc, "scheme": parts.scheme} if parts else {}),
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_READ_SECONDS,
        retry_strategy=AwsStandardS3RetryStrategy(_ATTEMPTS),
    )


@cache
def _hub() -> Any:
    from huggingface_hub import HfFileSystem

    return HfFileSystem()


def write_remote(address: str, content: bytes) -> None:
    """Write an object of an `s3://` address, which appears whole. Raises OSError."""
    with _s3().open_output_stream(address.partition("://")[2]) as stream:
        stream.write(content)


def remove_remote(address: str) -> None:
    """Remove an object of an `s3://` address. Raises OSError."""
    _s3().delete_file(address.partition("://")[2])
