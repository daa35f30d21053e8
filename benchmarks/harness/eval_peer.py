"""Speed and log-likelihoods of lm-evaluation-harness's `hf` model on our tasks' prompts, which it tokenises itself."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.models import clock
from llmtrain.eval.native_task import NativeTask
from llmtrain.eval.prompts.lm_eval import LmEvalWriter
from llmtrain.eval.task import Documents
from llmtrain.eval.tasks.documents import group_by_category
from llmtrain.eval.tasks.sections import LmEvalPrompting

WARM_UP = 32
"""Documents answered before timing: kernels are compiled and libraries initialised."""
_FIRST_CHUNK = 8
"""Documents of the first timed chunk under a time limit."""


@dataclass(frozen=True)
class PeerMeasured:
    """rate: documents/s at the batch size that was fastest. documents: timed with it.

    difference: largest between log-likelihoods. agreement: share of documents with the same best alternative.
    """

    rate: float
    batch: int
    documents: int
    difference: float
    agreement: float


def load_peer(folder: str, max_length: int, dtype: str) -> Any:
    """Harness model of a folder in Hugging Face format, on the GPU if there is one. Raises ImportError without lm_eval."""
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # a line for every context that it cuts
    made: Any = HFLM  # its type hides what it takes
    options: dict[str, Any] = {"dtype": dtype, "max_length": max_length, "batch_size": 1}
    return made(pretrained=folder, device="cuda" if torch.cuda.is_available() else "cpu", **options)


def instances(task: NativeTask, documents: Documents, shots: int) -> list[tuple[int, Any]]:
    """(document's index, Instance) for each request, in the order of NativeTask.requests, without the premises of PMI scores."""
    from lm_eval.api.instance import Instance

    assert isinstance(task.settings, LmEvalPrompting)
    in_pool = documents.examples is None
    pools = group_by_category(documents.everything if documents.examples is None else documents.examples)
    asked = []
    for category, group in group_by_category(documents.evaluated).items():
        prompts = LmEvalWriter(task.settings).prompts(group, pools.get(category, []), shots, in_pool)
        asked += [
            (one.document.index, Instance("loglikelihood", {}, (one.context, one.continuation), 0))
            for one in prompts
            if not one.premise
        ]
    return asked


def ask(peer: Any, asked: Sequence[Any]) -> list[tuple[float, bool]]:
    """(log-likelihood, greedy) of each Instance."""
    return peer.loglikelihood(list(asked), disable_tqdm=True)


def measure_peer(
    peer: Any,
    asked: Sequence[tuple[int, Any]],
    ours: Sequence[float],
    batches: Sequence[int],
    *,
    limit: int | None = None,
    seconds: float | None = None,
) -> PeerMeasured | None:
    """Speed of the harness with the fastest batch size. None if none fits the GPU's memory.

    asked: of `instances`; ours: our log-likelihoods of the same. limit: take so many documents, evenly from all of them.
    seconds: for all batch sizes together, warming up apart. The documents are then timed in chunks, each one sorted by
    length on its own by the harness, and no chunk is begun that would not end in time: the rate is that of the whole
    chunks that were finished, at least one.
    """
    groups: dict[int, list[int]] = {}
    for at, (document, _) in enumerate(asked):
        groups.setdefault(document, []).append(at)
    chosen = _evenly(list(groups.values()), limit)
    best: PeerMeasured | None = None
    for batch in batches:
        peer.batch_size_per_gpu = batch
        share = None if seconds is None else seconds / len(batches)
        try:
            found, spent, done = _timed(lambda some: ask(peer, [asked[at][1] for at in some]), chosen, share)
        except torch.cuda.OutOfMemoryError:
            print(f"  harness, batch {batch}: does not fit the GPU's memory", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            continue
        rate = done / spent
        print(f"  harness, batch {batch}: {done} of {len(chosen)} documents in {spent:.1f} s, {rate:.1f}/s", flush=True)
        if best is None or rate > best.rate:
            difference = max(abs(ours[at] - value) for at, value in found.items())
            same = sum(_choice(group, ours) == _choice(group, found) for group in chosen[:done])
            best = PeerMeasured(rate, batch, done, difference, same / done)
    return best


def _timed(
    answer: Callable[[Sequence[int]], list[tuple[float, bool]]], groups: Sequence[list[int]], budget: float | None
) -> tuple[dict[int, float], float, int]:
    """(log-likelihood by request, seconds, documents). groups: each document's requests."""
    warm = groups[:WARM_UP]
    if budget is not None:
        answer(warm[0])  # compiles, where anything does
        began = clock()
        answer(warm[0])
        few = min(int(budget / 10 / (clock() - began)), WARM_UP)
        warm = warm[:few]
    if warm:
        answer(_flat(warm))
    found: dict[int, float] = {}
    spent, done = 0.0, 0
    while done < len(groups):
        count = len(groups)
        if budget is not None:
            count = _FIRST_CHUNK if done == 0 else int((budget - spent) * done / spent)
            # Longer chunks are what the harness is made for, but the speed of a short one foretells little.
            count = min(count, 8 * done) if done else count
            if count < min(_FIRST_CHUNK, len(groups) - done):
                break
        chunk = _flat(groups[done : done + count])
        began = clock()
        answers = answer(chunk)
        spent += clock() - began
        found |= {at: value for at, (value, _) in zip(chunk, answers, strict=True)}
        done = min(done + count, len(groups))
    return found, spent, done


def _evenly(groups: list[list[int]], limit: int | None) -> list[list[int]]:
    """Evenly spaced groups, at most `limit`, in an order in which every prefix is spread over the list."""
    count = min(limit or len(groups), len(groups))
    some = [groups[i * len(groups) // count] for i in range(count)]
    stride = next(step for step in (101, 103, 107, 1) if count % step)  # no divisor: every document comes once
    return [some[i * stride % count] for i in range(count)]


def _flat(groups: Sequence[list[int]]) -> list[int]:
    return [at for group in groups for at in group]


def _choice(group: Sequence[int], values: Any) -> int:
    """Request of the likeliest of a document's alternatives."""
    return max(group, key=lambda at: values[at])
