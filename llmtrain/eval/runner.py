"""Evaluation of models on tasks, from top to bottom. Every rank calls `evaluate`."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.distributed.world import initialize, world_from_environment
from llmtrain.eval.choices import ModelChoice
from llmtrain.eval.errors import EvalError, TaskFailed, prefixed
from llmtrain.eval.failures import Failures, failed_tasks, failure_line
from llmtrain.eval.prepare import Prepared, check_prompts, prepare_steps, read_documents
from llmtrain.eval.prompts.requests import Responses, responses_in_order
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.report.gauntlet import Gauntlet, GauntletScores, gauntlet_scores, load_gauntlet
from llmtrain.eval.report.groups import GroupResult, group_lines, group_results
from llmtrain.eval.report.metrics import Failure, Result
from llmtrain.eval.report.response_store import ResponseStore, requests_digest
from llmtrain.eval.report.results import Report, skipped_note, truncation_note
from llmtrain.eval.run_config import EvalRun, TaskRun, gauntlet_task_name, group_runs, task_runs
from llmtrain.eval.scoring.data_parallel import DataParallel, run_requests
from llmtrain.eval.scoring.load import (
    FoundModel,
    default_dtype,
    find_model,
    find_tokenizer,
    load_scorer,
    tokenizer_identity,
    window_of,
)
from llmtrain.eval.scoring.overlap import Prefetcher, Steps
from llmtrain.eval.scoring.scorer import Scorer
from llmtrain.eval.task import Documents
from llmtrain.logs import log
from llmtrain.progress import CountBar
from llmtrain.schema.adapt import WeightFormat


@dataclass
class Done:
    """Part of an evaluation that is done, which a caller keeps where the rest is interrupted."""

    results: list[Result] = field(default_factory=list)
    groups: list[GroupResult] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def evaluate(run: EvalRun, done: Done | None = None) -> Report:
    """Evaluate every model on every task; rank 0 prints each result. Returns the same on every rank.

    done: takes each result and failure, so that the caller has those before an error. All documents and prompts are checked before
    any model is loaded. A task that cannot be evaluated is reported, and is among the report's failures; the others go on.
    Raises UserError for a model that cannot be used, and if no task is left.
    """
    done = Done() if done is None else done
    results, aggregated = done.results, done.groups
    world = world_from_environment()
    if world.size > 1:
        initialize()
    ranks = DataParallel(world)
    gauntlet = load_gauntlet(run.gauntlet) if run.gauntlet else None
    tasks, groups = task_runs(run, gauntlet), group_runs(run)
    models = [ModelEvaluation(choice, run, ranks) for choice in run.chosen_models()]
    failures = Failures([model.title for model in models])
    documents = read_tasks(tasks, run, failures)
    _check(models, tasks, documents, failures)
    failures.agree(ranks)
    done.failures = failures.listed()
    left = {model.title: [one for one in tasks if not failures.has(model.title, one.title)] for model in models}
    if not any(left.values()):
        raise failed_tasks(failures.listed())
    if world.is_main and (lines := [failure_line(one) for one in failures.listed()]):
        log.info("\n".join([*lines, "the other tasks are evaluated"]))
    total = sum(len(documents[one.task.name]) for some in left.values() for one in some)
    with (
        frozen_gc(),
        CountBar(world.is_main and sys.stderr.isatty(), total, "{task.description}", "documents, left") as bar,
    ):
        for model in (model for model in models if left[model.title]):
            # Prompts of the next tasks are made and tokenised while the GPU is busy.
            prefetcher = Prefetcher(
                left[model.title], lambda task, of=model: of.prepare(task, documents[task.task.name])
            )
            for task, prepared in prefetcher:
                bar.stage(f"{model.title}: {task.title}")
                try:
                    results.append(model.run(task, prepared, bar.advance, prefetcher.step))
                except TaskFailed as error:
                    failures.add(task.title, error, [model.title])
                    done.failures = failures.listed()
                    if world.is_main:
                        log.info(failure_line(done.failures[-1]))
                    continue
                if world.is_main:
                    bar.print(summary_line(results[-1]))
            found = group_results(groups, model.title, results)
            aggregated += found
            if world.is_main:
                for line in group_lines(found):
                    bar.print(line)
            model.unload()
    if not results:
        raise failed_tasks(failures.listed())
    scores = gauntlet and _scores(gauntlet, run, results, failures)
    return Report(run.name, results, gauntlet, scores, aggregated, failures.listed())


def read_tasks(tasks: Sequence[TaskRun], run: EvalRun, failures: Failures) -> dict[str, Documents]:
    """Documents of the tasks that can be read, by their names."""
    titles: dict[str, list[str]] = {}
    for one in tasks:
        titles.setdefault(one.task.name, []).append(one.title)
    known = {one.task.name: one.task for one in tasks}
    found = {
        name: failures.attempt(titles[name], lambda task=task: read_documents(task, run))
        for name, task in known.items()
    }
    return {name: documents for name, documents in found.items() if documents is not None}


def _check(
    models: Sequence[ModelEvaluation], tasks: Sequence[TaskRun], documents: Mapping[str, Documents], failures: Failures
) -> None:
    """Check the prompts of all tasks that could be read, once for models with the same tokenizer, template and window."""
    alike: dict[tuple[str, str, int], list[ModelEvaluation]] = {}
    for model in models:
        style = json.dumps(model.style.as_json())
        alike.setdefault((model.tokenizer_identity, style, model.window), []).append(model)
    for group in alike.values():
        first = group[0]
        for one in tasks:
            if found := documents.get(one.task.name):
                check = partial(check_prompts, one, found, first.tokenizer, first.window, first.settings, first.style)
                failures.attempt([one.title], check, [model.title for model in group])


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """Context in which the garbage collector skips objects that exist at its start: requests are so many that it would
    traverse them again and again."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def gauntlet_scores_of(gauntlet: Gauntlet, model: str, run: EvalRun, results: Sequence[Result]) -> GauntletScores:
    found = {(one.task, one.shots): one.metrics for one in results if one.model == model}
    named = {
        (task, shots): found[key]
        for task, shots in gauntlet.benchmarks()
        if (key := (gauntlet_task_name(run, task), shots)) in found
    }
    return gauntlet_scores(gauntlet, named)


def summary_line(result: Result) -> str:
    score = result.metrics.score
    error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
    notes = "".join(f"  ({note})" for note in (truncation_note(result), skipped_note(result)) if note)
    name = f"{result.model}  {result.title}"
    return f"{name}  {result.metrics.headline} {score.value:.4f}{error}  {result.metrics.documents} documents{notes}"


def _scores(
    gauntlet: Gauntlet, run: EvalRun, results: Sequence[Result], failures: Failures
) -> dict[str, GauntletScores]:
    """Scores by model, of models with results for every benchmark."""
    found: dict[str, GauntletScores] = {}
    for model in dict.fromkeys(one.model for one in results):
        scored = partial(gauntlet_scores_of, gauntlet, model, run, results)
        if scores := failures.attempt([f"gauntlet {gauntlet.name}"], scored, [model]):
            found[model] = scores
    return found


class ModelEvaluation:
    """A model under evaluation, loaded when the first response is needed that is not stored."""

    def __init__(self, choice: ModelChoice, settings: EvalRun, ranks: DataParallel):
        self.choice, self.settings, self.ranks = choice, settings, ranks
        self.title = choice.title
        # Rank 0 alone looks for the newest checkpoint.
        self.found: FoundModel = ranks.broadcast(
            lambda: find_model(choice.path, choice.backend, choice.ema, choice.adapter)
        )
        self.weights: WeightFormat | None = choice.weights or settings.weights
        if self.weights and not self.found.native:
            raise EvalError(
                f"{self.title}: weights: {self.weights} is for llmtrain's own models; transformers reads this one"
            )
        self.window = choice.max_length or settings.max_length or window_of(self.found)
        self.tokenizer: TextTokenizer = find_tokenizer(self.found, choice.tokenizer)
        with prefixed(self.title):
            PromptTokenizer(self.tokenizer)
            self.style = settings.prompt_style(self.tokenizer, choice)
        self.tokenizer_identity = tokenizer_identity(self.tokenizer)
        self._scorer: Scorer | None = None

    def prepare(self, task_run: TaskRun, documents: Documents) -> Steps[Prepared | EvalError]:
        """Requests of a task, or the reason why it has none."""
        try:
            return (
                yield from prepare_steps(task_run, documents, self.tokenizer, self.window, self.settings, self.style)
            )
        except EvalError as error:
            return error

    def run(
        self,
        task_run: TaskRun,
        prepared: Prepared | EvalError,
        progress: Callable[[int], None],
        host_work: Callable[[], bool],
    ) -> Result:
        """Result of one task. prepared: that of `prepare`. progress(n): n more documents are done. host_work: as in
        `Scorer.loglikelihood`. Raises TaskFailed, on every rank, for a task without requests or metrics, or a log-likelihood
        that is NaN."""
        task, run, window = task_run.task, self.settings, task_run.task.window(self.window) - 1
        digest = self._agree(task_run, prepared)
        assert isinstance(prepared, Prepared)
        documents, requests = prepared.documents, prepared.requests
        dtype = run.dtype or default_dtype()
        if self.weights:
            dtype = f"{self.weights} (activations in {dtype})"
        about = {
            "model": self.found.identity,
            "backend": "llmtrain" if self.found.native else "transformers",
            "dtype": dtype,
            "window": [self.window, window],
            "tokenizer": self.tokenizer_identity,
            "requests": digest,
        }
        store = ResponseStore(Path(run.cache), about) if run.cache is not None else None
        known: Responses = self.ranks.broadcast(store.read) if store else {}
        progress(len(known))
        began = time.perf_counter()
        responses = known
        if len(known) < len(documents):
            responses = run_requests(
                requests,
                self.scorer,
                self.ranks,
                title=task_run.title,
                window=window,
                known=known,
                save=store.append if store else lambda new: None,
                progress=progress,
                host_work=host_work,
            )
        seconds = time.perf_counter() - began if len(known) < len(documents) else 0.0
        metrics = self.ranks.agreed(lambda: task.metrics(documents, requests, responses_in_order(requests, responses)))
        return Result(
            model=self.title,
            path=str(self.found.folder),
            task=task.name,
            shots=task_run.shots,
            title=task_run.title,
            convention=run.convention,
            dtype=dtype,
            metrics=metrics,
            seconds=seconds,
            asked=len(documents) - len(known),
            skipped=documents.skipped,
            style=None if task.rolling else self.style.as_json(),
            task_settings=task.described(),
        )

    def _agree(self, task_run: TaskRun, prepared: Prepared | EvalError) -> str:
        """Digest of the requests, which all ranks have alike. Raises TaskFailed, on every rank, if one has another or none."""
        failed = isinstance(prepared, EvalError)
        found = self.ranks.all_gather((str(prepared), "") if failed else ("", requests_digest(prepared.requests)))
        if reason := next((reason for reason, _ in found if reason), ""):
            raise TaskFailed(reason)
        if len({digest for _, digest in found}) > 1:
            raise TaskFailed(
                f"task {task_run.task.name}: ranks read different documents; give all of them the same data"
            )
        return found[0][1]

    @property
    def scorer(self) -> Scorer:
        if self._scorer is None:
            self._scorer = load_scorer(
                self.found,
                self.tokenizer,
                dtype=self.settings.dtype,
                max_length=self.choice.max_length or self.settings.max_length,
                max_batch_tokens=self.settings.max_batch_tokens,
                share_prefixes=self.settings.share_prefixes,
                weights=self.weights,
            )
        return self._scorer

    def unload(self) -> None:
        """Free the model's memory."""
        self._scorer = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
