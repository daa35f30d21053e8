"""Compressed files, recognised by their first bytes: gzip, zstandard, bzip2, xz; of any number of members or frames."""

import bz2
import gzip
import io
import lzma
import zlib
from typing import Any, BinaryIO, Literal, cast

import zstandard

Compression = Literal["gz", "zst", "bz2", "xz"]

EXTENSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
_ZST = b"\x28\xb5\x2f\xfd"
_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gz", _ZST: "zst", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
_SKIPPABLE = b"\x2a\x4d\x18"
"""Behind a byte 0x50 to 0x5f: a frame without content, with which pzstd and others begin a .zst file (RFC 8878)."""
DAMAGES = (OSError, EOFError, zlib.error, zstandard.ZstdError, lzma.LZMAError)
"""Errors of reading a damaged file."""
_READ_BYTES = 1 << 17
_BUFFER_BYTES = 1 << 20
_BLOCKS = 8
"""Blocks of a .zst file that are expanded at a time."""
_RUN = 1
"""The kind of a block that is one byte, many times."""


def compression_of(head: bytes) -> Compression | None:
    """The compression of a file that begins with `head`; None for none that is known."""
    if head[1:4] == _SKIPPABLE and head[0] & 0xF0 == 0x50:
        return "zst"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def is_cut_within_magic(head: bytes, compression: Compression) -> bool:
    """True for all of a file that ends before it can be recognised as compressed, also for an empty one."""
    return any(magic.startswith(head) for magic, name in _MAGIC.items() if name == compression)


def decompress(stream: BinaryIO, compression: Compression | None) -> BinaryIO:
    """The uncompressed bytes. Reading them raises one of DAMAGES for a file that is damaged or cut short."""
    if compression is None:
        return stream
    raw: Any
    if compression == "gz":
        raw = gzip.GzipFile(fileobj=stream)
    elif compression == "bz2":
        raw = bz2.BZ2File(stream)
    elif compression == "xz":
        raw = lzma.LZMAFile(stream)  # noqa: SIM115 - closed by its reader
    else:
        raw = _ZstReader(stream)
    return io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER_BYTES)


class _ZstReader(io.RawIOBase):
    """Uncompressed bytes of a .zst file of one or more frames (RFC 8878), a few blocks at a time, each of which has at most
    128 KiB: zeros take a few bytes a block, and zstandard expands whatever it is given at once.

    zstandard's own stream_reader treats a truncated file as complete; here it is an EOFError, as in gzip.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._frame: Any = None
        self._has_checksum = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._blocks() if self._frame is not None else self._frame_header()
            frame: Any = self._frame  # which reading a header sets
            if not data:
                if frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._ready = memoryview(frame.decompress(data))
            if frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _frame_header(self) -> bytes:
        """The bytes before the blocks of the next frame with content; none at the end of the file."""
        while (magic := self._stream.read(4))[1:] == _SKIPPABLE and magic[0] & 0xF0 == 0x50:
            left = int.from_bytes(self._stream.read(4), "little")
            while left and (skipped := len(self._stream.read(min(left, _READ_BYTES)))):
                left -= skipped
            if left:
                raise EOFError("it ends in the middle of a frame")
        if not magic:
            return b""
        # `zstd --long` writes windows of up to 2 GiB.
        self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        descriptor = self._stream.read(1)
        if not descriptor or magic != _ZST:
            return magic + descriptor  # which zstandard refuses
        flags = descriptor[0]
        single, self._has_checksum = bool(flags & 0x20), bool(flags & 0x04)
        size = (not single) + (0, 1, 2, 4)[flags & 3] + (int(single), 2, 4, 8)[flags >> 6]
        return magic + descriptor + self._stream.read(size)

    def _blocks(self) -> bytes:
        """The next blocks of a frame, up to its end."""
        parts = []
        for _ in range(_BLOCKS):
            parts.append(header := self._stream.read(3))
            content = int.from_bytes(header, "little")
            parts.append(self._stream.read(1 if content >> 1 & 3 == _RUN else content >> 3))
            if content & 1:  # the last one
                parts.append(self._stream.read(4 * self._has_checksum))
                break
        return b"".join(parts)
