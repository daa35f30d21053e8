"""Statistics of stored tokens, source by source: documents, their lengths, bytes per token, how often each token occurs.

Shards are read one after the other. Memory: one shard, one partition's documents, and a counter per token and source.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.partitions.merge import RESTS
from llmtrain.data.partitions.prepared_folder import REPORTS
from llmtrain.data.partitions.provenance import DocumentTable, PartitionDocuments, Sources, read_documents, read_sources
from llmtrain.data.shards.packing import document_ends
from llmtrain.data.shards.stored_stream import StoredStream
from llmtrain.data.tokenize.end_of_document import DocumentEnds
from llmtrain.data.tokenize.tokenizer import TextTokenizer

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_EXACT = 1 << 16
_PER_OCTAVE = 64
_BINS = _EXACT + 48 * _PER_OCTAVE


class Lengths:
    """Distribution of lengths: exact below 65,536, within 1 % above."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self.count = self.total = self.longest = 0
        self.shortest: int | None = None

    def add(self, lengths: NDArray[np.int64]) -> None:
        if not len(lengths):
            return
        long = lengths >= _EXACT
        bins = lengths.copy()
        bins[long] = _EXACT + (np.log2(lengths[long] / _EXACT) * _PER_OCTAVE).astype(np.int64)
        self._counts += np.bincount(bins, minlength=_BINS)
        self.count += len(lengths)
        self.total += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max()))
        self.shortest = min(int(lengths.min()), self.longest if self.shortest is None else self.shortest)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> int | None:
        """The length that so large a share of the documents does not exceed."""
        if not self.count:
            return None
        found = int(np.searchsorted(np.cumsum(self._counts), share * self.count))
        return min(_length_of(found), self.longest)

    def bars(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """(edges [n + 1], documents [n]) of a histogram with four bars per octave."""
        lengths = np.array([_length_of(number) for number in np.flatnonzero(self._counts)], np.float64)
        edges = 2.0 ** (np.arange(0, 4 * 48 + 1) / 4)
        counts, _ = np.histogram(np.maximum(lengths, 1), edges, weights=self._counts[self._counts > 0])
        used = np.flatnonzero(counts)
        low, high = (used[0], used[-1] + 1) if len(used) else (0, 1)
        return edges[low : high + 1], counts[low:high].astype(np.int64)


def _length_of(number: int) -> int:
    return int(number) if number < _EXACT else round(_EXACT * 2 ** ((number - _EXACT + 0.5) / _PER_OCTAVE))


@dataclass
class SourceStatistics:
    """Statistics of one source. tokens, text_bytes: of its documents, end-of-document tokens included; None where neither the
    partitions nor the manifest say. counts: number of times each token is stored, [largest token + 1]."""

    name: str
    documents: int | None = None
    tokens: int | None = None
    text_bytes: int | None = None
    lengths: Lengths = field(default_factory=Lengths)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def stored(self) -> int:
        """Tokens in the shards."""
        return int(self.counts.sum())

    def count(self, tokens: NDArray) -> None:
        found = np.bincount(tokens.ravel(), minlength=len(self.counts))
        found[: len(self.counts)] += self.counts
        self.counts = found

    def add_documents(self, tokens: NDArray[np.int64]) -> None:
        """Count documents of so many tokens each."""
        self.documents = (self.documents or 0) + len(tokens)
        self.tokens = (self.tokens or 0) + int(tokens.sum())
        self.lengths.add(tokens)

    def most_frequent(self, number: int) -> list[tuple[int, int]]:
        """(token, times) of the tokens that are stored most often."""
        order = np.argsort(-self.counts, kind="stable")[:number]
        return [(int(token), int(self.counts[token])) for token in order if self.counts[token]]

    def described(self, tokenizer: TextTokenizer | None, top: int) -> dict[str, Any]:
        """All of it as JSON."""
        lengths = self.lengths
        special = special_tokens(tokenizer)
        shares = {
            text: int(self.counts[id]) / max(self.stored, 1) for id, text in special.items() if id < len(self.counts)
        }
        return {
            "name": self.name,
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "bytes_per_token": self.text_bytes / self.tokens if self.text_bytes and self.tokens else None,
            "stored_tokens": self.stored,
            "distinct_tokens": int((self.counts > 0).sum()),
            "tokens_per_document": {
                "shortest": lengths.shortest,
                "mean": lengths.mean,
                "longest": lengths.longest if lengths.count else None,
                **{f"{100 * share:g}%": lengths.quantile(share) for share in QUANTILES},
            },
            "special_tokens": {text: share for text, share in shares.items() if share},
            "most_frequent": [
                {"token": id, "text": tokenizer and tokenizer.decode([id]), "share": times / max(self.stored, 1)}
                for id, times in self.most_frequent(top)
            ],
        }


def special_tokens(tokenizer: TextTokenizer | None) -> dict[int, str]:
    """The special tokens, by id; none without a tokenizer."""
    if tokenizer is None:
        return {}
    added = tokenizer.backend.get_added_tokens_decoder()
    return {id: token.content for id, token in added.items() if token.special} | {tokenizer.eod_id: tokenizer.eod_token}


def stream_statistics(
    stream: StoredStream, ends: DocumentEnds | None, counts: dict[str, int] | None, advance: Callable[[int], None]
) -> list[SourceStatistics]:
    """Statistics of each source of a stream; of a stream that does not record its documents, of all of it.

    ends: of documents; lengths of such a stream need them. counts: of its split, in the manifest. advance: called with the
    samples of each shard that was read. Raises ShardError for a shard that is damaged.
    """
    sources = read_sources(stream.root / REPORTS) if stream.root is not None else None
    if sources is None:
        return [_undivided(stream, ends, counts, advance)]
    return _by_source(stream, sources, advance)


def _undivided(
    stream: StoredStream, ends: DocumentEnds | None, counts: dict[str, int] | None, advance: Callable[[int], None]
) -> SourceStatistics:
    found = SourceStatistics(stream.name)
    if counts is not None:
        found.documents, found.tokens, found.text_bytes = (counts[name] for name in ("documents", "tokens", "bytes"))
    open_tokens = 0
    for number in range(len(stream.index.shards)):
        tokens = stream.tokens(number)
        found.count(tokens)
        if ends is not None:
            places = np.flatnonzero(document_ends(tokens.ravel(), *ends)) + 1
            found.lengths.add(np.diff(places, prepend=-open_tokens))
            open_tokens = tokens.size - int(places[-1]) if len(places) else open_tokens + tokens.size
        advance(len(tokens))
    if found.documents is None and ends is not None:
        found.documents = found.lengths.count
    return found


def _by_source(stream: StoredStream, sources: Sources, advance: Callable[[int], None]) -> list[SourceStatistics]:
    found = [SourceStatistics(name, 0, 0, 0) for name in sources.names]
    assert stream.root is not None
    reports = stream.root / REPORTS
    shards: dict[str, list[int]] = defaultdict(list)
    for number, shard in enumerate(stream.index.shards):
        shards[shard["raw_data"]["basename"].partition(".")[0]].append(number)
    long = _LongDocument()
    for partition, of_slice in sources.partitions.items():
        documents = read_documents(reports, partition)
        if documents is None or stream.split not in documents.tables:
            continue
        table = documents.tables[stream.split]
        if partition != RESTS:
            for source, part in zip(of_slice, documents.slices, strict=True):
                found[source].text_bytes = (found[source].text_bytes or 0) + part.text_bytes[stream.split]
            if not long.takes(found, documents, of_slice, table):
                _count_documents(found, of_slice, table)
        of_document, layout = np.array(of_slice, np.int32)[table.slices], documents.layout(stream.split)
        of_token = np.repeat(np.append(of_document, np.int32(-1))[layout.documents], layout.tokens)
        done = 0
        for number in shards[partition]:
            tokens = stream.tokens(number).ravel()
            _count_tokens(found, tokens, of_token[done : done + len(tokens)])
            done += len(tokens)
            advance(stream.index.shards[number]["samples"])
    long.end(found)
    return [one for one in found if one.documents]


def _count_documents(found: list[SourceStatistics], of_slice: list[int], table: DocumentTable) -> None:
    of_document = np.array(of_slice, np.int64)[table.slices]
    for source in np.unique(of_document):
        found[source].add_documents(table.tokens[of_document == source])


def _count_tokens(found: list[SourceStatistics], tokens: NDArray, sources: NDArray[np.int32]) -> None:
    """Count the tokens of a shard by their sources; -1 stands for padding."""
    for source in np.unique(sources[np.flatnonzero(np.diff(sources, prepend=-1))]):
        if source >= 0:
            found[source].count(tokens[sources == source])


class _LongDocument:
    """A text file that is one document of several partitions."""

    def __init__(self) -> None:
        self._source, self._tokens = 0, 0

    def takes(
        self, found: list[SourceStatistics], documents: PartitionDocuments, of_slice: list[int], table: DocumentTable
    ) -> bool:
        """True if a partition is all of one text file, or a part of one: it is counted here."""
        if not len(table.tokens):
            return True
        is_text = len(documents.slices) == 1 and documents.slices[0].unit == "file"
        if not is_text or documents.slices[0].begin == 0:
            self.end(found)
        if is_text:
            self._source, self._tokens = of_slice[0], self._tokens + int(table.tokens.sum())
        return is_text

    def end(self, found: list[SourceStatistics]) -> None:
        if self._tokens:
            found[self._source].add_documents(np.array([self._tokens]))
            self._tokens = 0
