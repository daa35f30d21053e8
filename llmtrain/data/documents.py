"""Which token ends a document of the shards, as the folders they came with record it. No torch here."""

from __future__ import annotations

from pathlib import Path

from llmtrain.config.data import DataConfig, StreamConfig
from llmtrain.data.prepared import MANIFEST, read_manifest
from llmtrain.data.shards import ShardError


def end_of_document(data: DataConfig) -> int | None:
    """Its id, which all streams must share; None unless the documents are to be kept apart.

    Raises ShardError for a stream that does not say, and for streams that differ; PrepareError for a damaged manifest.
    """
    if not data.mask_documents:
        return None
    ids: dict[int, str] = {}
    for stream in (*data.train_streams().values(), *data.validation_streams().values()):
        ids.setdefault(_recorded(stream), stream.local)
    if len(ids) > 1:
        found = ", ".join(f"{id} in {local}" for id, local in ids.items())
        raise ShardError(
            f"the streams' documents end with different tokens ({found}); use shards of one tokenizer, or set "
            "data.mask_documents: false"
        )
    return next(iter(ids))


def _recorded(stream: StreamConfig) -> int:
    local = Path(stream.local).expanduser()
    for folder in (local,) if stream.split else (local, local.parent):
        tokenizer = (read_manifest(folder) or {}).get("tokenizer")
        if isinstance(tokenizer, dict) and isinstance(tokenizer.get("eod_id"), int):
            return tokenizer["eod_id"]
        if (folder / "tokenizer").is_dir():
            from llmtrain.data.tokenizer import load_tokenizer

            return load_tokenizer(str(folder / "tokenizer")).eod_id
    raise ShardError(
        f"neither {local / MANIFEST} nor {local / 'tokenizer'} says which token ends a document; put the tokenizer that the "
        "shards were made with there, prepare the text with `llmtrain prepare`, or set data.mask_documents: false"
    )
