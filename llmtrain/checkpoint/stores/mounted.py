"""A folder as a store of checkpoints: a mounted file system that outlives the run's own disk."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError, hash_file
from llmtrain.checkpoint.stores.base import StoreError
from llmtrain.config.output_folder import sync_path
from llmtrain.config.regular_file import open_regular, read_bytes

_READ_BYTES = 8 * 2**20
_SENDING = ".sending-"
"""In the name of a file that is being written, before a random suffix."""


class MountedStore:
    """Files under a folder; see ObjectStore. A file that was interrupted is sent anew: there are no parts to keep."""

    def __init__(self, root: Path):
        self._root = root.absolute()
        self.url = f"file://{self._root}"

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found = {}
        with self._failing(prefix):
            for path in sorted(self._root.rglob("*")):
                name = path.relative_to(self._root).as_posix()
                if (
                    not name.startswith(prefix)
                    or _SENDING in path.name
                    or (path.is_dir() and path.name != manifests.NAME)
                ):
                    continue
                if not path.is_file() and os.path.lexists(path):  # its checkpoint would be passed over as one half sent
                    raise StoreError(f"{self.url}/{name} is not a regular file; move it away")
                if path.is_file():
                    found[name] = path.stat().st_size
        return found

    def read(self, name: str) -> bytes:
        with self._failing(name):
            return read_bytes(self._root / name)

    def holds(self, name: str, size: int, digest: str) -> bool:
        path = self._root / name
        with self._failing(name):
            return path.is_file() and path.stat().st_size == size and hash_file(path) == digest

    def put(self, name: str, file: BinaryIO, size: int, digest: str, sent: Callable[[int], None]) -> None:
        path = self._root / name
        sending = path.with_name(f"{path.name}{_SENDING}{uuid.uuid4().hex}")
        with self._failing(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with sending.open("wb") as out:
                    hasher = xxhash.xxh3_128()
                    for start in range(0, size, _READ_BYTES):
                        content = os.pread(file.fileno(), min(_READ_BYTES, size - start), start)
                        hasher.update(content)
                        out.write(content)
                        sent(len(content))
                    os.fsync(out.fileno())
                if hasher.hexdigest() != digest:
                    raise CheckpointError(
                        f"{file.name} is damaged on this disk (its hash is not the manifest's): not uploaded"
                    )
                sending.rename(path)
                sync_path(path.parent)
            finally:
                sending.unlink(missing_ok=True)

    def stream(self, name: str, size: int) -> Iterator[bytes]:
        at = 0
        with self._failing(name), open_regular(self._root / name) as file:
            while chunk := file.read(_READ_BYTES):
                at += len(chunk)
                yield chunk
        if at != size:
            raise StoreError(f"{self.url}/{name} is damaged: it has {at:,} bytes, not {size:,}")

    def delete(self, name: str) -> None:
        path = self._root / name
        with self._failing(name):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are in it
                path.parent.rmdir()

    def abandon(self, prefix: str) -> None:
        with self._failing(prefix):
            for path in self._root.rglob(f"*{_SENDING}*"):
                if path.relative_to(self._root).as_posix().startswith(prefix):
                    path.unlink(missing_ok=True)
            folder = self._root / prefix.rstrip("/")
            if prefix and folder.is_dir() and not any(path.is_file() for path in folder.rglob("*")):
                shutil.rmtree(folder)

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.url}/{name}") from error
        except OSError as error:
            raise StoreError(f"{self.url}/{name}: {error}") from error
