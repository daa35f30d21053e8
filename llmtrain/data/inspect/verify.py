"""Integrity of shards: each file against the index, the index against the folder and the manifest. Nothing is written."""

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from llmtrain.config.addresses import is_remote
from llmtrain.data.partitions.merge import RESTS
from llmtrain.data.partitions.prepared_folder import MANIFEST, REPORTS, read_manifest
from llmtrain.data.partitions.provenance import SOURCES, documents_path, read_documents
from llmtrain.data.shards.index import Index, ShardError, part_fault, verify_shard
from llmtrain.data.shards.mds_writer import stored_part
from llmtrain.data.shards.stored_stream import StoredStream, read_file, unpack
from llmtrain.data.sources.files import PrepareError
from llmtrain.data.sources.storage import list_remote
from llmtrain.errors import UserError

Progress = Callable[[int], None]


def stored_bytes(stream: StoredStream) -> int:
    """About the bytes that `stream_faults` reads."""
    shards = stream.index.shards
    sizes = zip(shards.raw_bytes.tolist(), shards.zip_bytes.tolist(), strict=True)
    return sum(packed or raw for raw, packed in sizes) * len(stream.places)


def stream_faults(stream: StoredStream, advance: Progress) -> Iterator[str]:
    """Faults of a stream, with the names of files. Each place is examined; a shard may be missing in all but the last,
    from which the others are filled. Raises RunError where a store fails."""
    for place in stream.places:
        yield from _place_faults(place, stream.index, required=place == stream.places[-1], advance=advance)


def _place_faults(place: str, index: Index, required: bool, advance: Progress) -> Iterator[str]:
    for shard in index.shards:
        present = False
        for part in (shard["raw_data"], shard["zip_data"]):
            if part is None:
                continue
            file = f"{place}/{part['basename']}"
            try:
                content = read_file(file)
                if content is None:
                    continue
                present = True
                advance(len(content))
                if part is not shard["raw_data"]:
                    if fault := part_fault(part, content, index.hash_algorithm):
                        yield f"{file}: {fault}"
                        continue
                    content = unpack(content, shard["compression"])
                if fault := verify_shard(io.BytesIO(content), shard, index.hash_algorithm):
                    yield f"{file}: {fault}"
            except ShardError as error:
                text = str(error)
                yield text if file in text else f"{file}: {text}"
        if required and not present:
            yield f"{place}/{stored_part(shard)['basename']}: missing"
    listed = {name for names in index.shards.names() for name in names if name}
    for name in sorted(_shard_files(place) - listed):
        yield f"{place}/{name}: is not in the index, so its samples are never read"


def _shard_files(place: str) -> set[str]:
    """Names of files of shards below a place, packed or not; those that are being unpacked are left out."""
    if is_remote(place):
        found = [stored.address.removeprefix(f"{place}/") for stored in list_remote(place)]
    else:
        found = [
            os.path.relpath(os.path.join(folder, name), place).replace(os.sep, "/")
            for folder, _, names in os.walk(place)
            for name in names
        ]
    plain = (name for name in found if ".mds" in name and not name.endswith(".tmp"))
    return {name for name in plain if not name.rpartition("/")[2].startswith(".")}


def folder_faults(folder: Path, samples: Mapping[str, int | None]) -> Iterator[str]:
    """Faults of a folder of `prepare` besides its shards. samples: of the index of each split that has one; None for a damaged
    one, which is named elsewhere."""
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        yield str(error)
        return
    if manifest is None:
        if (folder / MANIFEST).exists():
            yield f"{folder / MANIFEST}: is no manifest of `llmtrain prepare`"
        return
    for split, counts in manifest["splits"].items():
        if split not in samples:
            yield f"{folder / split}/index.json: missing"
        elif (found := samples[split]) not in (None, counts["samples"]):
            yield (
                f"{folder / split}/index.json: counts {found:,} samples, {MANIFEST} {counts['samples']:,}: one of them "
                "was changed"
            )
    digest = manifest.get("tokenizer", {}).get("digest")
    if digest:
        content = read_file(str(folder / "tokenizer/tokenizer.json"))
        if content is None:
            yield f"{folder / 'tokenizer/tokenizer.json'}: missing"
        elif hashlib.blake2b(content, digest_size=16).hexdigest() != digest:
            yield f"{folder / 'tokenizer/tokenizer.json'}: is not the one that {MANIFEST} names"
    reports = folder / REPORTS
    if (reports / SOURCES).is_file():  # or the documents were not recorded
        for id in (*manifest.get("partitions", ()), RESTS):
            try:
                if read_documents(reports, id) is None:
                    yield f"{documents_path(reports, id)}: missing"
            except PrepareError as error:
                yield str(error)
