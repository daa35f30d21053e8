"""The folder that `llmtrain prepare` writes: its manifest, its fingerprint, and when it can be used again."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.base import Section
from llmtrain.config.locks import locked
from llmtrain.config.output_folder import MARKER
from llmtrain.config.regular_file import read_json
from llmtrain.data.shards.index import ShardError, read_index
from llmtrain.data.sources.files import NAMED_FILES, PassedOver, PrepareError, SourceFile
from llmtrain.data.sources.storage import open_file
from llmtrain.data.sources.token_kinds import mark_of_side_file
from llmtrain.schema.data import PrepareConfig

FORMAT = 3
"""Version of the shards. Increase it whenever the same settings give different shards."""
_EARLIER_FORMATS = {1, 2}
"""Versions whose folders are used as they are: 1 packed all sources as one partition, 2 compressed with level 3."""
MANIFEST = "manifest.json"
REPORTS = "partitions"
"""Folder of the partitions' reports, beside train/ and validation/."""
SPLITS = ("train", "validation")
_ENTRIES = {MANIFEST, MARKER, *SPLITS, REPORTS, "tokenizer"}
"""Names in a finished folder."""
HASHED_BYTES = 256 << 20
"""Corpora up to this size are compared by content, larger ones by size and time of modification."""
LATER_SETTINGS: dict[str, Any] = {
    "dedup": False,
    "add_bos_token": False,
    "add_eos_token": True,
    "packing": "concatenate",
    "compression": "zstd",
    "chat": None,
}
"""Settings that folders made before do not name, and what they meant."""
SETTINGS = (
    "sources",
    "tokenizer",
    "vocab_size",
    "seq_len",
    "validation_fraction",
    "text_key",
    "max_bytes",
    *LATER_SETTINGS,
    "skip_bad_records",
    "seed",
)


@dataclass(frozen=True)
class PreparedFolder:
    """A finished folder. reused: it existed already. address: of one in a store."""

    out: Path
    manifest: dict[str, Any]
    reused: bool
    address: str | None = None

    def split(self, name: str) -> dict[str, Any]:
        """Counts of `train` or `validation`: documents, bytes, tokens, samples, ..."""
        return self.manifest["splits"][name]

    def summary(self) -> str:
        """A line per split with its counts, and the records that were skipped."""
        lines = [
            f"{self.address or self.out}: {'reused' if self.reused else 'made'}, seq_len {self.manifest['seq_len']}"
        ]
        passed_over = PassedOver(self.manifest.get("passed_over", {}))
        truncated = self.manifest.get("truncated", {})
        for name, split in self.manifest["splits"].items():
            lines.append(
                f"  {name}: {split['documents']:,} documents, {split['bytes']:,} bytes, {split['tokens']:,} tokens, "
                f"{split['samples']:,} samples"
                + (f", {split['trained']:,} tokens trained" if "trained" in split else "")
            )
        for file, (count, tokens) in list(truncated.items())[:NAMED_FILES]:
            lines.append(f"  {file}: {count:,} longer than a sample, of which {tokens:,} tokens are cut off")
        if others := list(truncated.values())[NAMED_FILES:]:
            lines.append(f"  {len(others):,} further files: {sum(one[0] for one in others):,} longer than a sample")
        for key, before, behind in (
            ("untrained", "set aside", "conversations without a trained token"),
            ("skipped", "skipped", "unreadable files or records"),
            ("duplicates", "left out", "documents that equal earlier ones"),
        ):
            if (some := self.manifest.get(key, {"count": 0}))["count"]:
                lines.append(f"  {before} {some['count']:,} {behind}:")
                lines += [f"    {name}" for name in some["first"]]
                lines += ["    ..."] if some["count"] > len(some["first"]) else []
        if named := passed_over.lines():
            lines += ["  passed over in folders:", *(f"    {line}" for line in named)]
        return "\n".join(lines)


def file_marks(files: list[SourceFile]) -> dict[SourceFile, str]:
    """A mark of each file's content: its digest, or for large corpora its size and time of modification."""
    by_content = _by_content(files)
    return {
        file: (_content_digest(file.path) if by_content else f"{file.size} {file.mtime_ns}")
        + mark_of_side_file(file.path, _content_digest, by_content)
        for file in files
    }


def _by_content(files: list[SourceFile]) -> bool:
    return sum(file.size for file in files) <= HASHED_BYTES


def describe_inputs(config: PrepareConfig, files: list[SourceFile], marks: dict[SourceFile, str]) -> dict[str, Any]:
    """All inputs the shards depend on: settings, tokenizer, and every source file by its mark."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name}\0{marks[file]}\n".encode("utf-8", "surrogateescape"))
    settings = {name: setting(config, name) for name in SETTINGS}
    return {
        "format": FORMAT,
        **settings,
        "files": {
            "count": len(files),
            "bytes": sum(file.size for file in files),
            "compared_by": "content" if _by_content(files) else "size and mtime",
            "digest": digest.hexdigest(),
        },
        "tokenizer_digest": _tokenizer_digest(config.tokenizer),
    }


def setting(config: PrepareConfig, name: str) -> Any:
    """A setting as JSON."""
    value = getattr(config, name)
    return value.model_dump(mode="json") if isinstance(value, Section) else value


def _content_digest(path: str) -> str:
    try:
        with open_file(path) as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()  # type: ignore[arg-type]
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror or error}") from error


def _tokenizer_digest(tokenizer: str | None) -> str | None:
    """Digest of a local tokenizer's file; None for a name on the hub, which the settings hold."""
    path = Path(tokenizer).expanduser() if tokenizer else None
    if path and path.is_dir():
        path = path / "tokenizer.json"
    return _content_digest(str(path))[:32] if path and path.is_file() else None


def fingerprint(inputs: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(inputs, sort_keys=True).encode(), digest_size=16).hexdigest()


_KINDS = {"inputs": dict, "tokenizer": dict, "seq_len": int, "splits": dict, "skipped": dict, "baselines": dict}
_COUNTS = ("documents", "bytes", "tokens", "samples")


def _fault(manifest: dict[str, Any]) -> str | None:
    """Entries of a manifest that are of another kind than `prepare` writes."""
    wrong = [key for key, kind in _KINDS.items() if key in manifest and not isinstance(manifest[key], kind)]
    if not wrong:
        found = {f"splits.{name}": counts for name, counts in manifest.get("splits", {}).items()}
        wrong = [key for key, counts in found.items() if not isinstance(counts, dict)]
        numbers = {
            f"{key}.{name}": counts.get(name, 0)
            for key, counts in found.items()
            if key not in wrong
            for name in _COUNTS
        }
        if tokenizer := manifest.get("tokenizer"):
            numbers |= {
                "tokenizer.eod_id": tokenizer.get("eod_id"),
                "tokenizer.vocab_size": tokenizer.get("vocab_size", 0),
            }
        wrong += [key for key, value in numbers.items() if type(value) is not int or value < 0]
    return f"{', '.join(wrong)}: not what `llmtrain prepare` writes there" if wrong else None


def read_manifest(out: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of a finished folder, or None where there is none of ours; a section that it lacks is empty. Raises PrepareError
    if it is damaged."""
    file = Path(out) / MANIFEST
    try:
        found = read_json(file)
        if not isinstance(found, dict):
            raise PrepareError("is no JSON object")
        if fault := _fault(found):
            raise PrepareError(fault)
        return {"splits": {}, "inputs": {}} | found if {"splits", "inputs", "tokenizer"} & found.keys() else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise PrepareError(f"{file}: {error}; make the folder anew with --overwrite") from error


def is_prepared(config: PrepareConfig) -> bool:
    """True if the folder, or that of each stream, is finished. Its sources are not compared. Raises as read_manifest."""
    out = Path(config.out).expanduser()
    return all(read_manifest(out / name) is not None for name in config.streams or [""])


def find_reusable(out: Path, inputs: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The manifest if `out` was made from these inputs; None if `out` does not exist or is to be replaced.

    Raises PrepareError with what differs, what is missing, or that the folder is not one of `llmtrain prepare`.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if overwrite and (out / MANIFEST).is_file():
        _refuse_foreign(out)
        return None
    manifest = read_manifest(out)
    if manifest is None:
        raise PrepareError(
            f"{out} exists and was not made by `llmtrain prepare` (no {MANIFEST}); choose another folder"
        )
    refuse_other(out, manifest, inputs)
    lacking = [*(_KINDS.keys() - manifest.keys())]
    lacking += [f"splits.{name}" for name, split in manifest["splits"].items() if set(_COUNTS) - split.keys()]
    if lacking:
        raise PrepareError(
            f"{out / MANIFEST}: it lacks {', '.join(sorted(lacking))}; make the folder anew with --overwrite"
        )
    for name, split in manifest["splits"].items():
        _require_shards(out / name, split["samples"])
    return manifest


def _refuse_foreign(out: Path) -> None:
    """Raise PrepareError for a folder with something in it that `llmtrain prepare` did not write: it would be removed too."""
    foreign = sorted(path.name for path in out.iterdir() if path.name not in _ENTRIES)
    with contextlib.suppress(OSError, ValueError):  # a damaged manifest tells nothing
        manifest = read_json(out / MANIFEST)
        if not isinstance(manifest, dict) or not {"fingerprint", "splits"} <= manifest.keys():
            foreign.append(MANIFEST)
    if foreign:
        raise PrepareError(
            f"{out} holds what `llmtrain prepare` did not write ({', '.join(foreign[:5])}), which --overwrite would remove: "
            "move it away, or choose another folder"
        )


def refuse_other(out: Path | str, manifest: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Raise PrepareError with what differs, if the folder of the manifest was made from other inputs."""
    made = LATER_SETTINGS | manifest["inputs"]
    if made.get("format") in _EARLIER_FORMATS:
        made["format"] = FORMAT
    if differences := "\n  ".join(_differences(made, inputs)):
        raise PrepareError(
            f"{out} holds shards made otherwise:\n  {differences}\n"
            "prepare into another folder, or replace it with --overwrite"
        )


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


def _require_shards(folder: Path, samples: int) -> None:
    """Check that every shard of the index exists, compressed or not, and so many samples in all. Raises PrepareError."""
    try:
        index = read_index(folder)
    except ShardError as error:
        raise PrepareError(f"{error}; make the folder anew with --overwrite") from error
    if index is None:
        raise PrepareError(f"{folder}/index.json is missing; make the folder anew with --overwrite")
    for shard in index.shards:
        parts = [part for part in (shard["zip_data"], shard["raw_data"]) if part]
        sizes = {part["basename"]: part["bytes"] for part in parts}
        if not any((file := folder / name).is_file() and file.stat().st_size == size for name, size in sizes.items()):
            raise PrepareError(
                f"{folder / parts[0]['basename']} is missing or cut short; make the folder anew with --overwrite"
            )
    if index.samples != samples:
        raise PrepareError(
            f"{folder}/index.json counts {index.samples:,} samples, {MANIFEST} {samples:,}: one of them was changed; "
            "make the folder anew with --overwrite"
        )


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Lock `out` against other processes that prepare it, and say so where one does. Raises PrepareError if its parent cannot be
    written to."""
    with contextlib.ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out.parent / f".{out.name}.lock", f"prepares {out}"))
        except OSError as error:
            raise PrepareError(f"cannot write to {out.parent}: {error.strerror or error}") from error
        yield
