"""`llmtrain prepare`: text sources -> tokenizer -> MDS shards.

The result depends on the sources and the settings, not on the number of processes: the text is divided into the same
units, workers only tokenise, and this process alone packs and writes, in order.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmtrain import __version__
from llmtrain.config.output_folder import atomic_folder
from llmtrain.data.corpus import CorpusWriter
from llmtrain.data.encode import EncodeSettings, encode_units
from llmtrain.data.packing import is_held_out, token_dtype
from llmtrain.data.prepared_folder import (
    MANIFEST,
    PreparedFolder,
    describe_inputs,
    find_reusable,
    fingerprint,
    lock_folder,
)
from llmtrain.data.records import DocumentPiece, Unit, read_pieces, read_units, sample_units
from llmtrain.data.source_files import PrepareError, SourceFile, list_files
from llmtrain.data.tokenizer import TextTokenizer, load_tokenizer, train_bpe
from llmtrain.progress import ByteBar
from llmtrain.schema.data import PrepareConfig

BPE_SAMPLE_BYTES = 64 << 20
"""About the most text that a tokenizer is trained on, taken evenly from the sources' training split."""
COMPRESSION_GUESS = 3
"""Text bytes per compressed byte, for the progress bar's total."""

__all__ = ["PrepareError", "PreparedFolder", "prepare"]


def prepare(config: PrepareConfig, progress: bool = True, overwrite: bool = False) -> PreparedFolder:
    """Write train/, validation/, tokenizer/ and manifest.json into `config.out`, unless the same are there already.

    Raises PrepareError (missing sources, bad records, a folder made with other settings), OutputError (no disk space) and
    TokenizerError.
    """
    out = Path(config.out).expanduser().absolute()
    files = list_files(config.sources)
    with lock_folder(out):
        inputs = describe_inputs(config, files)
        manifest = find_reusable(out, inputs, overwrite)
        if manifest is not None:
            return PreparedFolder(out, manifest, reused=True)
        with atomic_folder(out, replace=True) as folder:
            manifest = _make(config, files, inputs, folder, progress)
    return PreparedFolder(out, manifest, reused=False)


def _make(
    config: PrepareConfig, files: list[SourceFile], inputs: dict[str, Any], folder: Path, progress: bool
) -> dict[str, Any]:
    with ByteBar(progress, sum(file.size * (COMPRESSION_GUESS if file.compression else 1) for file in files)) as bar:
        bar.stage("tokenizer")
        tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else _train_tokenizer(config, files)
        tokenizer.save(folder / "tokenizer")
        writer = CorpusWriter(folder, config, tokenizer.vocab_size, tokenizer.eod_id)
        bar.stage("shards")
        settings = _encode_settings(config, tokenizer)
        for unit in encode_units(read_units(files), settings, config.workers or os.cpu_count() or 1):
            finished = writer.add(unit)
            bar.advance(unit.stored_bytes)
            if finished:
                break
        bar.stage("baselines")
        counts = writer.finish()
    manifest = {
        "fingerprint": fingerprint(inputs),
        "inputs": inputs,
        "tokenizer": {
            "vocab_size": tokenizer.vocab_size,
            "eod_token": tokenizer.eod_token,
            "eod_id": tokenizer.eod_id,
            "digest": hashlib.blake2b((folder / "tokenizer/tokenizer.json").read_bytes(), digest_size=16).hexdigest(),
        },
        "seq_len": config.seq_len,
        "dtype": token_dtype(tokenizer.vocab_size),
        **counts,
        "versions": {
            "python": platform.python_version(),
            "llmtrain": __version__,
            **{name: version(name) for name in ("mosaicml-streaming", "tokenizers", "numpy")},
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def _encode_settings(config: PrepareConfig, tokenizer: TextTokenizer) -> EncodeSettings:
    return EncodeSettings(
        tokenizer=tokenizer.backend.to_str(),
        eod_id=tokenizer.eod_id,
        text_key=config.text_key,
        seed=config.seed,
        validation_fraction=config.validation_fraction,
    )


def _train_tokenizer(config: PrepareConfig, files: list[SourceFile]) -> TextTokenizer:
    assert config.vocab_size is not None  # PrepareConfig.problems()
    return train_bpe(
        _training_texts(config, sample_units(files, BPE_SAMPLE_BYTES, config.max_bytes)), config.vocab_size
    )


def _training_texts(config: PrepareConfig, units: Iterator[Unit]) -> Iterator[str]:
    """Texts of the training split. Bad records are skipped here and reported when the shards are written."""
    for unit in units:
        for span in unit:
            for piece in read_pieces(span, config.text_key):
                if isinstance(piece, DocumentPiece) and not is_held_out(
                    piece.name, config.seed, config.validation_fraction
                ):
                    yield piece.text
