"""Listing the files of a corpus: `stdlib`, files, folders, globs and addresses. Content is read only of files in folders whose
name tells nothing.

Every name is relative to its source, so that the split into training and validation, which hashes names, is the
same wherever the corpus lies.
"""

import glob
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmtrain.config.addresses import is_remote
from llmtrain.config.output_folder import MARKER
from llmtrain.config.regular_file import open_regular, read_json, require_regular
from llmtrain.data.sources import made_up
from llmtrain.data.sources.compression import EXTENSIONS, compression_of
from llmtrain.data.sources.formats import CSV_EXTENSIONS, JSONL_EXTENSIONS, is_structured, plain_name
from llmtrain.data.sources.storage import SCHEMES, fixed_folder, has_pattern, list_remote
from llmtrain.data.sources.token_kinds import main_file, token_kind
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
RECORD_EXTENSIONS = JSONL_EXTENSIONS | CSV_EXTENSIONS | {".parquet", ".arrow"}
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})

STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "pydoc_data", "encodings"})
"""Folders left out of `stdlib`: tests (not every build of Python has them) and generated tables. About 10 MB remain."""


NAMED_FILES = 3
"""Number of files of each kind that are named among those passed over; all are counted."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `name` is relative to the source and uses /; `path` may be an address; `size` is in bytes as stored."""

    path: str
    name: str
    size: int
    mtime_ns: int
    from_folder: bool
    """True for a file that was found, not named: if it is not text, it is passed over and counted."""
    source: int = field(default=0, compare=False)
    """Number of the source that the file is of."""


@dataclass
class PassedOver:
    """Files that were found and not read, by reason: their number and the first of their names."""

    reasons: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        count, names = self.reasons.get(reason, (0, []))
        self.reasons[reason] = (count + 1, [*names, name][:NAMED_FILES])

    def lines(self) -> list[str]:
        """A line per reason, the most frequent first: `12 files of another kind (.png): a.png, b.png, c.png, ...`."""
        found = sorted(self.reasons.items(), key=lambda item: (-item[1][0], item[0]))
        return [
            f"{count:,} {reason}: {', '.join(names)}{', ...' if count > len(names) else ''}"
            for reason, (count, names) in found
        ]


def list_files(sources: list[str], passed_over: PassedOver | None = None) -> list[SourceFile]:
    """List the files of all sources, in the order of `sources` and by name within each.

    passed_over: gets those that are left out. Raises PrepareError that lists every missing or empty source.
    """
    files: list[SourceFile] = []
    errors: list[str] = []
    left_out = PassedOver() if passed_over is None else passed_over
    for number, source in enumerate(sources):
        try:
            found = sorted(_walk_source(source, left_out), key=lambda file: file.name)
        except OSError as error:
            errors.append(f"{source}: {error.strerror or error}")
            continue
        if found:
            files += [replace(file, source=number) for file in _without_side_files(found, left_out)]
        else:
            known = "known extensions: .txt, .md, .py, .jsonl, .parquet, ... and .gz of them"
            verb = (
                "matches no file" if has_pattern(source) and not Path(source).exists() else f"holds no text ({known})"
            )
            errors.append(f"{source}: {verb}")
    if errors:
        raise PrepareError("cannot read every source:\n  " + "\n  ".join(errors))
    return files


def named_twice(files: list[SourceFile]) -> list[str]:
    """Paths of the files that several sources hold, or one that is given several times."""
    counts = Counter(file.path if is_remote(file.path) else os.path.abspath(file.path) for file in files)
    return [path for path, count in counts.items() if count > 1] if len(counts) < len(files) else []


def _without_side_files(files: list[SourceFile], passed_over: PassedOver) -> Iterator[SourceFile]:
    """The files, without the indexes and the like beside token files."""
    paths = {file.path for file in files}
    for file in files:
        if main_file(file.path) in paths:
            passed_over.add("beside token files", file.name)
        else:
            yield file


def stored_bytes(source: str, enough: int) -> float:
    """Bytes of a source's files, counted up to `enough`; infinite where only reading them tells (compressed, tables, remote).

    Raises OSError for a source that cannot be read.
    """
    if is_remote(source):
        _require_scheme(source)
        return math.inf
    total = 0
    for file in _walk_source(source, PassedOver()):
        if os.path.splitext(file.name)[1].lower() in EXTENSIONS.keys() | {".parquet", ".arrow"} or _is_compressed(
            file.path
        ):
            return math.inf
        total += file.size
        if total >= enough:
            break
    return total


def _is_compressed(path: str) -> bool:
    with open_regular(path) as stream:
        return compression_of(stream.read(8)) is not None


def _walk_source(source: str, passed_over: PassedOver) -> Iterator[SourceFile]:
    if source == "stdlib":
        yield from _stdlib()
        return
    if source in made_up.SOURCES:
        yield _file(file := made_up.records_file(source), file.name)
        return
    if is_remote(source):
        yield from _remote(source, passed_over)
        return
    path = Path(source).expanduser()
    if has_pattern(source) and not path.exists():
        yield from _matching(str(path), passed_over)
    elif path.is_dir():
        yield from _folder(path, passed_over)
    else:
        yield _file(path, path.name)


def _file(path: Path, name: str) -> SourceFile:
    """A file that is itself a source, whatever its name."""
    stat = path.stat()
    if not path.is_file():
        raise OSError(f"{path} is neither a file nor a folder")
    require_regular(path)  # an unreadable file is reported before any work
    return SourceFile(str(path), name, stat.st_size, stat.st_mtime_ns, False)


def _matching(pattern: str, passed_over: PassedOver) -> Iterator[SourceFile]:
    """The files that a glob matches, and those in the folders that it matches; named from its last fixed folder."""
    root = fixed_folder(pattern) or "."
    for match in sorted(glob.glob(pattern, recursive=True)):
        relative = os.path.relpath(match, root).replace(os.sep, "/")
        if os.path.isfile(match):
            yield _file(Path(match), relative)
        elif "**" not in pattern:  # which has matched what is in the folder
            for file in _folder(Path(match), passed_over):
                yield SourceFile(file.path, f"{relative}/{file.name}", file.size, file.mtime_ns, True)


def _require_scheme(address: str) -> None:
    """Check that an address is of a store that is read here. Raises OSError."""
    scheme, _, place = address.partition("://")
    if scheme not in SCHEMES:
        raise OSError(
            f"is no address that is read here; give {' or '.join(f'{name}://' for name in SCHEMES)}, or a path"
        )
    if not place.strip("/"):
        raise OSError(f"names no place; give {scheme}://BUCKET/FOLDER")


def _remote(address: str, passed_over: PassedOver) -> Iterator[SourceFile]:
    _require_scheme(address)
    root = address.rstrip("/")
    if has_pattern(address):
        root = fixed_folder(address).rstrip("/")
    for found in list_remote(address):
        relative = found.address.removeprefix(f"{root}/")
        if found.address == address:
            yield SourceFile(found.address, found.address.rpartition("/")[2], found.size, found.mtime_ns, False)
        elif any(part.startswith(".") or part in SKIPPED_FOLDERS for part in relative.split("/")):
            passed_over.add("hidden", relative)
        elif has_pattern(address) or has_known_name(relative.rpartition("/")[2]) or _is_token_file(found.address):
            yield SourceFile(found.address, relative, found.size, found.mtime_ns, not has_pattern(address))
        else:
            passed_over.add(_other_kind(relative), relative)


def has_known_name(name: str) -> bool:
    """True for the name of a text or of records, compressed or not."""
    plain = plain_name(name)
    extension = os.path.splitext(plain)[1].lower()
    return extension in TEXT_EXTENSIONS | RECORD_EXTENSIONS or plain in TEXT_NAMES


def _is_token_file(address: str) -> bool:
    return any(path and token_kind(path, from_folder=True) for path in (address, main_file(address)))


def _is_wanted(path: str, name: str) -> bool:
    """True for a file of a folder that is read: by its name, or by its content."""
    beside = main_file(path)
    return (
        has_known_name(name)
        or token_kind(path, from_folder=True) is not None
        or (beside is not None and os.path.exists(beside) and token_kind(beside, from_folder=True) is not None)
        or is_structured(path)
    )


def _other_kind(name: str) -> str:
    extension = os.path.splitext(name)[1]
    return f"of another kind ({extension})" if extension else "of another kind (no extension)"


def _folder(
    root: Path, passed_over: PassedOver, skipped: frozenset[str] = SKIPPED_FOLDERS, only: str | None = None
) -> Iterator[SourceFile]:
    """Texts and records below `root`, without hidden files and folders. Links to folders are not followed.

    A folder of `datasets.save_to_disk` gives its Arrow files; of one with several splits, `train`. A folder that `prepare` makes
    gives nothing: its tokenizer and records would pass for text. Raises OSError where it is `root`.
    """

    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root, onerror=fail):
        relative = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if relative == "." else f"{relative}/"
        subfolders.sort()  # what is passed over is named in the same order everywhere
        for name in sorted(name for name in subfolders if name in skipped or name.startswith(".")):
            subfolders.remove(name)
            passed_over.add("hidden or generated folders", f"{prefix}{name}")
        if _is_prepared(folder, subfolders, names):
            if relative == ".":
                raise OSError("was made by `llmtrain prepare`: name its sources, or train on it as data.train.streams")
            subfolders.clear()
            passed_over.add("made by `llmtrain prepare`", relative)
            continue
        for name in [name for name in subfolders if os.path.islink(os.path.join(folder, name))]:
            subfolders.remove(name)
            passed_over.add("links to folders (name one to read it)", f"{prefix}{name}")
        if "dataset_dict.json" in names:
            names = []
            for name in [name for name in subfolders if name != "train" and "train" in subfolders]:
                subfolders.remove(name)
                passed_over.add("other splits of a saved data set (name one to read it)", f"{prefix}{name}")
        arrow = _saved_arrow(folder, names)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.startswith("."):
                passed_over.add("hidden", f"{prefix}{name}")
            elif not os.path.isfile(path):
                passed_over.add("no regular files", f"{prefix}{name}")
            elif arrow is not None and name not in arrow:
                passed_over.add("beside the Arrow files of a saved data set", f"{prefix}{name}")
            elif not name.endswith(only) if only else not _is_wanted(path, name):
                passed_over.add(_other_kind(name), f"{prefix}{name}")
            else:
                stat = os.stat(path)
                yield SourceFile(path, f"{prefix}{name}", stat.st_size, stat.st_mtime_ns, True)


def _is_prepared(folder: str, subfolders: list[str], names: list[str]) -> bool:
    """True for a folder of shards, and for one in which they are being made."""
    begun = "manifest.json" in names or MARKER in names or folder.endswith(".partial")
    return begun and {"partitions", "tokenizer", "train"} <= set(subfolders)


def _saved_arrow(folder: str, names: list[str]) -> set[str] | None:
    """The Arrow files of a folder that `datasets.save_to_disk` wrote; None for another folder."""
    if not {"state.json", "dataset_info.json"} <= set(names):
        return None
    try:
        state = read_json(Path(folder, "state.json"))
        return {file["filename"] for file in state["_data_files"]}
    except (KeyError, TypeError, ValueError):
        return None


def _stdlib() -> Iterator[SourceFile]:
    """Python's own library sources, less STDLIB_SKIPPED and the files that describe one machine's build."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in _folder(root, PassedOver(), SKIPPED_FOLDERS | STDLIB_SKIPPED, only=".py"):
        if not file.name.startswith(("_sysconfigdata", "config-")):
            yield file
