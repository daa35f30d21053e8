"""Evaluation of in-context-learning tasks during training, by all ranks."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llmtrain.checkpoint.local import folder_name, step_of
from llmtrain.config.held_folder import require_in_place
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.distributed.world import World
from llmtrain.eval.errors import TaskFailed
from llmtrain.eval.failures import Failures, failed_tasks, failure_line
from llmtrain.eval.prepare import prepare_steps
from llmtrain.eval.prompts.requests import Request, responses_in_order
from llmtrain.eval.report.gauntlet import load_gauntlet
from llmtrain.eval.report.metrics import Result
from llmtrain.eval.report.results import DOCUMENTS, RESULTS, Report, truncation_note, write_results
from llmtrain.eval.report.tracking import flat_estimate, flat_metrics, tables
from llmtrain.eval.run_config import EvalRun, TaskRun, task_runs
from llmtrain.eval.runner import gauntlet_scores_of, read_tasks
from llmtrain.eval.scoring.data_parallel import DataParallel, run_requests
from llmtrain.eval.scoring.overlap import run_steps
from llmtrain.eval.scoring.scorer import HybridScorer, inference
from llmtrain.eval.task import Documents
from llmtrain.logs import run_log
from llmtrain.models.causal_lm import CausalLM
from llmtrain.train.composer_model import evaluating


class KeptResults:
    """Folder of a run's evaluations, RUN/icl: for each a folder of results as `llmtrain eval` writes. keep_answers: number of
    evaluations, the newest, whose documents are kept; None: all.

    A step that is run again after a resume replaces its folder's files. Where nothing can be written (a full disk, say), a warning
    says so and training goes on.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], keep_answers: int | None):
        self.root, self.settings, self.keep_answers = run_dir / "icl", settings, keep_answers

    def write(self, step: int, report: Report) -> None:
        folder = self.root / folder_name(step)
        try:
            require_in_place(folder)
            write_results(report, folder, settings=self.settings, picture=False)
            for old in self._older(step):
                if (old / RESULTS).is_file():  # or it is none of ours
                    shutil.rmtree(old / DOCUMENTS, ignore_errors=True)
        except OSError as error:
            run_log.warning(f"WARNING: {folder} cannot be written: {error}. Training goes on without it")

    def _older(self, step: int) -> list[Path]:
        """Folders whose documents are kept no longer. Those of later steps, of a run that was resumed before them, do not count."""
        if self.keep_answers is None:
            return []
        done = sorted(folder for folder in self.root.glob("step-" + "[0-9]" * 8) if step_of(folder) <= step)
        return done[: -self.keep_answers]


@dataclass(frozen=True)
class Prepared:
    """A task with its requests. window: most tokens read."""

    task_run: TaskRun
    documents: Documents
    requests: list[Request]
    window: int


class Evaluation(Callback):
    """Callback that logs `icl/<task>/<metric>` and its standard error every `interval` steps and after the last one.

    name: the run's. kept: folder of results. Tables of results and answers are logged as well. The constructor reads the data and
    tokenises the prompts, so that their errors are raised before training begins. The number of contexts that are cut to fit the
    model is printed, and logged as `icl/<task>/truncated`. The weights, the optimizer, the random generators and the data loader
    are not changed.
    A task that cannot be evaluated is reported once, and is among the kept failures; the others go on. Raises UserError
    if none is left.
    """

    def __init__(
        self,
        run: EvalRun,
        model: CausalLM,
        tokenizer: TextTokenizer,
        world: World,
        interval: int,
        name: str,
        kept: KeptResults,
    ):
        self.run, self.model, self.tokenizer, self.interval = run, model, tokenizer, interval
        self.name, self.kept = name, kept
        self.ranks = DataParallel(world, lambda: join_uneven_calls(model))
        self.gauntlet = load_gauntlet(run.gauntlet) if run.gauntlet else None
        self.length = min(run.max_length or model.config.max_seq_len, model.config.max_seq_len)
        self.style = run.prompt_style(tokenizer)
        tasks = task_runs(run, self.gauntlet)
        self.asked = {(one.task.name, one.shots) for one in tasks}
        failures = Failures([name])
        self.prepared = self._prepared(tasks, failures)
        self.failed = failures.listed()
        self._told: set[str] = set()
        if not self.prepared:
            raise failed_tasks(self.failed)
        if world.is_main and self.failed:
            run_log.info("\n".join([*map(failure_line, self.failed), "the other tasks are evaluated"]))

    def _prepared(self, tasks: Sequence[TaskRun], failures: Failures) -> list[Prepared]:
        """Tasks that every rank can prepare. failures: takes the others."""
        documents = read_tasks(tasks, self.run, failures)
        made: list[Prepared] = []
        for one in tasks:
            if found := documents.get(one.task.name):
                steps = prepare_steps(one, found, self.tokenizer, self.length, self.run, self.style)
                if prepared := failures.attempt([one.title], partial(run_steps, steps)):
                    window = one.task.window(self.length) - 1
                    made.append(Prepared(one, prepared.documents, prepared.requests, window))
        failures.agree(self.ranks)
        return [one for one in made if not failures.has(self.name, one.task_run.title)]

    def batch_end(self, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        last = state.max_duration is not None and state.timestamp >= state.max_duration
        if step % self.interval and not last:
            return
        title = f"{self.name}/{folder_name(step)}"
        failures = Failures([title])
        with evaluating(self.model):
            results = self.measure(title, failures)
        metrics: dict[str, Any] = dict(flat_metrics(results, self.asked))
        scores = None
        if self.gauntlet is not None:
            of_gauntlet = partial(gauntlet_scores_of, self.gauntlet, title, self.run, results)
            scores = failures.attempt([f"gauntlet {self.gauntlet.name}"], of_gauntlet)
        for name, value in scores.averages.items() if scores else ():
            metrics |= flat_estimate(f"icl/gauntlet/{name}", value)
        logger.log_metrics(metrics)
        if not self.ranks.world.is_main:
            return
        heads = (f"{one.title} {one.metrics.headline} {one.metrics.score.value:.4f}" for one in results)
        cut = (f"({one.title}: {note})" for one in results if (note := truncation_note(one)))
        new = [one for one in failures.listed() if one.title not in self._told]
        self._told.update(one.title for one in new)
        run_log.info("\n".join([f"step {step}  " + "  ".join([*heads, *cut]), *map(failure_line, new)]))
        if results:
            failed = [replace(one, models=[title]) for one in self.failed] + failures.listed()
            report = Report(self.run.name, results, self.gauntlet, {title: scores} if scores else None, failures=failed)
            self.kept.write(step, report)
            for name, columns, rows in tables(report, title):
                logger.log_table(columns, rows, name)

    def measure(self, title: str, failures: Failures) -> list[Result]:
        """Results of all tasks, of a model of this title; every rank calls this and gets the same. failures: takes the tasks that
        the model, or its answers, make fail."""
        scorer = HybridScorer(
            self.model,
            self.tokenizer,
            max_length=self.length,
            max_batch_tokens=self.run.max_batch_tokens,
            share=self.run.share_prefixes,
        )
        results = []
        for one in self.prepared:
            try:
                results.append(self._result(one, title, scorer))
            except TaskFailed as error:
                failures.add(one.task_run.title, error)
        return results

    def _result(self, one: Prepared, title: str, scorer: HybridScorer) -> Result:
        """Result of one task. Raises TaskFailed, on every rank."""
        responses = run_requests(
            one.requests,
            scorer,
            self.ranks,
            title=one.task_run.title,
            window=one.window,
            known={},
            save=lambda new: None,
            progress=lambda documents: None,
        )
        task, answers = one.task_run.task, responses_in_order(one.requests, responses)
        return Result(
            model=title,
            path=str(self.kept.root.parent),
            task=task.name,
            shots=one.task_run.shots,
            title=one.task_run.title,
            convention=self.run.convention,
            dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."),
            metrics=self.ranks.agreed(lambda: task.metrics(one.documents, one.requests, answers)),
            seconds=0.0,
            asked=len(one.documents),
            skipped=one.documents.skipped,
            style=None if task.rolling else self.style.as_json(),
        )


@contextmanager
def join_uneven_calls(model: CausalLM) -> Iterator[None]:
    """Context in which each rank may call the model as often as it needs, as torch's `Join` does for DDP.

    Before every call, ranks with work left and ranks without exchange a flag (all-reduce). A rank that has finished answers
    the calls of the others with forward passes over one token until none has work left. The rank that calls does not wait
    for the flag's value. A rank that raises also joins until the others have finished, and raises afterwards.
    """
    if not isinstance(model, FSDPModule) or dist.get_world_size() == 1:
        yield
        return
    device = model.device
    finished = False

    def announce(module: nn.Module, args: object, kwargs: object) -> None:
        if not finished:
            dist.all_reduce(torch.ones(1, dtype=torch.int32, device=device), op=dist.ReduceOp.MAX)

    hook = model.register_forward_pre_hook(announce, prepend=True, with_kwargs=True)
    try:
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            finished = True
            _shadow_calls(model, device)
            raise
        finished = True
        _shadow_calls(model, device)
    finally:
        hook.remove()


def _shadow_calls(model: CausalLM, device: torch.device) -> None:
    """Take part in the collectives of other ranks' forward passes until no rank has work left."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    while True:
        busy = torch.zeros(1, dtype=torch.int32, device=device)
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        if not busy.item():
            return
        with inference():
            model.next_logits(token, model.empty_cache(1, 1))
