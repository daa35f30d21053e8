"""Models x tasks -> results: read top to bottom. Every rank calls `evaluate`."""

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
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.report.gauntlet import Gauntlet, GauntletScores, gauntlet_scores, load_gauntlet
from llmtrain.eval.report.results import Report, Result, cut_to_fit
from llmtrain.eval.report.store import Answers, Store, requests_digest
from llmtrain.eval.run_config import Chosen, EvalRun, ModelChoice, chosen_tasks
from llmtrain.eval.scoring.data_parallel import Requests, Team, answer, in_order
from llmtrain.eval.scoring.models import (
    Found,
    default_dtype,
    find_model,
    find_tokenizer,
    load_scorer,
    tokenizer_identity,
    window_of,
)
from llmtrain.eval.scoring.overlap import Ahead, Steps
from llmtrain.eval.scoring.scorer import Scorer
from llmtrain.eval.task import Documents, Task, load_task


def evaluate(run: EvalRun, results: list[Result] | None = None) -> Report:
    """Every model on every task; rank 0 says each result as it comes. Returns the same on every rank.

    results: where to put what is done, for the caller to have should the rest fail.
    Raises UserError for a model, task or data file that cannot be used: all of them are looked at before any is loaded.
    """
    results = [] if results is None else results
    world = world_from_environment()
    if world.size > 1:
        initialize()
    team = Team(world)
    gauntlet = load_gauntlet(run.gauntlet) if run.gauntlet else None
    tasks = chosen_tasks(run, gauntlet)
    models = [Evaluated(choice, run, team) for choice in run.chosen_models()]
    documents = read_documents(tasks, run.limit)
    for chosen in tasks:
        chosen.task.check_shots(documents[chosen.task.name], chosen.shots)
    total = len(models) * sum(len(documents[task.task.name]) for task in tasks)
    with frozen(), Bar(total, shown=world.is_main and sys.stderr.isatty()) as bar:
        for model in models:
            # Prompts are written and tokenised while the GPU is busy with the tasks before.
            prompted = Ahead(tasks, lambda task, of=model: of.requests(task, documents[task.task.name]))
            for task, requests in prompted:
                bar.say(f"{model.title}: {task.title}")
                results.append(model.run(task, documents[task.task.name], requests, bar.advance, prompted.step))
                if world.is_main:
                    bar.print(line_of(results[-1]))
            model.unload()
    scores = gauntlet and {model.title: scores_of(gauntlet, model.title, run, results) for model in models}
    return Report(run.name, results, gauntlet, scores)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Garbage collection does not look at what is there now: requests are so many objects that it would, again and again."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def scores_of(gauntlet: Gauntlet, model: str, run: EvalRun, results: Sequence[Result]) -> GauntletScores:
    found = {(one.task, one.shots): one.metrics for one in results if one.model == model}
    named = {
        (task, shots): found[key]
        for task, shots in gauntlet.benchmarks()
        if (key := (load_task(task, run.convention, run.data_dir).name, shots)) in found
    }
    return gauntlet_scores(gauntlet, named)


def line_of(result: Result) -> str:
    score = result.metrics.score
    error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
    cut = f"  ({told})" if (told := cut_to_fit(result)) else ""
    name = f"{result.model}  {result.title}"
    return f"{name}  {result.metrics.headline} {score.value:.4f}{error}  {result.metrics.documents} documents{cut}"


def read_documents(tasks: Sequence[Chosen], limit: int | None) -> dict[str, Documents]:
    found: dict[str, Documents] = {}
    for chosen in tasks:
        if chosen.task.name not in found:
            found[chosen.task.name] = chosen.task.documents(limit)
    return found


class Evaluated:
    """A model that is loaded when a question comes up whose answer is not known."""

    def __init__(self, choice: ModelChoice, settings: EvalRun, team: Team):
        self.choice, self.settings, self.team = choice, settings, team
        self.title = choice.title
        # One rank decides which checkpoint is the newest.
        self.found: Found = team.shared(lambda: find_model(choice.path, choice.backend))
        self.window = choice.max_length or settings.max_length or window_of(self.found)
        self.tokenizer: TextTokenizer = find_tokenizer(self.found, choice.tokenizer)
        try:
            PromptTokenizer(self.tokenizer)
        except EvalError as error:
            raise EvalError(f"{self.title}: {error}") from None
        self._tokenizer_identity = tokenizer_identity(self.tokenizer)
        self._scorer: Scorer | None = None

    def requests(self, chosen: Chosen, documents: Documents) -> Steps[Requests]:
        return chosen.task.request_steps(
            documents, self.tokenizer, chosen.shots, max_seq_len=self._tokens_read(chosen.task), pmi=self.settings.pmi
        )

    def _tokens_read(self, task: Task) -> int:
        """The last of a continuation is only predicted."""
        return task.window(self.window) - 1

    def run(
        self,
        chosen: Chosen,
        documents: Documents,
        requests: Requests,
        progress: Callable[[int], None],
        meanwhile: Callable[[], bool],
    ) -> Result:
        """requests: as above. progress: told how many documents are done. meanwhile: as in `Scorer.score`."""
        task, run, window = chosen.task, self.settings, self._tokens_read(chosen.task)
        task.check_fit(documents, requests, self.window)
        dtype = run.dtype or default_dtype()
        about = {
            "model": self.found.identity,
            "backend": "llmtrain" if self.found.ours else "transformers",
            "dtype": dtype,
            "window": [self.window, window],
            "tokenizer": self._tokenizer_identity,
            "requests": requests_digest(requests),
        }
        store = Store(Path(run.cache), about) if run.cache is not None else None
        known: Answers = self.team.shared(store.read) if store else {}
        progress(len(known))
        began = time.perf_counter()
        answers = known
        if len(known) < len(documents):
            answers = answer(
                requests,
                self.scorer,
                self.team,
                title=chosen.title,
                window=window,
                known=known,
                keep=store.append if store else lambda new: None,
                progress=progress,
                meanwhile=meanwhile,
            )
        seconds = time.perf_counter() - began if len(known) < len(documents) else 0.0
        metrics = task.metrics(documents, requests, in_order(requests, answers))
        return Result(
            model=self.title,
            path=str(self.found.folder),
            task=task.name,
            shots=chosen.shots,
            title=chosen.title,
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
        """Makes room for the next."""
        self._scorer = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Bar:
    """Documents done, on a terminal."""

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

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def say(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def advance(self, documents: int) -> None:
        self._bar.advance(self._task, documents)

    def print(self, line: str) -> None:
        """Above the bar."""
        self._bar.console.print(line, highlight=False, soft_wrap=True) if not self._bar.disable else print(line)
