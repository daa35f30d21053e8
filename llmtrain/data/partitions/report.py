"""Reports of finished partitions: their counts and shards, beside the arrays and the documents of each."""

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from numpy.typing import NDArray

from llmtrain.config.regular_file import open_regular, read_bytes, read_json
from llmtrain.data.partitions.array_file import unpack_arrays
from llmtrain.data.partitions.prepared_folder import REPORTS
from llmtrain.data.partitions.provenance import documents_path
from llmtrain.data.shards.mds_writer import stored_part

NAMED_BAD_RECORDS = 20
"""Number of unreadable records that a report names; all are counted."""


@dataclass
class PartitionReport:
    """Result of a partition.

    splits: name -> counts; shards: name -> entries of the index; rest: name -> (tokens, bytes) that no sample holds.
    """

    id: str
    splits: dict[str, dict[str, int]]
    shards: dict[str, list[dict[str, Any]]]
    open_document: dict[str, bool]
    """True for a split whose last document ends in the next partition."""
    read_bytes: int
    """UTF-8 bytes of text that was read."""
    keeps_text: bool
    bad_bytes: float = 0
    """Of records that could not be read: their share, by weight, of the stored bytes of their slices."""
    aside_bytes: int = 0
    """Of slices that were set aside, as stored."""
    bad_count: int = 0
    bad: list[str] = field(default_factory=list)
    passed_over_count: int = 0
    passed_over_bytes: int = 0
    """Of files found in a folder that are not text, as stored."""
    duplicate_count: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    """The first of them, each as the number of its slice and of its record there: see provenance.DocumentTable."""
    truncated: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Conversations that are longer than a sample, by the file: their number, and the tokens that were cut off."""
    untrained_count: int = 0
    untrained: list[tuple[int, int]] = field(default_factory=list)
    """The first of the conversations without a trained token, as `copies`."""
    first_token: int | None = None
    """Of the first document with more than one."""

    def arrays(self, folder: Path) -> dict[str, NDArray]:
        """`counts_SPLIT` [vocab_size], `rest_SPLIT`, `rest_bytes_SPLIT` and `held_text`, of a partition in `folder`."""
        return unpack_arrays(read_bytes(arrays_path(folder, self.id)))

    def shard_files(self) -> dict[str, dict[str, Any]]:
        """Path in the folder that is made -> basename, bytes and hashes, of each shard's file."""
        parts = [(name, stored_part(entry)) for name, entries in self.shards.items() for entry in entries]
        return {f"{name}/{part['basename']}": part for name, part in parts}


def report_path(folder: Path, id: str) -> Path:
    """Path of a partition's report in the folder that is made."""
    return folder / REPORTS / f"{id}.json"


def arrays_path(folder: Path, id: str) -> Path:
    """Path of a partition's arrays: see PartitionReport.arrays."""
    return folder / REPORTS / f"{id}.arrays"


def read_report(folder: Path, id: str) -> PartitionReport | None:
    """The report of a partition that is finished in `folder`, with its shards there and of their size; else None."""
    try:
        content = read_json(report_path(folder, id))
        report = PartitionReport(**content)
        beside = (arrays_path(folder, id), documents_path(folder / REPORTS, id))
        whole = all(path.is_file() for path in beside) and all(
            (folder / file).stat().st_size == part["bytes"] for file, part in report.shard_files().items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if whole else None


def copy_partition(source: Path, target: Path, report: PartitionReport) -> bool:
    """Copy a finished partition, by links where the file system has them. Returns False, copying nothing, for a damaged one."""
    shards = report.shard_files()
    for file, part in shards.items():
        with open_regular(source / file) as stream:
            if hashlib.file_digest(stream, xxhash.xxh64).hexdigest() != part["hashes"]["xxh64"]:  # type: ignore[arg-type]
                return False
    reports = Path(REPORTS)
    for file in (
        *shards,
        arrays_path(Path(), report.id),
        documents_path(reports, report.id),
        report_path(Path(), report.id),
    ):
        (target / file).unlink(missing_ok=True)
        try:
            os.link(source / file, target / file)
        except OSError:
            shutil.copyfile(source / file, target / file)
    return True
