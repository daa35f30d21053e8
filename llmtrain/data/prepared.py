"""The folder that `prepare` makes: its manifest, its fingerprint, and how it comes into being all at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from llmtrain.data.sources import PrepareError, SourceFile
from llmtrain.schema.data import PrepareConfig

FORMAT = 1
"""Raised whenever the same settings give different shards, so that older folders are not reused."""
MANIFEST = "manifest.json"
HASHED_BYTES = 256 << 20
"""Corpora up to this size are compared by content, larger ones by size and time of modification."""
SETTINGS = (
    "sources",
    "tokenizer",
    "vocab_size",
    "seq_len",
    "validation_fraction",
    "text_key",
    "max_bytes",
    "skip_bad_records",
    "seed",
)


@dataclass(frozen=True)
class Prepared:
    """A finished folder. `reused`: it was there already."""

    out: Path
    manifest: dict[str, Any]
    reused: bool

    def split(self, name: str) -> dict[str, Any]:
        """Counts of `train` or `validation`: documents, bytes, tokens, samples, ..."""
        return self.manifest["splits"][name]

    def summary(self) -> str:
        """What is in the folder, a line per split, and the records that were passed over."""
        lines = [f"{self.out}: {'reused' if self.reused else 'made'}, seq_len {self.manifest['seq_len']}"]
        for name, split in self.manifest["splits"].items():
            lines.append(
                f"  {name}: {split['documents']:,} documents, {split['bytes']:,} bytes, {split['tokens']:,} tokens, "
                f"{split['samples']:,} samples"
            )
        skipped = self.manifest["skipped"]
        if skipped["count"]:
            lines.append(f"  skipped {skipped['count']:,} unreadable files or records:")
            lines += [f"    {record}" for record in skipped["first"]]
            lines += ["    ..."] if skipped["count"] > len(skipped["first"]) else []
        return "\n".join(lines)


def describe_inputs(config: PrepareConfig, files: list[SourceFile]) -> dict[str, Any]:
    """Everything the shards depend on: settings, tokenizer, and every source file by content (or size and mtime)."""
    by_content = sum(file.size for file in files) <= HASHED_BYTES
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        mark = _content(file.path) if by_content else f"{file.size} {file.mtime_ns}"
        digest.update(f"{file.name}\0{mark}\n".encode("utf-8", "surrogateescape"))
    settings = {name: getattr(config, name) for name in SETTINGS}
    return {
        "format": FORMAT,
        **settings,
        "files": {
            "count": len(files),
            "bytes": sum(file.size for file in files),
            "compared_by": "content" if by_content else "size and mtime",
            "digest": digest.hexdigest(),
        },
        "tokenizer_digest": _tokenizer_digest(config.tokenizer),
    }


def _content(path: str) -> str:
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror or error}") from error


def _tokenizer_digest(tokenizer: str | None) -> str | None:
    """Of a local tokenizer's file; a name on the hub stands for itself."""
    path = Path(tokenizer).expanduser() if tokenizer else None
    if path and path.is_dir():
        path = path / "tokenizer.json"
    return _content(str(path))[:32] if path and path.is_file() else None


def fingerprint(inputs: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(inputs, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_manifest(out: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of a finished folder, or None where there is none. Raises PrepareError if it is damaged."""
    file = Path(out) / MANIFEST
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise PrepareError(f"{file}: {error}; make the folder anew with --overwrite") from error


def reusable(out: Path, inputs: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The manifest if `out` was made from these inputs; None if there is nothing at `out`, or it is to be replaced.

    Raises PrepareError that says what differs, what is missing, or that the folder is not one of ours.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if overwrite and (out / MANIFEST).is_file():
        return None
    manifest = read_manifest(out)
    if manifest is None:
        raise PrepareError(
            f"{out} exists and was not made by `llmtrain prepare` (no {MANIFEST}); choose another folder"
        )
    if manifest["fingerprint"] != fingerprint(inputs):
        differences = "\n  ".join(_differences(manifest["inputs"], inputs))
        raise PrepareError(
            f"{out} holds shards made otherwise:\n  {differences}\n"
            "prepare into another folder, or replace it with --overwrite"
        )
    for name in manifest["splits"]:
        _require_shards(out / name)
    return manifest


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if key == "files" and isinstance(before, dict) and isinstance(after, dict):
            counts = [f"{side['count']} files, {side['bytes']} bytes" for side in (before, after)]
            same = "the same number and size of files, other contents" if counts[0] == counts[1] else None
            yield "source files: " + (same or f"{counts[0]} then, {counts[1]} now")
        else:
            yield f"{key}: {before!r} then, {after!r} now"


def _require_shards(folder: Path) -> None:
    """Every shard of the index is there, compressed or not."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise PrepareError(
            f"{folder}/index.json cannot be read ({error}); make the folder anew with --overwrite"
        ) from error
    for shard in index["shards"]:
        parts = [part for part in (shard["zip_data"], shard["raw_data"]) if part]
        sizes = {part["basename"]: part["bytes"] for part in parts}
        if not any(_size(folder / name) == size for name, size in sizes.items()):
            raise PrepareError(
                f"{folder / parts[0]['basename']} is missing or cut short; make the folder anew with --overwrite"
            )


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Hold `out` against other processes that prepare it. Raises PrepareError if its parent cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out.parent / f".{out.name}.lock")
        lock.acquire()
    except OSError as error:
        raise PrepareError(f"cannot write to {out.parent}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `out` only if nothing goes wrong. Needs `exclusive(out)`.

    What an earlier, killed attempt left is removed. Raises PrepareError for a full disk or missing permissions.
    """
    partial = out.parent / f"{out.name}.partial"
    old = out.parent / f"{out.name}.old"
    try:
        for rest in (partial, old):
            if rest.exists():
                shutil.rmtree(rest)
        partial.mkdir()
        yield partial
        _sync(partial)
        if out.exists():
            out.rename(old)
        partial.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise PrepareError(f"cannot write {error.filename or partial}: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    """Bring the files to disk, so that a power cut cannot leave a finished folder with empty shards."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
