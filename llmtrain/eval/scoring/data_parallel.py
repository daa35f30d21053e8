"""Ranks that share the work on one set of requests."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from llmtrain.distributed.world import World
from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.store import Answers
from llmtrain.eval.scoring.overlap import idle
from llmtrain.eval.scoring.request import Generate, Generated, Score, Scored
from llmtrain.eval.scoring.scorer import Scorer

_NEW_TOKEN = 8
"""Cost of a generated token in tokens read."""

_BATCHES_PER_CHUNK = 16
"""Answers are kept after so many full batches of every rank."""

Requests = Sequence[Score | Generate]


@dataclass(frozen=True)
class Team:
    """The ranks. lockstep: makes calls of a sharded model equal in number on all ranks (see lockstep.py)."""

    world: World
    lockstep: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)

    def shared(self, make: Callable[[], Any]) -> Any:
        """What make() gives on rank 0, on every rank. Raises EvalError on every rank if it fails there for the user."""
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

    def gathered(self, mine: Any) -> list[Any]:
        if self.world.size == 1:
            return [mine]
        parts: list[Any] = [None] * self.world.size
        dist.all_gather_object(parts, mine)
        return parts


def by_document(requests: Requests) -> dict[int, list[int]]:
    """Indices of each document's requests, in order."""
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.document, []).append(index)
    return groups


def cost(request: Score | Generate) -> int:
    """In tokens read."""
    if isinstance(request, Generate):
        return len(request.context) + _NEW_TOKEN * request.max_new_tokens
    return len(request.context) + len(request.continuation)


def chunks(costs: Mapping[int, int], size: int) -> Iterator[list[int]]:
    """Documents in order, in groups that cost at least `size` each, but for the last."""
    group: list[int] = []
    total = 0
    for document, price in costs.items():
        group.append(document)
        total += price
        if total >= size:
            yield group
            group, total = [], 0
    if group:
        yield group


def divide(costs: Mapping[int, int], documents: Sequence[int], ranks: int) -> list[list[int]]:
    """Each rank's documents: the costliest first, each to the rank with the least to do. In ascending order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for document in sorted(documents, key=lambda one: (-costs[one], one)):
        least, rank = heapq.heappop(load)
        shares[rank].append(document)
        heapq.heappush(load, (least + costs[document], rank))
    return [sorted(share) for share in shares]


def answer(
    requests: Requests,
    scorer: Scorer,
    team: Team,
    *,
    title: str,
    window: int,
    known: Answers,
    keep: Callable[[Answers], None],
    progress: Callable[[int], None],
    meanwhile: Callable[[], bool] = idle,
) -> Answers:
    """Every document's answers, the same on every rank; `known` ones are not asked for again.

    keep: called on rank 0 with what is new, a chunk at a time. progress: told how many documents are done, of all ranks.
    meanwhile: as in `Scorer.score`. Raises EvalError, which names the title, for a log-likelihood that is no number.
    """
    groups = by_document(requests)
    costs = {
        document: sum(cost(requests[index]) for index in group)
        for document, group in groups.items()
        if document not in known
    }
    found = dict(known)
    for chunk in chunks(costs, _BATCHES_PER_CHUNK * scorer.limits.tokens * team.world.size):
        mine = divide(costs, chunk, team.world.size)[team.world.rank]
        with team.lockstep():
            results = _ask(
                [requests[index] for document in mine for index in groups[document]], scorer, window, meanwhile
            )
        left = iter(results)
        new: Answers = {}
        for part in team.gathered({document: [next(left) for _ in groups[document]] for document in mine}):
            assert not new.keys() & part.keys(), "a document was answered twice"
            new |= part
        assert new.keys() == set(chunk), "a document was not answered"
        _refuse_nan(title, new)
        if team.world.is_main:
            keep(new)
        found |= new
        progress(len(new))
    return found


def in_order(requests: Sequence[Score | Generate], answers: Answers) -> list[Scored | Generated]:
    """An answer per request, from answers by document."""
    made: list[Any] = [None] * len(requests)
    for document, group in by_document(requests).items():
        for index, one in zip(group, answers[document], strict=True):
            made[index] = one
    return made


def _ask(requests: Requests, scorer: Scorer, window: int, meanwhile: Callable[[], bool]) -> list[Scored | Generated]:
    if any(isinstance(request, Generate) for request in requests):
        return list(scorer.generate([request for request in requests if isinstance(request, Generate)]))
    scores = [request for request in requests if isinstance(request, Score)]
    return list(scorer.score(scores, window=window, meanwhile=meanwhile))


def _refuse_nan(title: str, answers: Answers) -> None:
    for document, some in answers.items():
        for one in some:
            if isinstance(one, Scored) and one.log_likelihood != one.log_likelihood:
                raise EvalError(
                    f"{title}, document {document} (from 0): the model's log-likelihood is not a number; its weights are "
                    "broken"
                )
