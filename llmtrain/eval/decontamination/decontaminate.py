"""Contamination: overlap of n-grams between training data and the documents of tasks.

An n-gram is n tokens (13 by default) of the training data's own tokenizer, so shards are compared without decoding them: some
20 million tokens a second on one core. A document counts as hit if one of its n-grams occurs anywhere in the data:
verbatim text of about ten words. Text that differs in case or punctuation is not found; nor is an n-gram that spans two
samples of the shards. Documents of fewer than n tokens cannot be checked and are counted separately.
(13-grams as in Brown et al. 2020, arXiv:2005.14165, appendix C, there of words.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.loader.permutation import mix
from llmtrain.data.shards.index import TOKEN_COLUMNS
from llmtrain.data.sources.files import PrepareError, list_files
from llmtrain.data.sources.records import BadRecord, SetAside, read_slice, whole
from llmtrain.data.sources.token_kinds import token_kind
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.tasks.documents import AnyDocument
from llmtrain.eval.tasks.sources import open_mds, read_mds

_ROOT = np.uint64(0x9E3779B97F4A7C15)


def ngram_hashes(ids: NDArray, n: int) -> NDArray[np.uint64]:
    """64-bit hashes of the windows of n tokens. ids: [t] -> [max(t - n + 1, 0)]

    A false match has a chance of (set's n-grams x stream's tokens) / 2^64: one in 700 for a million against 26 billion.
    """
    count = len(ids) - n + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    mixed = mix(ids.astype(np.uint64))
    total = np.zeros(count, np.uint64)
    for i in range(n):
        total *= _ROOT
        total += mixed[i : i + count]
    return mix(total)


class NgramSet:
    """Set of n-gram hashes. hashes: sorted, each once."""

    def __init__(self, hashes: NDArray[np.uint64]):
        self.hashes = np.unique(hashes)
        # Most windows of the stream are not in the set: a table of hash prefixes filters them before the binary search.
        bits = max(16, int(np.ceil(np.log2(max(len(self.hashes), 1)))) + 4)
        self._mask = np.uint64((1 << bits) - 1)
        self._table = np.zeros(1 << bits, bool)
        self._table[self.hashes & self._mask] = True

    def find(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """(positions in `hashes`, indices in self.hashes) of all hashes that are in the set."""
        positions = np.flatnonzero(self._table[hashes & self._mask])
        if not len(positions) or not len(self.hashes):
            return np.zeros(0, np.intp), np.zeros(0, np.intp)
        wanted = hashes[positions]
        members = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
        equal = self.hashes[members] == wanted
        return positions[equal], members[equal]


_SEPARATOR = np.uint64(1 << 62)
"""Token between samples that are searched together; no document contains it."""
_BATCH = 1 << 16
"""Tokens searched at a time; twice as fast as batches that exceed the processor's cache."""

Progress = Callable[[int, int], None]
"""progress(done, total): samples of shards, or bytes of text files."""


@dataclass(frozen=True)
class Sample:
    """Tokens of some training text. where: shard:row, or a file. done, total: progress."""

    where: str
    ids: NDArray
    done: int
    total: int


@dataclass(frozen=True)
class Hit:
    """One document found in the training data.

    document: its file and line. text: one of its n-grams. found: location of this n-gram in the data. share: part of its n-grams
    that occur anywhere in the data.
    """

    document: str
    text: str
    found: str
    share: float


@dataclass(frozen=True)
class Overlap:
    """Overlap of one task. checked: documents of at least n tokens; hits: those found, by falling share."""

    task: str
    documents: int
    checked: int
    hits: list[Hit] = field(repr=False)

    @property
    def share(self) -> float:
        """Share of the checked documents that were hit."""
        return len(self.hits) / self.checked if self.checked else 0.0


def decontaminate(
    tasks: Mapping[str, Sequence[AnyDocument]],
    samples: Iterable[Sample],
    tokenizer: TextTokenizer,
    *,
    n: int = 13,
    progress: Progress | None = None,
) -> list[Overlap]:
    """Overlap of each task with `samples` (`mds_samples`, `text_samples`). Memory: the documents' n-grams and a batch of samples.

    Raises EvalError for an n below 2, and for one that no document is long enough for.
    """
    if n < 2:
        raise EvalError(f"n-grams of {n} tokens say nothing; give at least 2")
    index = _Index(tasks, tokenizer, n)
    if 0 < index.longest < n:
        raise EvalError(
            f"n-grams of {n} tokens: the longest document has {index.longest}, so none could be checked; give a smaller n"
        )
    for batch in _batches(samples):
        index.search(batch)
        if progress:
            progress(batch[-1].done, batch[-1].total)
    return index.report()


def mds_samples(folder: str | Path, tokenizer: TextTokenizer) -> Iterator[Sample]:
    """All samples of a folder of MDS shards, of tokens (llmtrain's) or of text."""
    path = Path(folder).expanduser()
    total = open_mds(path).index.samples
    for done, (shard, row, columns) in enumerate(read_mds(path), 1):
        name = next((name for name in (*TOKEN_COLUMNS, "text") if name in columns), None)
        if name is None:
            raise EvalError(f"{path}: the shards have neither tokens nor text (columns: {', '.join(columns)})")
        ids = tokenizer.encode(columns["text"]) if name == "text" else columns[name]
        yield Sample(f"{path / shard}:{row}", np.asarray(ids), done, total)


def text_samples(paths: Sequence[str | Path], tokenizer: TextTokenizer, text_key: str = "text") -> Iterator[Sample]:
    """Documents of the texts and records that `llmtrain prepare` reads. Raises EvalError for files of token ids and for what
    cannot be read, but not for files of a folder that are no text."""
    try:
        files = list_files([str(path) for path in paths])
        total, done = sum(file.size for file in files), 0
        for file in files:
            if token_kind(file.path, file.from_folder):
                raise EvalError(
                    f"{file.path} holds token ids; turn it into shards with `llmtrain prepare`, and name their folder"
                )
            try:
                for piece in read_slice(whole(file), text_key):
                    if isinstance(piece, BadRecord):
                        raise EvalError(str(piece))
                    ids = np.asarray(tokenizer.encode(piece.text))
                    yield Sample(f"{file.path} ({piece.name})", ids, done, total)
            except SetAside as error:
                if error.bad.fatal:
                    raise EvalError(str(error)) from None
            done += file.size
    except PrepareError as error:
        raise EvalError(str(error)) from None


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    batch, size = [], 0
    for sample in samples:
        batch.append(sample)
        size += len(sample.ids) + 1
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Index:
    """N-grams of the documents, and the first location of each in the data."""

    def __init__(self, tasks: Mapping[str, Sequence[AnyDocument]], tokenizer: TextTokenizer, n: int):
        self._tasks, self._tokenizer, self._n = tasks, tokenizer, n
        self.longest = 0
        """Tokens of the longest document."""
        self._hashes = {name: [self._hash(document) for document in documents] for name, documents in tasks.items()}
        everything = [one for group in self._hashes.values() for one in group]
        self._set = NgramSet(np.concatenate(everything) if everything else np.zeros(0, np.uint64))
        self._seen: dict[int, str] = {}
        """First location in the data, by index of the n-gram in the set."""

    def _ids(self, document: AnyDocument) -> NDArray:
        return np.asarray(self._tokenizer.encode(document.text), np.int64)

    def _hash(self, document: AnyDocument) -> NDArray[np.uint64]:
        ids = self._ids(document)
        self.longest = max(self.longest, len(ids))
        return ngram_hashes(ids, self._n)

    def search(self, batch: list[Sample]) -> None:
        parts = [part for sample in batch for part in (sample.ids.astype(np.uint64), [_SEPARATOR])]
        starts = np.cumsum([0] + [len(sample.ids) + 1 for sample in batch])
        positions, members = self._set.find(ngram_hashes(np.concatenate(parts).astype(np.uint64), self._n))
        members, first = np.unique(members, return_index=True)
        for member, position in zip(members.tolist(), positions[first].tolist(), strict=True):
            if member not in self._seen:
                self._seen[member] = batch[int(np.searchsorted(starts, position, "right")) - 1].where

    def report(self) -> list[Overlap]:
        return [self._overlap(name) for name in self._tasks]

    def _overlap(self, task: str) -> Overlap:
        documents, hits, checked = self._tasks[task], [], 0
        for document, hashes in zip(documents, self._hashes[task], strict=True):
            checked += len(hashes) > 0
            members = np.searchsorted(self._set.hashes, hashes).tolist()
            seen = [at for at, member in enumerate(members) if member in self._seen]
            if seen:
                text = self._tokenizer.decode(self._ids(document)[seen[0] : seen[0] + self._n].tolist())
                hits.append(Hit(document.where, text, self._seen[members[seen[0]]], len(seen) / len(members)))
        hits.sort(key=lambda hit: -hit.share)
        return Overlap(task, len(documents), checked, hits)
