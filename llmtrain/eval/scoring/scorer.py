"""What answers requests: the interface, and a HybridLM behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.eval.scoring.batching import Limits, Rows, rows_of
from llmtrain.eval.scoring.generation import generate_greedily
from llmtrain.eval.scoring.overlap import idle
from llmtrain.eval.scoring.packed import read_packs
from llmtrain.eval.scoring.packing import Packs, Segment, packs_of
from llmtrain.eval.scoring.prefix_plan import Batch, Family, Plan, Tail, make_plan
from llmtrain.eval.scoring.request import Generate, Generated, Score, Scored
from llmtrain.models.cache import Cache
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.loss import IGNORE, TokenScores

Progress = Callable[[int], None]
"""Told how many more requests are done."""


class Scorer(Protocol):
    """Answers do not depend on which requests come together."""

    window: int
    """Tokens it can read."""
    limits: Limits

    def score(
        self,
        requests: Sequence[Score],
        progress: Progress = ...,
        *,
        window: int | None = None,
        meanwhile: Callable[[], bool] = ...,
    ) -> list[Scored]:
        """In order. window: read no more than so many tokens; contexts lose their left end. meanwhile: may be called while a
        GPU is at work, does some other work, and says whether there was any.

        Raises EvalError for an empty context, and for a continuation that does not fit.
        """
        ...

    def generate(self, requests: Sequence[Generate], progress: Progress = ...) -> list[Generated]:
        """In order, greedily. Raises EvalError for more new tokens than fit the window."""
        ...


def nothing(done: int) -> None:
    """Progress that nobody watches."""


class HybridScorer:
    """Reads what requests have in common once: in one packed sequence, or, where the model cannot, into a cache.

    max_batch_tokens: read at a time, padding included. share: False reads every request whole. packed: default where the
    model can and a GPU serves. end_ids: tokens beside the tokenizer's end-of-document one that end an answer.
    """

    def __init__(
        self,
        model: HybridLM,
        tokenizer: TextTokenizer,
        *,
        max_length: int | None = None,
        max_batch_tokens: int | None = None,
        share: bool = True,
        packed: bool | None = None,
        end_ids: Collection[int] = (),
    ):
        self.model, self.tokenizer, self.share, self.end_ids = model, tokenizer, share, end_ids
        self.window = max_length or model.config.max_seq_len
        self.device = model.embed.weight.device
        self.limits = limits_for(model, max_batch_tokens)
        self.packed = share and (self.device.type == "cuda" and model.no_trees() is None if packed is None else packed)
        self.plan: Plan | Packs = Plan([])
        """Of the last call of `score`."""

    def score(
        self,
        requests: Sequence[Score],
        progress: Progress = nothing,
        *,
        window: int | None = None,
        meanwhile: Callable[[], bool] = idle,
    ) -> list[Scored]:
        rows = rows_of(requests, min(window or self.window, self.window))
        users: list[int] = [0] * len(rows.rows)
        for place in rows.place:
            users[place] += 1
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows.rows)
        with reading():
            for row, score in self._read(rows, meanwhile):
                found[row] = score
                progress(users[row])
        return [
            Scored(*found[place], tokens=rows.rows[place].scored, truncated=truncated)
            for place, truncated in zip(rows.place, rows.truncated, strict=True)
        ]

    def generate(self, requests: Sequence[Generate], progress: Progress = nothing) -> list[Generated]:
        return generate_greedily(self.model, self.tokenizer, requests, self.window, self.limits, progress, self.end_ids)

    def _read(self, rows: Rows, meanwhile: Callable[[], bool]) -> Iterator[tuple[int, tuple[float, bool]]]:
        if self.packed:
            yield from read_packs(self.model, rows.rows, self._packs(rows), meanwhile)
            return
        self.plan = make_plan(rows, self.limits, window=self.window, share=self.share)
        for family in self.plan.families:
            yield from self._read_family(self.plan, family)

    def _packs(self, rows: Rows) -> Iterator[list[Segment]]:
        self.plan = plan = Packs(rows.rows)
        for pack in packs_of(rows, self.limits.tokens):
            plan.packs.append(pack)
            yield pack

    def _read_family(self, plan: Plan, family: Family) -> Iterator[tuple[int, tuple[float, bool]]]:
        trunk = None
        if family.trunk:
            trunk = Cache(self.model, 1, len(family.trunk))
            self._fill(trunk, [family.trunk])
        for batch in family.batches:
            if batch.ends:
                yield from self._read_ends(plan, batch)
                continue
            cache = self._read_prefixes(batch, trunk) if batch.prefixes else trunk
            for piece in batch.pieces:
                yield from self._read_piece(plan, piece, cache)

    def _read_ends(self, plan: Plan, batch: Batch) -> Iterator[tuple[int, tuple[float, bool]]]:
        cache = Cache(self.model, len(batch.prefixes), max(map(len, batch.prefixes)))
        ids, padding = self._padded(batch.prefixes)
        logits = self.model(ids, cache=cache, padding=padding)  # [prefixes, vocab_size]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        rows = [row for row, _ in batch.ends]
        parents = self._tensor([parent for _, parent in batch.ends])
        labels = self._tensor([plan.rows[row].tokens[-1] for row in rows])
        scores = logits[parents, labels] - logits.logsumexp(dim=-1)[parents]
        greedy = logits.argmax(dim=-1)[parents] == labels
        yield from zip(rows, zip(scores.tolist(), greedy.tolist(), strict=True), strict=True)

    def _read_prefixes(self, batch: Batch, trunk: Cache | None) -> Cache:
        width = max(map(len, batch.prefixes))
        if trunk is None:
            cache = Cache(self.model, len(batch.prefixes), width)
        else:
            cache = trunk.take(self._tensor([0] * len(batch.prefixes)), trunk.length + width)
        self._fill(cache, batch.prefixes)
        return cache

    def _fill(self, cache: Cache, prefixes: Sequence[Sequence[int]]) -> None:
        ids, padding = self._padded(prefixes)
        nothing_scored = torch.full_like(ids, IGNORE)  # without labels, it would compute logits
        self.model(ids, nothing_scored, cache=cache, padding=padding)

    def _read_piece(
        self, plan: Plan, piece: Sequence[Tail], before: Cache | None
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        width = max(len(tail.tokens) for tail in piece)
        ids, labels = [], []
        for tail in piece:
            row, padding = plan.rows[tail.row], width - len(tail.tokens)
            ids.append([*tail.tokens, *[0] * padding])
            labels.append(
                [*[IGNORE] * (len(tail.tokens) - row.scored), *row.tokens[-row.scored :], *[IGNORE] * padding]
            )
        if before is None:
            cache = Cache(self.model, len(piece), width)
        else:
            cache = before.take(self._tensor([tail.parent for tail in piece]), before.length + width)
        scores = self.model(self._tensor(ids), self._tensor(labels), cache=cache)
        assert isinstance(scores, TokenScores)
        sums, greedy = scores.log_likelihood.double().sum(dim=1), scores.greedy.all(dim=1)
        yield from zip((tail.row for tail in piece), zip(sums.tolist(), greedy.tolist(), strict=True), strict=True)

    def _padded(self, prefixes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Ids [batch, longest], padded on the left, and the padding of each row; None where there is none."""
        longest = max(map(len, prefixes))
        padding = [longest - len(ids) for ids in prefixes]
        ids = self._tensor([[0] * pad + list(ids) for pad, ids in zip(padding, prefixes, strict=True)])
        return ids, self._tensor(padding) if any(padding) else None

    def _tensor(self, values: Sequence) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """No gradients, and blocks that were compiled for training run as they are written: compiled, they take no cache."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


def limits_for(model: HybridLM, max_batch_tokens: int | None = None) -> Limits:
    """By default 32,768 tokens at a time on a GPU and 4,096 on a CPU. At most two caches are alive."""
    with reading():
        one, two = (_bytes(Cache(model, 1, capacity)) for capacity in (1, 2))
    device = model.embed.weight.device
    tokens, patience = (32_768, 2048) if device.type == "cuda" else (4096, 128)
    return Limits(max_batch_tokens or tokens, patience, 2 * one - two, two - one, cache_bytes(device))


def cache_bytes(device: torch.device) -> int:
    """What all rows of one cache may take: a fifth of a GPU's free memory."""
    if device.type != "cuda":
        return 2**31
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + unused) // 5


def _bytes(cache: Cache) -> int:
    parts = [part for part in (*cache.layers, *cache.shared) if part is not None]
    return sum(value.nbytes for part in parts for value in vars(part).values() if isinstance(value, Tensor))
