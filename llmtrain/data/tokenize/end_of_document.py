"""The end-of-document token of the shards, as recorded in their folders. No torch here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.config.base import Problem
from llmtrain.data.partitions.prepared_folder import MANIFEST, read_manifest
from llmtrain.data.shards.index import ShardError
from llmtrain.schema.data import DataConfig, StreamConfig


class DocumentEnds(NamedTuple):
    """Tokens that end documents: the arguments of packing.document_ends."""

    eod_id: int
    begins: bool | None


def recorded_begins(manifest: dict[str, Any] | None) -> bool | None:
    """True if documents begin with the end-of-document token too, by a manifest of `llmtrain prepare`; None without one. Earlier
    versions recorded nothing, and their documents keep the borders that they had."""
    tokenizer = (manifest or {}).get("tokenizer")
    return tokenizer.get("begin_id") == tokenizer["eod_id"] if tokenizer else None


def is_chat(manifest: dict[str, Any] | None) -> bool:
    """True for shards of conversations, by a manifest of `llmtrain prepare`."""
    return manifest is not None and manifest.get("inputs", {}).get("chat") is not None


def check_documents(data: DataConfig) -> Iterator[Problem]:
    """Problems with data.mask_documents: no recorded end-of-document token, or samples that are filled and need it. None before
    data.prepare has run."""
    if data.prepare is not None:
        made = [one.out for one in data.prepare.each().values()] or [data.prepare.out]
        if not all(Path(out).expanduser().exists() for out in made):
            return
    try:
        end_of_document(data)
    except ValueError as error:
        yield Problem("data.mask_documents", data.mask_documents, str(error))


def end_of_document(data: DataConfig) -> DocumentEnds | None:
    """The end-of-document token, which all streams must share; None unless data.mask_documents is set.

    Raises ShardError for a stream without a record of it, for streams that differ, and without data.mask_documents for one whose
    samples are filled; PrepareError or TokenizerError for files that cannot be read.
    """
    if not data.mask_documents:
        for stream in (*data.train_streams().values(), *data.validation_streams().values()):
            manifest = stream_manifest(stream)
            if manifest is not None and manifest.get("inputs", {}).get("packing", "concatenate") != "concatenate":
                packing = "packed by best fit" if manifest["inputs"]["packing"] == "best_fit" else "padded"
                raise ShardError(
                    f"the samples of {stream.local} are {packing}, and filled with end-of-document tokens, which would be "
                    "trained on; set data.mask_documents: true"
                )
        return None
    found: dict[int, str] = {}
    begins: set[bool | None] = set()
    for stream in (*data.train_streams().values(), *data.validation_streams().values()):
        found.setdefault(_recorded_eod_id(stream), stream.local)
        if not is_chat(manifest := stream_manifest(stream)):  # which has marks of its own
            begins.add(recorded_begins(manifest))
    if len(found) > 1:
        which = ", ".join(f"{id} in {local}" for id, local in found.items())
        raise ShardError(f"the streams' documents end with different tokens ({which}); use shards of one tokenizer")
    return DocumentEnds(next(iter(found)), begins.pop() if len(begins) == 1 else None)


def _folders(stream: StreamConfig) -> tuple[Path, ...]:
    local = Path(stream.local).expanduser()
    return (local,) if stream.split else (local, local.parent)


def stream_manifest(stream: StreamConfig) -> dict[str, Any] | None:
    """The manifest of `llmtrain prepare` beside a stream's shards."""
    for folder in _folders(stream):
        manifest = read_manifest(folder)
        if manifest is not None and isinstance(manifest.get("tokenizer"), dict):
            return manifest
    return None


def _recorded_eod_id(stream: StreamConfig) -> int:
    local = Path(stream.local).expanduser()
    if (manifest := stream_manifest(stream)) is not None:
        if not (manifest.get("inputs", {}).get("add_eos_token", True) or is_chat(manifest)):
            raise ShardError(
                f"the documents of {local} are not closed (add_eos_token: false), so nothing tells them apart"
            )
        return manifest["tokenizer"]["eod_id"]
    for folder in _folders(stream):
        if (folder / "tokenizer").is_dir():
            from llmtrain.data.tokenize.tokenizer import load_tokenizer

            return load_tokenizer(str(folder / "tokenizer")).eod_id
    raise ShardError(
        f"neither {local / MANIFEST} nor {local / 'tokenizer'} says which token ends a document; put the tokenizer that the "
        "shards were made with there, or make them with `llmtrain prepare`"
    )
