"""The `data` section of the YAML: training and validation shards, and how to make them. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from llmtrain.config.addresses import local_problem
from llmtrain.config.base import (
    ByteCount,
    DurationField,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveTokens,
    Probability,
    Problem,
    Processes,
    Section,
    Seed,
    Share,
    Tokens,
    free,
    setting_error,
)
from llmtrain.config.texts import LocalPath, PathText
from llmtrain.schema.chat import ChatSection


def stream_name(name: str) -> str:
    """The name of a stream, if it can be that of a folder beside prepare's own. Raises what a validator raises."""
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII):
        raise setting_error("is no name of letters, digits, - and _")
    if name in ("tokenizer", "train", "validation", "partitions"):
        raise setting_error("is a folder of prepare's own; give the stream another name")
    return name


StreamName = Annotated[str, AfterValidator(stream_name)]
StreamSources = Annotated[list[PathText], Field(min_length=1)]


class PrepareConfig(Section):
    """Settings of `llmtrain prepare`, which tokenizes text and writes MDS shards (StreamingDataset's format).

    With them in a run's YAML, `llmtrain train` makes the shards before it starts. Shards that were made from the same
    sources with the same settings are used again.
    """

    sources: list[PathText] = []
    """Files, folders and globs, on this machine, `s3://` or `hf://`: text, JSON lines, JSON, Parquet, Arrow (also what
    `datasets.save_to_disk` writes) and CSV, plain or compressed (gzip, zstandard, bzip2, xz), by their content; or `stdlib`:
    Python's own standard library sources; or `made-up-questions`: conversations about people who do not exist; or `made-up-sums`:
    sums of two numbers, as prompts and completions."""
    streams: Annotated[dict[StreamName, StreamSources], Field(min_length=1)] | None = None
    """In place of `sources`: the sources of each stream of a mixture, by the stream's name. Each is made in the folder of its name
    in `out`, all with one tokenizer, and is a stream of the run, which counts by its size or as `data.mixture` says."""
    out: LocalPath
    """Folder that gets tokenizer/, train/, validation/ and manifest.json."""
    tokenizer: PathText | None = None
    """A tokenizer folder, tokenizer.json, or hub name. null trains a byte-level BPE on the training part."""
    vocab_size: PositiveInt | None = None
    """Size of the tokenizer to train, where `tokenizer` is null."""
    tokenizer_engine: Literal["auto", "gigatoken", "tiktoken", "tokenizers"] = free("auto")
    """Library that encodes. auto: the fastest that is installed (`pip install 'llmtrain[fast]'`) and was proved to give the same
    tokens as `tokenizers` on a sample of the sources, special tokens spelled out among it. The shards are the same with any."""
    seq_len: PositiveInt = 2048
    """Tokens per stored sample."""
    packing: Literal["concatenate", "best_fit", "padded"] = "concatenate"
    """concatenate: documents follow one another, and samples cut them anywhere. best_fit: documents stay whole where they fit into
    a sample, and what stays empty (mostly well below 1 %) is filled; such shards need `data.mask_documents`. padded: the same with
    one document in each sample. Conversations are never cut: of them, concatenate is best_fit, and what is longer than a sample is
    cut off and counted."""
    add_bos_token: bool = False
    """Begin each document with the tokenizer's bos_token."""
    add_eos_token: bool = True
    """Close each document with the end-of-document token, the tokenizer's eos_token."""
    compression: str = "none"
    """Compression of the shards: `none`, `zstd` (level 2) or `zstd:LEVEL` (1 to 22; 3 takes up to twice the time of 2 for 2 to 4 %
    less room). `zstd` is for shards that wait in a store: a third (English) to two thirds (source code) fewer bytes to keep and to
    fetch, for about half as much CPU time again. A run keeps what it unpacks beside what is packed in a local folder, where `none`
    takes the least room."""
    validation_fraction: Probability = 0.05
    """Share of documents (files, for text and source trees) held out, chosen by a hash of seed and name."""
    validation_tokens: PositiveTokens | None = None
    """In place of `validation_fraction`: about so many tokens are held out, of each stream where there are several. The share is
    estimated from a sample."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Field or column of a record that holds the text; `a.b` is the field b of the field a."""
    chat: ChatSection | None = None
    """Records are conversations, or prompts and completions. Default: they are where the first record has no field `text_key`, but
    those of a format of `chat.format`."""
    max_bytes: ByteCount | None = None
    """Stop reading sources after this many bytes of text."""
    dedup: bool = False
    """Leave out every document whose text equals that of an earlier one, in the order of the sources; with `streams`, of an earlier
    one of the same stream. All text is read twice."""
    skip_bad_records: bool = False
    """Name and skip all records that cannot be read, rather than stop at the first."""
    max_bad: Share | None = free(None)
    """Share of the text, such as `0.1 %`, that may be set aside because it cannot be read; damaged files and records are named
    and counted, and files of a folder that are not UTF-8 with them. 0: stop at the first. Default: stop at the first that is
    damaged; files of a folder that are not UTF-8 are passed over, up to a tenth of what is found in folders."""
    seed: Seed = 17
    """Seed of the split into training and validation."""
    workers: Processes | None = free(None)
    """Number of processes. Default: the CPU cores that this process may use, or with `engine: ray` those of the cluster."""
    engine: Literal["processes", "ray"] = free("processes")
    """What makes the partitions: processes of this machine, or a Ray cluster (`pip install 'llmtrain[ray]'`), which is found by
    RAY_ADDRESS or on this machine. All its nodes need the sources, and share the folder `out`. The shards are the same."""

    def each(self) -> dict[str, PrepareConfig]:
        """Settings that make the folder of each stream; none without `streams`."""
        return {
            name: self.model_copy(update={"sources": sources, "streams": None, "out": f"{self.out}/{name}"})
            for name, sources in (self.streams or {}).items()
        }

    @property
    def fills_samples(self) -> bool:
        """True where what stays empty of a sample is filled with tokens that are not to be trained."""
        return self.packing != "concatenate"

    def sources_by_path(self) -> dict[str, str]:
        """Every source by its place in this section: sources.0, streams.web.1, ..."""
        listed = {"sources": self.sources} | {f"streams.{name}": some for name, some in (self.streams or {}).items()}
        return {f"{path}.{number}": source for path, some in listed.items() for number, source in enumerate(some)}

    def problems(self) -> Iterator[Problem]:
        if bool(self.sources) == (self.streams is not None):
            yield self.problem_at("sources", "give either sources, or streams with the sources of each, not both")
        if self.validation_tokens is not None and not self.validation_fraction:
            yield self.problem_at("validation_tokens", "has no effect with validation_fraction: 0; remove that")
        if (self.tokenizer is None) == (self.vocab_size is None):
            yield self.problem_at("tokenizer", "give either a tokenizer, or a vocab_size to train one with, not both")
        if not self.add_eos_token and self.chat is None and (self.fills_samples or not self.add_bos_token):
            reason = (
                f"packing: {self.packing} masks" if self.fills_samples else "without add_bos_token, nothing divides"
            )
            yield self.problem_at("add_eos_token", f"{reason} documents; leave it at true")
        if self.add_bos_token and self.vocab_size is not None:
            yield self.problem_at(
                "add_bos_token", "a tokenizer that is trained here has no bos_token; name a `tokenizer`"
            )
        if not re.fullmatch(r"none|zstd(:([1-9]|1[0-9]|2[0-2]))?", self.compression):
            yield self.problem_at("compression", "give zstd, zstd:LEVEL with a level from 1 to 22, or none")
        if self.vocab_size is not None and self.vocab_size < 257:
            yield self.problem_at(
                "vocab_size", "a byte-level BPE needs at least 257 entries (256 bytes and end of document)"
            )


class StreamConfig(Section):
    """One source of MDS shards: a local folder, or a remote one cached in a local folder."""

    local: PathText = free()
    """Folder that holds the shards, or caches them when remote is given."""
    remote: PathText | None = free(None)
    """Any URL StreamingDataset reads: s3://, gs://, oci://, hf://, sftp:// or a path."""
    split: PathText | None = None
    """Subfolder, such as train or validation."""
    proportion: PositiveFloat | None = None
    """Share of the mixture; give one to every stream or to none (then each stream counts by its size)."""
    repeats: PositiveFloat | None = None
    """In place of a proportion: how often an epoch reads the stream, such as 2 or 0.5. Default: once."""
    tokens: PositiveTokens | None = None
    """In place of a proportion: tokens of the stream that an epoch reads, such as 5e9; rounded to whole samples."""

    @property
    def is_budget(self) -> bool:
        """True where an epoch reads another part of the stream than all of it once."""
        return self.repeats is not None or self.tokens is not None

    def problems(self) -> Iterator[Problem]:
        given = [name for name in ("proportion", "repeats", "tokens") if getattr(self, name) is not None]
        if len(given) > 1:
            yield Problem(given[1], getattr(self, given[1]), f"is given beside {given[0]}; give one of them")
        if local_problem(self.local):
            yield self.problem_at("local", "is an address: give it as `remote`, and here a folder that caches it")


class SplitConfig(Section):
    """The streams of one split, by name."""

    streams: Annotated[dict[str, StreamConfig], Field(min_length=1)]

    def problems(self) -> Iterator[Problem]:
        given = [name for name, stream in self.streams.items() if stream.proportion is not None]
        if given and len(given) != len(self.streams):
            missing = ", ".join(name for name in self.streams if name not in given)
            yield Problem("streams", missing, "has no proportion while others do; give one to every stream or to none")


class MixturePhase(Section):
    """A part of the run: how the streams are mixed in it, by proportions, tokens or repeats, and where it ends."""

    until: DurationField | None = None
    """Where the next phase begins, counted from the start of the run, in steps or tokens. A phase of tokens or repeats has none,
    it ends when they are read; nor has the last phase."""
    proportions: Annotated[dict[str, NonNegativeFloat], Field(min_length=1)] | None = None
    """Share of each stream, by name, in any scale; 0 leaves a stream out."""
    tokens: Annotated[dict[str, Tokens], Field(min_length=1)] | None = None
    """Tokens to read of each stream in this phase, by name, such as 5e9; their sum is rounded to whole steps."""
    repeats: Annotated[dict[str, NonNegativeFloat], Field(min_length=1)] | None = None
    """How often to read each stream in this phase, by name, such as 2 or 0.5; the sum is rounded to whole steps."""

    @property
    def given(self) -> dict[str, dict[str, float]]:
        """Shares of each stream under the name of their setting; of one setting, in a valid config."""
        named = {"proportions": self.proportions, "tokens": self.tokens, "repeats": self.repeats}
        return {name: dict(value) for name, value in named.items() if value is not None}

    @property
    def shares(self) -> dict[str, float]:
        """Proportions, tokens or repeats of each stream."""
        return next(iter(self.given.values()))

    @property
    def is_budget(self) -> bool:
        return self.proportions is None

    def problems(self) -> Iterator[Problem]:
        if len(self.given) != 1:
            found = ", ".join(self.given) or None
            yield Problem("proportions", found, "give one of proportions, tokens and repeats")
            return
        if self.until is not None and self.is_budget:
            yield self.problem_at("until", f"a phase of {next(iter(self.given))} ends when they are read; remove it")
        elif self.until is not None and self.until.unit not in ("steps", "tokens"):
            yield self.problem_at("until", "give steps or tokens: the order must not depend on the run's length")
        elif self.until is not None and self.until.value <= 0:
            yield self.problem_at("until", "must be positive")
        if not any(self.shares.values()):
            yield Problem(next(iter(self.given)), None, "all are 0; at least one stream must be read")


SampleOrderName = Literal["seekable", "streaming"]


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
    shuffle_seed: Seed = 9176
    """Seed of that order."""
    shuffle_block_size: PositiveInt | None = None
    """StreamingDataset's: samples that are shuffled together. Default: StreamingDataset's own choice."""
    order: SampleOrderName | None = free(None)
    """seekable: computed position by position, with neither time at the start nor memory for it; streaming: StreamingDataset's
    own, which builds a list of the whole epoch at every start: a minute for ten million samples. Default: seekable; a run that
    began with the other one keeps it."""
    mixture: list[MixturePhase] | None = None
    """Phases of the run that mix the training streams by other proportions, or read so many tokens or repeats of each, in place of
    the streams' own `proportion`, `tokens` and `repeats`. A stream is read without repetition until all of it was, whatever its
    share is at the time. A run that is resumed may change what comes later."""
    stratified: bool = False
    """Spread each stream evenly over the samples instead of at random, so that every batch has about the same mixture."""
    num_canonical_nodes: PositiveInt = 8
    """Fixes the sample order on any number of nodes; a multiple (or divisor) of the nodes ever used."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = free(2)
    """Loader processes per rank."""
    predownload: PositiveInt | None = free(None)
    """Samples to fetch ahead of training from a remote."""
    cache_limit: ByteCount | None = free(None)
    """Most bytes of shards that a node keeps in its local folders, beside up to three for each loader process, which it fetches at
    once; the ones read longest ago are deleted. At least the indexes and four of the largest shard, or one for each loader process.
    Only for streams with a remote. Default: no limit."""
    download_retries: Annotated[int, Field(ge=0, le=100)] = free(4)
    """Further attempts to download a shard after one has failed."""
    download_timeout: Annotated[float, Field(gt=0, le=86400)] = free(120.0)
    """Seconds after which a download has failed."""

    def problems(self) -> Iterator[Problem]:
        if self.train is None and self.prepare is None:
            yield Problem("train", None, "give data.train.streams, or data.prepare to make shards first")
        if self.seq_len == 1:
            yield self.problem_at("seq_len", "leaves no token to predict from another; use 2 or more")
        if self.prepare is not None and self.prepare.seq_len != self.seq_len:
            yield self.problem_at("prepare.seq_len", f"must equal data.seq_len ({self.seq_len})")
        if self.prepare is not None and self.prepare.fills_samples and not self.mask_documents:
            packing = self.prepare.packing
            yield self.problem_at("mask_documents", f"data.prepare.packing: {packing} fills samples; set this to true")
        if self.cache_limit is not None and (
            kept := [name for name, stream in self.train_streams().items() if stream.remote is None]
        ):
            yield self.problem_at(
                "cache_limit", f"deletes shards that can be downloaded again, but stream {kept[0]} has no remote"
            )
        yield from self._mixture_problems()
        for name, stream in self.validation.streams.items() if self.validation else ():
            if stream.is_budget:
                key = "repeats" if stream.tokens is None else "tokens"
                path = f"validation.streams.{name}.{key}"
                yield Problem(
                    path, getattr(stream, key), "is of training; validation reads all of a stream, or eval.max_samples"
                )

    def _mixture_problems(self) -> Iterator[Problem]:
        streams = self.train_streams() if self.train or self.prepare else {}
        weighted = [name for name, one in streams.items() if one.proportion is not None or one.is_budget]
        budgets = [name for name, one in streams.items() if one.is_budget]
        if self.stratified and self.mixture is None and not weighted:
            yield self.problem_at("stratified", "has an effect on a mixture alone; give proportions, or leave it out")
        if self.order == "streaming" and (self.mixture is not None or self.stratified or budgets):
            wanted = (
                "mixture" if self.mixture is not None else "stratified" if self.stratified else "tokens and repeats"
            )
            yield self.problem_at("order", f"is StreamingDataset's, which has no data.{wanted}; leave it out")
        if self.mixture is None:
            return
        if not self.mixture:
            yield Problem("mixture", None, "is empty; leave it out, or give a phase")
        for number, phase in enumerate(self.mixture):
            [(key, shares)] = phase.given.items()
            for name in sorted(shares.keys() ^ streams.keys()):
                known = "is missing; 0 leaves a stream out" if name in streams else "is no stream of data.train"
                yield Problem(f"mixture.{number}.{key}.{name}", None, known)
            last = number == len(self.mixture) - 1
            if not phase.is_budget and (phase.until is None) != last:
                wrong = "missing; only the last phase has none" if phase.until is None else "the last phase has none"
                yield Problem(f"mixture.{number}.until", phase.until and str(phase.until), wrong)
        for name in weighted:
            stream = streams[name]
            key = next(key for key in ("proportion", "tokens", "repeats") if getattr(stream, key) is not None)
            yield Problem(
                f"train.streams.{name}.{key}", getattr(stream, key), "has no effect beside data.mixture; remove it"
            )

    @property
    def chosen_order(self) -> SampleOrderName:
        return self.order or "seekable"

    @property
    def order_name(self) -> str:
        """The name of the order in checkpoints; a run goes on in the order of this name alone."""
        if self.chosen_order == "streaming":
            return "streaming"
        streams = self.train_streams().values()
        weighted = self.mixture is not None or any(one.proportion is not None or one.is_budget for one in streams)
        return "mixed" if weighted and len(streams) > 1 else "seekable"

    def in_order_of(self, position: Mapping[str, Any]) -> DataConfig:
        """The data of a run that continues from a position that `data.order: null` leaves at the order that it began with."""
        began = position.get("order", "streaming")  # before there were others
        needs_seekable = self.mixture is not None or self.stratified
        if self.order is not None or began != "streaming" or needs_seekable:
            return self
        return self.model_copy(update={"order": "streaming"})

    def train_streams(self) -> dict[str, StreamConfig]:
        return self.train.streams if self.train else self._prepared("train")

    def validation_streams(self) -> dict[str, StreamConfig]:
        """Empty when there is no validation data."""
        if self.validation:
            return self.validation.streams
        return self._prepared("validation") if self.prepare and self.prepare.validation_fraction > 0 else {}

    def _prepared(self, split: str) -> dict[str, StreamConfig]:
        assert self.prepare is not None
        if each := self.prepare.each():
            return {name: StreamConfig(local=one.out, split=split) for name, one in each.items()}
        return {"prepared": StreamConfig(local=self.prepare.out, split=split)}
