"""Evaluation of models on tasks, from top to bottom. Every rank calls `evaluate`."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.distributed.world import initialize, world_from_environment
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import Request, Responses, responses_in_order
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.report.gauntlet import Gauntlet, GauntletScores, gauntlet_scores, load_gauntlet
from llmtrain.eval.report.response_store import ResponseStore, requests_digest
from llmtrain.eval.report.results import Report, Result, truncation_note
from llmtrain.eval.run_config import EvalRun, ModelChoice, TaskRun, task_runs
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
from llmtrain.eval.task import Documents, Task, load_task


def evaluate(run: EvalRun, results: list[Result] | None = None) -> Report:
    """Evaluate every model on every task; rank 0 prints each result. Returns the same on every rank.

    results: list to which each result is appended, so that the caller has those before a failure. Raises UserError for a
    model, task or data file that cannot be used; all of them are checked before any model is loaded.
    """
    results = [] if results is None else results
    world = world_from_environment()
    if world.size > 1:
        initialize()
    ranks = DataParallel(world)
    gauntlet = load_gauntlet(run.gauntlet) if run.gauntlet else None
    tasks = task_runs(run, gauntlet)
    models = [ModelEvaluation(choice, run, ranks) for choice in run.chosen_models()]
    documents = read_documents(tasks, run.limit)
    for task_run in tasks:
        task_run.task.check_shots(documents[task_run.task.name], task_run.shots)
    total = len(models) * sum(len(documents[task.task.name]) for task in tasks)
    with frozen_gc(), ProgressBar(total, shown=world.is_main and sys.stderr.isatty()) as bar:
        for model in models:
            # Prompts of the next tasks are made and tokenised while the GPU is busy.
            prefetcher = Prefetcher(tasks, lambda task, of=model: of.requests(task, documents[task.task.name]))
            for task, requests in prefetcher:
                bar.describe(f"{model.title}: {task.title}")
                results.append(model.run(task, documents[task.task.name], requests, bar.advance, prefetcher.step))
                if world.is_main:
                    bar.print(summary_line(results[-1]))
            model.unload()
    scores = gauntlet and {model.title: gauntlet_scores_of(gauntlet, model.title, run, results) for model in models}
    return Report(run.name, results, gauntlet, scores)


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
        if (key := (load_task(task, run.convention, run.data_dir).name, shots)) in found
    }
    return gauntlet_scores(gauntlet, named)


def summary_line(result: Result) -> str:
    score = result.metrics.score
    error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
    cut = f"  ({note})" if (note := truncation_note(result)) else ""
    name = f"{result.model}  {result.title}"
    return f"{name}  {result.metrics.headline} {score.value:.4f}{error}  {result.metrics.documents} documents{cut}"


def read_documents(tasks: Sequence[TaskRun], limit: int | None) -> dict[str, Documents]:
    found: dict[str, Documents] = {}
    for task_run in tasks:
        if task_run.task.name not in found:
            found[task_run.task.name] = task_run.task.documents(limit)
    return found


class ModelEvaluation:
    """A model under evaluation, loaded when the first response is needed that is not stored."""

    def __init__(self, choice: ModelChoice, settings: EvalRun, ranks: DataParallel):
        self.choice, self.settings, self.ranks = choice, settings, ranks
        self.title = choice.title
        # Rank 0 alone looks for the newest checkpoint.
        self.found: FoundModel = ranks.broadcast(lambda: find_model(choice.path, choice.backend))
        self.window = choice.max_length or settings.max_length or window_of(self.found)
        self.tokenizer: TextTokenizer = find_tokenizer(self.found, choice.tokenizer)
        try:
            PromptTokenizer(self.tokenizer)
        except EvalError as error:
            raise EvalError(f"{self.title}: {error}") from None
        self._tokenizer_identity = tokenizer_identity(self.tokenizer)
        self._scorer: Scorer | None = None

    def requests(self, task_run: TaskRun, documents: Documents) -> Steps[list[Request]]:
        return task_run.task.request_steps(
            documents,
            self.tokenizer,
            task_run.shots,
            max_seq_len=self._tokens_read(task_run.task),
            pmi=self.settings.pmi,
        )

    def _tokens_read(self, task: Task) -> int:
        """Most tokens read: the last token of a continuation is predicted but not read."""
        return task.window(self.window) - 1

    def run(
        self,
        task_run: TaskRun,
        documents: Documents,
        requests: list[Request],
        progress: Callable[[int], None],
        host_work: Callable[[], bool],
    ) -> Result:
        """Result of one task. requests: those of `requests`. progress(n): n more documents are done. host_work: as in
        `Scorer.loglikelihood`."""
        task, run, window = task_run.task, self.settings, self._tokens_read(task_run.task)
        task.check_lengths(documents, requests, self.window)
        dtype = run.dtype or default_dtype()
        about = {
            "model": self.found.identity,
            "backend": "llmtrain" if self.found.native else "transformers",
            "dtype": dtype,
            "window": [self.window, window],
            "tokenizer": self._tokenizer_identity,
            "requests": requests_digest(requests),
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
        metrics = task.metrics(documents, requests, responses_in_order(requests, responses))
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
        )

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
            )
        return self._scorer

    def unload(self) -> None:
        """Free the model's memory."""
        self._scorer = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class ProgressBar:
    """Progress bar of documents on a terminal."""

    def __init__(self, total: int, shown: bool):
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("documents"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not shown, speed_estimate_period=120)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def describe(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def advance(self, documents: int) -> None:
        self._bar.advance(self._task, documents)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, highlight=False, soft_wrap=True) if not self._bar.disable else print(line)
