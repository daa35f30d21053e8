"""Listing the files of a corpus: `stdlib`, files and folders, classified by extension. No file is read here.

Every name is relative to its source, so that the split into training and validation, which hashes names, is the
same wherever the corpus lies.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain.errors import UserError


class PrepareError(UserError):
    """An error in the sources or the output folder that the user must correct."""


_EXTENSIONS = """
    .txt .text .md .rst .tex .org .adoc .csv .tsv .log .html .htm .xml .css .scss .svg .srt .po .py .pyi .pyx .pxd
    .ipynb .c .h .cc .cpp .cxx .hh .hpp .hxx .cu .cuh .hip .m .mm .go .rs .java .kt .kts .scala .clj .js .jsx .mjs
    .ts .tsx .vue .rb .pl .pm .php .lua .r .jl .hs .ml .mli .ex .exs .erl .swift .dart .cs .fs .vb .nim .zig .sh
    .bash .zsh .fish .ps1 .bat .sql .proto .thrift .graphql .s .asm .f .f90 .f95 .el .lisp .scm .v .sv .vhd .json
    .yaml .yml .toml .ini .cfg .conf .cmake .mk .gradle .tf .nix .bzl .bazel .ld .diff .patch
"""
_NAMES = """
    Makefile Dockerfile README LICENSE COPYING NOTICE AUTHORS CHANGELOG NEWS INSTALL TODO BUILD WORKSPACE
"""
TEXT_EXTENSIONS = frozenset(_EXTENSIONS.split())
"""Extensions of text files inside a folder. A file that is a source itself is read whatever its extension."""
TEXT_NAMES = frozenset(_NAMES.split())
JSONL_EXTENSIONS = frozenset({".jsonl", ".ndjson"})
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})

STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "pydoc_data", "encodings"})
"""Folders left out of `stdlib`: tests (not every build of Python has them) and generated tables. About 10 MB remain."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `name` is relative to the source and uses /; `size` is in bytes as stored."""

    path: str
    name: str
    kind: Literal["text", "jsonl"]
    compression: Literal["gz", "zst"] | None
    size: int
    mtime_ns: int
    from_folder: bool
    """True for a file found in a folder: if it is not text, it is skipped and reported."""


def list_files(sources: list[str]) -> list[SourceFile]:
    """List the files of all sources, in the order of `sources` and by name within each.

    Raises PrepareError that lists every missing or empty source.
    """
    files: list[SourceFile] = []
    errors: list[str] = []
    for source in sources:
        try:
            found = list(_list_source(source))
        except OSError as error:
            errors.append(f"{source}: {error.strerror or error}")
            continue
        if found:
            files += found
        else:
            errors.append(
                f"{source}: holds no text (known extensions: .txt, .md, .py, .jsonl, ... and .gz, .zst of them)"
            )
    if errors:
        raise PrepareError("cannot read every source:\n  " + "\n  ".join(errors))
    return files


def _list_source(source: str) -> Iterator[SourceFile]:
    if source == "stdlib":
        yield from _stdlib()
        return
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder(path)
        return
    stat = path.stat()
    if not path.is_file():
        raise OSError(f"{path} is neither a file nor a folder")
    os.close(os.open(path, os.O_RDONLY))  # an unreadable file is reported before any work
    kind, compression, _ = classify(path.name)
    yield SourceFile(str(path), path.name, kind, compression, stat.st_size, stat.st_mtime_ns, False)


def classify(name: str) -> tuple[Literal["text", "jsonl"], Literal["gz", "zst"] | None, bool]:
    """Return (kind, compression, is_text); is_text: a file of this name in a folder is read."""
    stem, extension = os.path.splitext(name)
    compression = COMPRESSIONS.get(extension.lower())
    if compression:
        stem, extension = os.path.splitext(stem)
    extension = extension.lower()
    if extension in JSONL_EXTENSIONS:
        return "jsonl", compression, True  # type: ignore[return-value]
    return "text", compression, extension in TEXT_EXTENSIONS or name in TEXT_NAMES  # type: ignore[return-value]


def _folder(root: Path, skipped: frozenset[str] = SKIPPED_FOLDERS, only: str | None = None) -> Iterator[SourceFile]:
    """Text files below `root` by name, without hidden files and folders. Links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise error

    found: list[SourceFile] = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        for name in names:
            kind, compression, is_text = classify(name)
            if not is_text or name.startswith(".") or (only and not name.endswith(only)):
                continue
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                stat = os.stat(path)
                relative = os.path.relpath(path, root).replace(os.sep, "/")
                found.append(SourceFile(path, relative, kind, compression, stat.st_size, stat.st_mtime_ns, True))
    yield from sorted(found, key=lambda file: file.name)


def _stdlib() -> Iterator[SourceFile]:
    """Python's own library sources, less STDLIB_SKIPPED and the files that describe one machine's build."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in _folder(root, SKIPPED_FOLDERS | STDLIB_SKIPPED, only=".py"):
        if not file.name.startswith(("_sysconfigdata", "config-")):
            yield file
