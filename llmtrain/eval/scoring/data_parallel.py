"""Data-parallel evaluation: the documents of one set of requests are divided among the ranks."""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from llmtrain.distributed.world import World
from llmtrain.eval.errors import EvalError, TaskFailed
from llmtrain.eval.prompts.requests import (
    GenerateUntilRequest,
    Loglikelihood,
    LoglikelihoodRequest,
    Request,
    Response,
    Responses,
    group_by_document,
)
from llmtrain.eval.scoring.overlap import no_host_work
from llmtrain.eval.scoring.scorer import Scorer

T = TypeVar("T")

_NEW_TOKEN = 8
"""Cost of a generated token in tokens read."""

_BATCHES_PER_CHUNK = 16
"""Responses are saved after so many full batches of every rank."""


@dataclass(frozen=True)
class DataParallel:
    """Ranks that evaluate together. join: context in which ranks may call a sharded model unequally often."""

    world: World
    join: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Return rank 0's make() on every rank. Raises EvalError on every rank where make raises OSError or ValueError."""
        if self.world.size == 1:
            return make()
        made: list[Any] = [None, None]
        if self.world.is_main:
            try:
                made = [make(), None]
            except (OSError, ValueError) as error:
                made = [None, str(error)]
        dist.broadcast_object_list(made, src=0)
        if made[1] is not None:
            raise EvalError(made[1])
        return made[0]

    def all_gather(self, mine: Any) -> list[Any]:
        """Objects of all ranks, in the order of ranks."""
        if self.world.size == 1:
            return [mine]
        parts: list[Any] = [None] * self.world.size
        dist.all_gather_object(parts, mine)
        return parts

    def agreed(self, make: Callable[[], T]) -> T:
        """make(), which every rank calls. Raises TaskFailed, on every rank, where it raises EvalError on one."""
        made, reason = None, ""
        try:
            made = make()
        except EvalError as error:
            reason = str(error)
        if reason := next(filter(None, self.all_gather(reason)), ""):
            raise TaskFailed(reason)
        assert made is not None
        return made


def request_cost(request: Request) -> int:
    """Estimated cost of a request in tokens read."""
    if isinstance(request, GenerateUntilRequest):
        return len(request.context) + _NEW_TOKEN * request.max_new_tokens
    return len(request.context) + len(request.continuation)


def chunks(costs: Mapping[int, int], size: int) -> Iterator[list[int]]:
    """Documents in order, in groups that cost at least `size` each, but for the last."""
    group: list[int] = []
    total = 0
    for document, cost in costs.items():
        group.append(document)
        total += cost
        if total >= size:
            yield group
            group, total = [], 0
    if group:
        yield group


def partition(costs: Mapping[int, int], documents: Sequence[int], ranks: int) -> list[list[int]]:
    """Each rank's documents, ascending; assigned in order of falling cost, each to the least loaded rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for document in sorted(documents, key=lambda one: (-costs[one], one)):
        least, rank = heapq.heappop(load)
        shares[rank].append(document)
        heapq.heappush(load, (least + costs[document], rank))
    return [sorted(share) for share in shares]


def run_requests(
    requests: Sequence[Request],
    scorer: Scorer,
    ranks: DataParallel,
    *,
    title: str,
    window: int,
    known: Responses,
    save: Callable[[Responses], None],
    progress: Callable[[int], None],
    host_work: Callable[[], bool] = no_host_work,
) -> Responses:
    """Responses for every document, the same on every rank; those `known` are not computed again.

    save: called on rank 0 with new responses, a chunk at a time. progress: called with the number of documents that are
    newly done, of all ranks. host_work: as in `Scorer.loglikelihood`. Raises TaskFailed, which names the title, for a
    log-likelihood that is NaN.
    """
    groups = group_by_document(requests)
    costs = {
        document: sum(request_cost(requests[index]) for index in group)
        for document, group in groups.items()
        if document not in known
    }
    found = dict(known)
    world = ranks.world
    for chunk in chunks(costs, _BATCHES_PER_CHUNK * scorer.limits.tokens * world.readers):
        mine = partition(costs, chunk, world.readers)[world.reader]
        with ranks.join():
            results = _score(
                [requests[index] for document in mine for index in groups[document]], scorer, window, host_work
            )
        left = iter(results)
        new: Responses = {}
        answers = ranks.all_gather({document: [next(left) for _ in groups[document]] for document in mine})
        for part in answers[: world.readers * world.tensor : world.tensor]:
            assert not new.keys() & part.keys(), "a document was answered twice"
            new |= part
        assert new.keys() == set(chunk), "a document was not answered"
        _check_nan(title, new)
        if ranks.world.is_main:
            save(new)
        found |= new
        progress(len(new))
    return found


def _score(
    requests: Sequence[Request], scorer: Scorer, window: int, host_work: Callable[[], bool]
) -> Sequence[Response]:
    """Responses of this rank; the requests of a task are all of one kind."""
    if any(isinstance(request, GenerateUntilRequest) for request in requests):
        return scorer.generate_until([request for request in requests if isinstance(request, GenerateUntilRequest)])
    likelihoods = [request for request in requests if isinstance(request, LoglikelihoodRequest)]
    return scorer.loglikelihood(likelihoods, window=window, host_work=host_work)


def _check_nan(title: str, responses: Responses) -> None:
    for document, group in responses.items():
        for one in group:
            if isinstance(one, Loglikelihood) and one.log_likelihood != one.log_likelihood:
                raise TaskFailed(
                    f"{title}, document {document} (from 0): the model's log-likelihood is not a number; its weights are "
                    "broken"
                )
