"""Merging partitions: the indexes of both splits, the counts for the manifest, and the baselines."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.data.partitions.baselines import XZ_BYTES, unigram_bits_per_byte, xz_bits_per_byte
from llmtrain.data.partitions.cutting import Partition
from llmtrain.data.partitions.prepared_folder import REPORTS, SPLITS
from llmtrain.data.partitions.provenance import SOURCES, MergedDocuments, documents_path, read_documents
from llmtrain.data.partitions.report import NAMED_BAD_RECORDS, PartitionReport
from llmtrain.data.shards.mds_writer import stored_part, write_index
from llmtrain.data.shards.split_writer import SplitWriter
from llmtrain.data.sources.files import PassedOver, PrepareError
from llmtrain.data.sources.tolerance import first_bad
from llmtrain.data.tokenize.encode import DocumentMarks
from llmtrain.schema.data import PrepareConfig

TEXT_KEEPERS = 16
"""Number of partitions, the first, of which the held-out text is kept for the baseline of xz."""
RESTS = "rests"
"""Name of the shards of what is left over in the partitions."""


def merge(
    folder: Path,
    config: PrepareConfig,
    vocab_size: int,
    marks: DocumentMarks,
    partitions: Sequence[Partition],
    reports: Sequence[PartitionReport],
    passed_over: PassedOver,
) -> dict[str, Any]:
    """Write the indexes into `folder`, which holds the partitions' shards, and remove what is of no partition.

    reports: of the first of the partitions.
    Tokens that filled no sample in their partition are packed here, in the partitions' order; fewer than `seq_len` of each split
    are left out. Returns the manifest's counts. Raises PrepareError for a split without a single sample.
    """
    names = SPLITS if config.validation_fraction > 0 else SPLITS[:1]
    writers = {
        name: SplitWriter(
            folder / name,
            RESTS,
            config.seq_len,
            vocab_size,
            name == "validation",
            "validation" in names,
            config.compression,
        )
        for name in names
    }
    counts = {name: np.zeros(vocab_size, np.int64) for name in names}
    merged, copies, untrained = MergedDocuments(config.sources), [], []
    truncated: dict[str, tuple[int, int]] = {}
    for number, (partition, report) in enumerate(zip(partitions, reports, strict=False), 1):
        arrays, documents = report.arrays(folder), read_documents(folder / REPORTS, report.id)
        assert documents is not None  # or the report would not count as finished
        merged.begin(report.id, partition, documents)
        copies += [merged.place(*copy) for copy in report.copies[: NAMED_BAD_RECORDS - len(copies)]]
        untrained += [merged.place(*one) for one in report.untrained[: NAMED_BAD_RECORDS - len(untrained)]]
        for file, (number_cut, lost) in report.truncated.items():
            before = truncated.get(file, (0, 0))
            truncated[file] = before[0] + number_cut, before[1] + lost
        for name, writer in writers.items():
            counts[name] += arrays[f"counts_{name}"]
            tokens = len(arrays[f"rest_{name}"])
            writer.pack(arrays[f"rest_{name}"], arrays[f"rest_bytes_{name}"])
            last = number == len(reports)
            # A partition that is packed by best fit has closed its last document itself.
            cut = report.open_document[name] and marks.closes and (last or tokens > 0)
            if cut:
                # Its document goes on in the next partition's shards, or was cut by max_bytes: what follows is another.
                writer.add(
                    np.array([marks.eod_id], writer.dtype),
                    np.zeros(int(writer.held_out), np.int64),
                    np.ones(1, np.int64),
                    np.array([last]),
                    0,
                )
            merged.add_rest(name, tokens, int(cut))
    splits: dict[str, dict[str, int]] = {}
    for name, writer in writers.items():
        rest, shards = writer.finish()
        splits[name] = {
            key: rest.get(key, 0) + sum(report.splits[name][key] for report in reports)
            for key in reports[0].splits[name]
        }
        counts[name] += writer.counts
        if not splits[name]["samples"]:
            raise PrepareError(_too_small(name, splits[name], config.seq_len, reports))
        _keep_only(folder / name, entries := [e for report in reports for e in report.shards[name]] + shards)
        write_index(folder / name, entries)
    for name in SPLITS[len(names) :]:
        shutil.rmtree(folder / name, ignore_errors=True)
    merged.write(folder / REPORTS, RESTS, names)
    kept = {f"{report.id}{extension}" for report in reports for extension in (".json", ".arrays", ".documents")}
    kept |= {SOURCES, documents_path(folder / REPORTS, RESTS).name}
    for path in (folder / REPORTS).iterdir():
        if path.name not in kept:
            path.unlink()
    bad = [record for report in reports for record in report.bad]
    return {
        "first_token": next((one.first_token for one in reports if one.first_token is not None), None),
        "splits": splits,
        "skipped": {
            "count": sum(report.bad_count + report.passed_over_count for report in reports),
            "first": bad[:NAMED_BAD_RECORDS],
        },
        "passed_over": passed_over.reasons,
        **(
            {"duplicates": {"count": sum(report.duplicate_count for report in reports), "first": copies}}
            if config.dedup
            else {}
        ),
        **(
            {
                "truncated": truncated,
                "untrained": {"count": sum(report.untrained_count for report in reports), "first": untrained},
            }
            if config.chat is not None
            else {}
        ),
        "partitions": [report.id for report in reports],
        "baselines": _baselines(folder, reports, counts, splits),
    }


def _keep_only(folder: Path, entries: list[dict[str, Any]]) -> None:
    names = {stored_part(entry)["basename"] for entry in entries}
    with os.scandir(folder) as found:
        for file in found:
            if file.name not in names:
                os.unlink(file.path)


def _too_small(name: str, split: dict[str, int], seq_len: int, reports: Sequence[PartitionReport]) -> str:
    text = (
        f"the {name} part has {split['documents']} documents of {split['tokens']} tokens in all, "
        f"less than one sample of seq_len {seq_len}; give more text or a smaller seq_len"
    )
    if name == "validation":
        text += ", raise validation_fraction, or set it to 0 for no validation (whole files and records are held out)"
    if count := sum(report.untrained_count for report in reports):
        text += f"\n{count:,} conversations without a trained token within {seq_len} tokens were set aside"
    if count := sum(report.bad_count for report in reports):
        text += f"\n{count:,} unreadable files or records were set aside:\n  {first_bad(reports)}"
    return text


def _baselines(
    folder: Path, reports: Sequence[PartitionReport], counts: dict[str, np.ndarray], splits: dict[str, dict[str, int]]
) -> dict[str, Any]:
    if "validation" not in splits:
        return {"xz": None, "xz_bytes": 0, "unigram": None}
    text = b"".join(report.arrays(folder)["held_text"].tobytes() for report in reports[:TEXT_KEEPERS])[:XZ_BYTES]
    scored = splits["validation"]["bytes_scored"]
    return {
        "xz": xz_bits_per_byte(text) if text else None,
        "xz_bytes": len(text),
        "unigram": unigram_bits_per_byte(counts["train"], counts["validation"], scored) if scored else None,
    }
