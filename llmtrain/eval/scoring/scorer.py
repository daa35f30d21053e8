"""Scorer: the interface of models that answer requests, and its implementation by a HybridLM."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.prompts.requests import GeneratedText, Loglikelihood, LoglikelihoodRequest
from llmtrain.eval.scoring.batching import Limits, Rows, make_rows
from llmtrain.eval.scoring.generation import Answer, Contexts, Requests, cut_context, decoding_batches
from llmtrain.eval.scoring.overlap import no_host_work
from llmtrain.eval.scoring.packed_plan import PackedPlan, Segment, pack_rows
from llmtrain.eval.scoring.packed_scoring import score_packs
from llmtrain.eval.scoring.prefix_plan import Batch, Plan, Subtree, Suffix, make_plan
from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampling
from llmtrain.models.cache import Cache
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.loss import IGNORE

RowScore = tuple[int, tuple[float, bool]]
"""(row, (log-likelihood, greedy))."""


class Scorer(ABC):
    """Model behind the requests `loglikelihood` and `generate_until`. Responses do not depend on how requests are batched.

    window: tokens it can read. end_ids: tokens that end an answer, beside the tokenizer's end-of-document token.
    """

    limits: Limits

    def __init__(self, tokenizer: TextTokenizer, window: int, end_ids: Collection[int]):
        self.tokenizer, self.window, self.end_ids = tokenizer, window, end_ids

    @abstractmethod
    def _score_rows(self, rows: Rows, host_work: Callable[[], bool]) -> Iterator[RowScore]: ...

    @abstractmethod
    def _decoding_batches(self, requests: Requests, contexts: Contexts) -> Iterator[list[int]]:
        """Indices of requests that are decoded together, all with the same max_new_tokens and sampling."""

    @abstractmethod
    def _decode(self, contexts: Contexts, answers: Sequence[Answer], requests: Requests) -> None:
        """Decode as all of the requests ask; each token is added to its answer, until that has ended."""

    def loglikelihood(
        self,
        requests: Sequence[LoglikelihoodRequest],
        *,
        window: int | None = None,
        host_work: Callable[[], bool] = no_host_work,
    ) -> list[Loglikelihood]:
        """Responses in order.

        window: most tokens read; longer contexts are cut on the left. host_work: called while the GPU is busy; does a step of
        other work and returns False when there is none left. Raises EvalError for an empty context, and for a continuation
        that does not fit the window.
        """
        rows = make_rows(requests, min(window or self.window, self.window))
        with inference():
            found = dict(self._score_rows(rows, host_work))
        return [
            Loglikelihood(*found[row], tokens=rows.rows[row].scored, truncated=truncated)
            for row, truncated in zip(rows.row_of, rows.truncated, strict=True)
        ]

    def generate_until(self, requests: Requests) -> list[GeneratedText]:
        """Responses in order. Raises EvalError for more new tokens than fit the window."""
        contexts = [cut_context(request, self.window) for request in requests]
        found: dict[int, GeneratedText] = {}
        for batch in self._decoding_batches(requests, contexts):
            answers = [Answer(self.tokenizer, contexts[index], requests[index].stops, self.end_ids) for index in batch]
            self._decode([contexts[index] for index in batch], answers, [requests[index] for index in batch])
            for index, answer in zip(batch, answers, strict=True):
                lost = len(requests[index].context) - len(contexts[index])
                found[index] = GeneratedText(answer.finish(), truncated=lost)
        return [found[index] for index in range(len(requests))]


class HybridScorer(Scorer):
    """Scorer that reads a prefix shared by several requests once: in a packed sequence, or else in a cache.

    max_batch_tokens: tokens per forward pass, padding included. share: False reads every request whole. packed: default True on
    a GPU for models whose blocks all support prefix trees.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: TextTokenizer,
        *,
        max_length: int | None = None,
        max_batch_tokens: int | None = None,
        share: bool = True,
        packed: bool | None = None,
        end_ids: Collection[int] = (),
    ):
        super().__init__(tokenizer, max_length or model.config.max_seq_len, end_ids)
        share = share and not model.replays()
        self.model, self.share = model, share
        self.device = model.device
        self.limits = limits_for(model, max_batch_tokens)
        self.packed = share and (
            self.device.type == "cuda" and model.hybrid.prefix_refusal() is None if packed is None else packed
        )
        self.plan: Plan | PackedPlan = Plan([])
        """Plan of the last call of `loglikelihood`."""

    def _decoding_batches(self, requests: Requests, contexts: Contexts) -> Iterator[list[int]]:
        """Batches as large as fits, because a decoding step costs about as much for many rows as for one."""
        limits = self.limits
        return decoding_batches(requests, contexts, lambda read, new: limits.rows(read, read + new), limits.tokens)

    def _decode(self, contexts: Contexts, answers: Sequence[Answer], requests: Requests) -> None:
        def stop(row: int, token: int) -> bool:
            return answers[row].add(token)

        options, new_tokens = requests[0].sampling or Sampling(temperature=0), requests[0].max_new_tokens
        numbers = [request.row_number for request in requests]
        for _ in decode(self.model, contexts, options, max_new_tokens=new_tokens, stop=stop, row_numbers=numbers):
            pass

    def _score_rows(self, rows: Rows, host_work: Callable[[], bool]) -> Iterator[RowScore]:
        if self.packed:
            yield from score_packs(self.model, rows.rows, self._packs(rows), host_work)
            return
        self.plan = make_plan(rows, self.limits, window=self.window, share=self.share)
        for subtree in self.plan.subtrees:
            yield from self._score_subtree(self.plan, subtree)

    def _packs(self, rows: Rows) -> Iterator[list[Segment]]:
        self.plan = plan = PackedPlan(rows.rows)
        for pack in pack_rows(rows, self.limits.tokens):
            plan.packs.append(pack)
            yield pack

    def _score_subtree(self, plan: Plan, subtree: Subtree) -> Iterator[RowScore]:
        root = None
        if subtree.root:
            root = self.model.empty_cache(1, len(subtree.root))
            self._fill(root, [subtree.root])
        for batch in subtree.batches:
            if batch.next_tokens:
                yield from self._score_next_tokens(plan, batch)
                continue
            cache = self._cache_prefixes(batch, root) if batch.prefixes else root
            for suffix_batch in batch.suffix_batches:
                yield from self._score_suffixes(plan, suffix_batch, cache)

    def _score_next_tokens(self, plan: Plan, batch: Batch) -> Iterator[RowScore]:
        cache = self.model.empty_cache(len(batch.prefixes), max(map(len, batch.prefixes)))
        ids, padding = self._padded(batch.prefixes)
        logits = self.model.next_logits(ids, cache, padding)  # [prefixes, vocab_size]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        rows = [row for row, _ in batch.next_tokens]
        parents = self._tensor([parent for _, parent in batch.next_tokens])
        labels = self._tensor([plan.rows[row].tokens[-1] for row in rows])
        scores = logits[parents, labels] - logits.logsumexp(dim=-1)[parents]
        greedy = logits.argmax(dim=-1)[parents] == labels
        yield from zip(rows, zip(scores.tolist(), greedy.tolist(), strict=True), strict=True)

    def _cache_prefixes(self, batch: Batch, root: Cache | None) -> Cache:
        width = max(map(len, batch.prefixes))
        if root is None:
            cache = self.model.empty_cache(len(batch.prefixes), width)
        else:
            cache = root.take(self._tensor([0] * len(batch.prefixes)), root.length + width)
        self._fill(cache, batch.prefixes)
        return cache

    def _fill(self, cache: Cache, prefixes: Sequence[Sequence[int]]) -> None:
        ids, padding = self._padded(prefixes)
        self.model.fill(ids, cache, padding)

    def _score_suffixes(self, plan: Plan, suffix_batch: Sequence[Suffix], before: Cache | None) -> Iterator[RowScore]:
        width = max(len(suffix.tokens) for suffix in suffix_batch)
        ids, labels = [], []
        for suffix in suffix_batch:
            row, padding = plan.rows[suffix.row], width - len(suffix.tokens)
            ids.append([*suffix.tokens, *[0] * padding])
            labels.append(
                [*[IGNORE] * (len(suffix.tokens) - row.scored), *row.tokens[-row.scored :], *[IGNORE] * padding]
            )
        if before is None:
            cache = self.model.empty_cache(len(suffix_batch), width)
        else:
            cache = before.take(self._tensor([suffix.parent for suffix in suffix_batch]), before.length + width)
        scores = self.model.scores(self._tensor(ids), self._tensor(labels), cache)
        sums, greedy = scores.log_likelihood.double().sum(dim=1), scores.greedy.all(dim=1)
        yield from zip(
            (suffix.row for suffix in suffix_batch), zip(sums.tolist(), greedy.tolist(), strict=True), strict=True
        )

    def _padded(self, prefixes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Ids [batch, longest], padded on the left, and each row's padding (None if no row has any)."""
        longest = max(map(len, prefixes))
        padding = [longest - len(ids) for ids in prefixes]
        ids = self._tensor([[0] * pad + list(ids) for pad, ids in zip(padding, prefixes, strict=True)])
        return ids, self._tensor(padding) if any(padding) else None

    def _tensor(self, values: Sequence) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)


@contextlib.contextmanager
def inference() -> Iterator[None]:
    """Context without gradients in which blocks compiled for training run eagerly: compiled, they take no cache."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


def limits_for(model: CausalLM, max_batch_tokens: int | None = None) -> Limits:
    """Limits for a model: by default 32,768 tokens per pass on a GPU and 4,096 on a CPU, for two caches at a time."""
    with inference():
        one, two = (model.empty_cache(1, capacity).nbytes for capacity in (1, 2))
    device = model.device
    tokens, call_cost = (32_768, 2048) if device.type == "cuda" else (4096, 128)
    most = model.least(cache_bytes(device))
    return Limits(max_batch_tokens or tokens, call_cost, 2 * one - two, two - one, most)


def cache_bytes(device: torch.device) -> int:
    """Most memory of one cache: a fifth of a GPU's free memory."""
    if device.type != "cuda":
        return 2**31
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + unused) // 5
