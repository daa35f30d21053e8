"""Reading of .zst files: whole, cut short, damaged, and of a size that has nothing to do with that of the file."""

import io
import random
from typing import Any

import pytest
import zstandard

from llmtrain.data.sources.compression import DAMAGES, compression_of, decompress

SKIPPABLE = b"\x50\x2a\x4d\x18\x05\x00\x00\x00hello"


def zst(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def streamed(pieces: int) -> bytes:
    """A frame of zeros, so many MiB, whose header does not say how many."""
    made = zstandard.ZstdCompressor().compressobj()
    return b"".join([*(made.compress(bytes(1 << 20)) for _ in range(pieces)), made.flush()])


@pytest.fixture(scope="module")
def frames() -> tuple[bytes, bytes]:
    """A file of frames of every kind, and its content."""
    noise, text = random.Random(0).randbytes(300_000), b"a line of text\n" * 40_000
    parts = [zst(noise + text, write_checksum=True), SKIPPABLE, zst(b"tail", write_content_size=False), zst(b"")]
    return b"".join([SKIPPABLE, *parts, streamed(2)]), noise + text + b"tail" + bytes(2 << 20)


def test_reads_frames_of_every_kind(frames):
    file, content = frames
    assert compression_of(file) == "zst"
    assert decompress(io.BytesIO(file), "zst").read() == content


def test_a_file_that_ends_early_is_an_error_but_between_frames(frames):
    file, content = frames
    for cut in [*range(1, len(file), len(file) // 300), *range(len(file) - 40, len(file))]:
        try:
            found = decompress(io.BytesIO(file[:cut]), "zst").read()
        except DAMAGES:
            continue
        assert content.startswith(found) and len(found) < len(content)
        assert cut < len(SKIPPABLE) + len(file) and file[cut : cut + 4] in (SKIPPABLE[:4], zst(b"")[:4])


def test_damage_is_an_error_of_those_that_readers_expect(frames):
    file, _ = frames
    draw = random.Random(1)
    for _ in range(200):
        damaged = bytearray(file)
        damaged[draw.randrange(len(file))] ^= 1 << draw.randrange(8)
        try:
            decompress(io.BytesIO(bytes(damaged)), "zst").read()
        except DAMAGES:
            continue


def test_a_small_file_is_not_expanded_at_once():
    """Of 98 kB, 3 GB of zeros: all of them were in memory once the first byte was read."""
    file = streamed(200)
    assert len(file) < 10_000
    reader = decompress(io.BytesIO(file), "zst").raw  # type: ignore[attr-defined]
    read, buffer = 0, bytearray(1 << 16)
    while got := reader.readinto(buffer):
        assert len(reader._ready) <= 1 << 20
        read += got
    assert read == 200 << 20
