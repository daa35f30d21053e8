"""Evaluation of in-context-learning tasks during training, by all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from torch.distributed.fsdp import FSDPModule

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.distributed.world import World
from llmtrain.eval.prompts.requests import Request, responses_in_order
from llmtrain.eval.report.gauntlet import load_gauntlet
from llmtrain.eval.report.results import Result, flat_metrics, truncation_note
from llmtrain.eval.run_config import EvalRun, TaskRun, task_runs
from llmtrain.eval.runner import gauntlet_scores_of, read_documents
from llmtrain.eval.scoring.data_parallel import DataParallel, run_requests
from llmtrain.eval.scoring.fsdp_sync import join_uneven_calls
from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.eval.task import Documents
from llmtrain.logs import run_log
from llmtrain.models.causal_lm import CausalLM


@dataclass(frozen=True)
class Prepared:
    """A task with its requests. window: most tokens read."""

    task_run: TaskRun
    documents: Documents
    requests: list[Request]
    window: int


class Evaluation(Callback):
    """Callback that logs `icl/<task>/<metric>` every `interval` steps and after the last one.

    The constructor reads the data and tokenises the prompts, so that their errors are raised before training begins. The number of
    contexts that are cut to fit the model is printed, and logged as `icl/<task>/truncated`. The weights, the optimizer, the
    random generators and the data loader are not changed.
    Raises UserError for a task or data file that cannot be used.
    """

    def __init__(self, run: EvalRun, model: CausalLM, tokenizer: TextTokenizer, world: World, interval: int):
        self.run, self.model, self.tokenizer, self.interval = run, model, tokenizer, interval
        self.ranks = DataParallel(world, lambda: join_uneven_calls(model))
        self.gauntlet = load_gauntlet(run.gauntlet) if run.gauntlet else None
        tasks = task_runs(run, self.gauntlet)
        documents = read_documents(tasks, run.limit)
        self.length = min(run.max_length or model.config.max_seq_len, model.config.max_seq_len)
        self.prepared: list[Prepared] = []
        for task_run in tasks:
            task, found = task_run.task, documents[task_run.task.name]
            window = task.window(self.length) - 1
            requests = task.requests(found, tokenizer, task_run.shots, max_seq_len=window, pmi=run.pmi)
            task.check_lengths(found, requests, self.length)
            self.prepared.append(Prepared(task_run, found, requests, window))

    def batch_end(self, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        last = state.max_duration is not None and state.timestamp >= state.max_duration
        if step % self.interval and not last:
            return
        with evaluating(self.model):
            results = self.measure()
        metrics: dict[str, Any] = dict(flat_metrics(results))
        if self.gauntlet is not None:
            scores = gauntlet_scores_of(self.gauntlet, "", self.run, results)
            metrics |= {f"icl/gauntlet/{name}": value.value for name, value in scores.averages.items()}
        logger.log_metrics(metrics)
        if self.ranks.world.is_main:
            heads = (f"{one.title} {one.metrics.headline} {one.metrics.score.value:.4f}" for one in results)
            cut = (f"({one.title}: {note})" for one in results if (note := truncation_note(one)))
            run_log.info(f"step {step}  " + "  ".join([*heads, *cut]))

    def measure(self) -> list[Result]:
        """Results of all tasks; every rank calls this and gets the same."""
        scorer = HybridScorer(
            self.model,
            self.tokenizer,
            max_length=self.length,
            max_batch_tokens=self.run.max_batch_tokens,
            share=self.run.share_prefixes,
        )
        results = []
        for one in self.prepared:
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
            task = one.task_run.task
            metrics = task.metrics(one.documents, one.requests, responses_in_order(one.requests, responses))
            results.append(
                Result(
                    model="",
                    path="",
                    task=task.name,
                    shots=one.task_run.shots,
                    title=one.task_run.title,
                    convention=self.run.convention,
                    dtype=str(self.model.hybrid.embed.weight.dtype).removeprefix("torch."),
                    metrics=metrics,
                    seconds=0.0,
                    asked=len(one.documents),
                )
            )
        return results


@contextmanager
def evaluating(model: CausalLM) -> Iterator[None]:
    """Context with the model in eval mode; afterwards its mode is restored and its weights are sharded.

    FSDP2 keeps the root's weights gathered after a forward pass, for the backward pass that follows in training. As there is none
    here, they are resharded after each call (decoding sees sharded weights and records no CUDA graph), and all others at
    the end.
    """
    was_training = model.training
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    model.eval()
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(True, recurse=False)
    try:
        yield
    finally:
        if isinstance(model, FSDPModule):
            model.set_reshard_after_forward(False, recurse=False)
        for module in sharded:
            module.reshard()
        model.train(was_training)
