"""The `data` section of the YAML: training and validation shards, and how to make them. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from llmtrain.config.base import PositiveInt, Problem, Section, free


class PrepareConfig(Section):
    """Settings of `llmtrain prepare`, which tokenizes text and writes MDS shards (StreamingDataset's format).

    With them in a run's YAML, `llmtrain train` makes the shards before it starts. Shards that were made from the same
    sources with the same settings are used again.
    """

    sources: Annotated[list[str], Field(min_length=1)]
    """Text files, folders of source code, JSONL (.jsonl, .gz, .zst), or `stdlib`: Python's own standard library sources."""
    out: str
    """Folder that gets tokenizer/, train/, validation/ and manifest.json."""
    tokenizer: str | None = None
    """A tokenizer folder, tokenizer.json, or hub name. null trains a byte-level BPE on the training part."""
    vocab_size: PositiveInt | None = None
    """Size of the tokenizer to train, where `tokenizer` is null."""
    seq_len: PositiveInt = 2048
    """Tokens per stored sample; documents are concatenated, each closed by the end-of-document token."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of documents (files, for text and source trees) held out, chosen by a hash of seed and name."""
    text_key: str = "text"
    """Field of a JSONL record that holds the text."""
    max_bytes: PositiveInt | None = None
    """Stop reading sources after this many bytes of text."""
    skip_bad_records: bool = False
    """Name and skip records that cannot be read, rather than stop at the first."""
    seed: int = 17
    """Seed of the split into training and validation."""
    workers: PositiveInt | None = free(None)
    """Number of processes. Default: the number of CPU cores."""

    def problems(self) -> Iterator[Problem]:
        if (self.tokenizer is None) == (self.vocab_size is None):
            yield Problem(
                "tokenizer", self.tokenizer, "give either a tokenizer, or a vocab_size to train one with, not both"
            )
        if self.vocab_size is not None and self.vocab_size < 257:
            yield Problem(
                "vocab_size",
                self.vocab_size,
                "a byte-level BPE needs at least 257 entries (256 bytes and end of document)",
            )


class StreamConfig(Section):
    """One source of MDS shards: a local folder, or a remote one cached in a local folder."""

    local: str = free()
    """Folder that holds the shards, or caches them when remote is given."""
    remote: str | None = free(None)
    """Any URL StreamingDataset reads: s3://, gs://, oci://, hf://, sftp:// or a path."""
    split: str | None = None
    """Subfolder, such as train or validation."""
    proportion: Annotated[float, Field(gt=0)] | None = None
    """Share of the mixture; give one to every stream or to none (then each stream counts by its size)."""


class SplitConfig(Section):
    """The streams of one split, by name."""

    streams: Annotated[dict[str, StreamConfig], Field(min_length=1)]

    def problems(self) -> Iterator[Problem]:
        given = [name for name, stream in self.streams.items() if stream.proportion is not None]
        if given and len(given) != len(self.streams):
            missing = ", ".join(name for name in self.streams if name not in given)
            yield Problem("streams", missing, "has no proportion while others do; give one to every stream or to none")


class DataConfig(Section):
    """Training and validation data. `train` defaults to what `prepare` writes."""

    seq_len: PositiveInt = 2048
    """Tokens per training sequence; the shards must hold samples of this length."""
    prepare: PrepareConfig | None = None
    """Make the shards first when they are not there yet."""
    train: SplitConfig | None = None
    """Training shards. Default: those that `prepare` writes."""
    validation: SplitConfig | None = None
    """Validation shards. Default: those that `prepare` writes; without either there is no validation."""
    mask_documents: bool = False
    """Keep the documents of a sequence apart: attention does not look across their boundaries, Mamba-2's state and
    convolution and learned positions begin anew, and no document's first token is predicted from the one before. The
    streams' manifest.json (or tokenizer/) says which token ends a document."""
    shuffle: bool = True
    """Read training samples in random order, another one in each epoch."""
    shuffle_seed: int = 9176
    """Seed of that order."""
    shuffle_block_size: PositiveInt | None = None
    """StreamingDataset's: samples that are shuffled together. Default: StreamingDataset's own choice."""
    num_canonical_nodes: PositiveInt = 8
    """Fixes the sample order on any number of nodes; a multiple (or divisor) of the nodes ever used."""
    num_workers: Annotated[int, Field(ge=0)] = free(2)
    """Loader processes per rank."""
    predownload: PositiveInt | None = free(None)
    """Samples to fetch ahead of training from a remote."""

    def problems(self) -> Iterator[Problem]:
        if self.train is None and self.prepare is None:
            yield Problem("train", None, "give data.train.streams, or data.prepare to make shards first")
        if self.prepare is not None and self.prepare.seq_len != self.seq_len:
            yield Problem("prepare.seq_len", self.prepare.seq_len, f"must equal data.seq_len ({self.seq_len})")

    def train_streams(self) -> dict[str, StreamConfig]:
        return self.train.streams if self.train else self._prepared("train")

    def validation_streams(self) -> dict[str, StreamConfig]:
        """Empty when there is no validation data."""
        if self.validation:
            return self.validation.streams
        return self._prepared("validation") if self.prepare and self.prepare.validation_fraction > 0 else {}

    def _prepared(self, split: str) -> dict[str, StreamConfig]:
        assert self.prepare is not None
        return {"prepared": StreamConfig(local=self.prepare.out, split=split)}
