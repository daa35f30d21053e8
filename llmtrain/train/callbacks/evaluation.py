"""In-context-learning tasks during training: scored every so many steps, by all ranks together."""

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
from llmtrain.eval.report.gauntlet import load_gauntlet
from llmtrain.eval.report.results import Result, cut_to_fit, flat
from llmtrain.eval.run_config import Chosen, EvalRun, chosen_tasks
from llmtrain.eval.runner import read_documents, scores_of
from llmtrain.eval.scoring.data_parallel import Team, answer, in_order
from llmtrain.eval.scoring.fsdp_sync import lockstep
from llmtrain.eval.scoring.request import Generate, Score
from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.eval.task import Documents
from llmtrain.logs import run_log
from llmtrain.models.hybrid import HybridLM


@dataclass(frozen=True)
class Prepared:
    """A task with all its requests; window: most tokens that are read."""

    chosen: Chosen
    documents: Documents
    requests: list[Score | Generate]
    window: int


class Evaluation(Callback):
    """Logs `icl/<task>/<metric>` every `interval` steps and after the last one.

    Data are read, and prompts tokenised, at construction, so that an error in them comes before training begins. The number
    of contexts cut to fit the model is shown, and logged as `icl/<task>/truncated`.
    The weights, the optimizer, the random generators and the data are left as they are.
    Raises EvalError for a task or data file that cannot be used.
    """

    def __init__(self, run: EvalRun, model: HybridLM, tokenizer: TextTokenizer, world: World, interval: int):
        self.run, self.model, self.tokenizer, self.interval = run, model, tokenizer, interval
        self.team = Team(world, lambda: lockstep(model))
        self.gauntlet = load_gauntlet(run.gauntlet) if run.gauntlet else None
        tasks = chosen_tasks(run, self.gauntlet)
        documents = read_documents(tasks, run.limit)
        self.length = min(run.max_length or model.config.max_seq_len, model.config.max_seq_len)
        self.prepared: list[Prepared] = []
        for chosen in tasks:
            task, found = chosen.task, documents[chosen.task.name]
            window = task.window(self.length) - 1
            requests = task.requests(found, tokenizer, chosen.shots, max_seq_len=window, pmi=run.pmi)
            task.check_fit(found, requests, self.length)
            self.prepared.append(Prepared(chosen, found, requests, window))

    def batch_end(self, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        last = state.max_duration is not None and state.timestamp >= state.max_duration
        if step % self.interval and not last:
            return
        with evaluating(self.model):
            results = self.measure()
        metrics: dict[str, Any] = dict(flat(results))
        if self.gauntlet is not None:
            scores = scores_of(self.gauntlet, "", self.run, results)
            metrics |= {f"icl/gauntlet/{name}": value.value for name, value in scores.averages.items()}
        logger.log_metrics(metrics)
        if self.team.world.is_main:
            heads = (f"{one.title} {one.metrics.headline} {one.metrics.score.value:.4f}" for one in results)
            cut = (f"({one.title}: {note})" for one in results if (note := cut_to_fit(one)))
            run_log.info(f"step {step}  " + "  ".join([*heads, *cut]))

    def measure(self) -> list[Result]:
        """Score every task. Every rank calls this, and gets the same results."""
        scorer = HybridScorer(
            self.model,
            self.tokenizer,
            max_length=self.length,
            max_batch_tokens=self.run.max_batch_tokens,
            share=self.run.share_prefixes,
        )
        results = []
        for one in self.prepared:
            answers = answer(
                one.requests,
                scorer,
                self.team,
                title=one.chosen.title,
                window=one.window,
                known={},
                keep=lambda new: None,
                progress=lambda documents: None,
            )
            task = one.chosen.task
            metrics = task.metrics(one.documents, one.requests, in_order(one.requests, answers))
            results.append(
                Result(
                    model="",
                    path="",
                    task=task.name,
                    shots=one.chosen.shots,
                    title=one.chosen.title,
                    convention=self.run.convention,
                    dtype=str(self.model.embed.weight.dtype).removeprefix("torch."),
                    metrics=metrics,
                    seconds=0.0,
                    asked=len(one.documents),
                )
            )
        return results


@contextmanager
def evaluating(model: HybridLM) -> Iterator[None]:
    """The model in eval mode; afterwards as it was, its weights sharded.

    FSDP2 leaves the root's weights gathered after a forward pass, for the backward pass that follows in training. Here
    none follows. They are resharded after each call, so that decoding sees sharded weights (and records no CUDA graph
    then), and all others at the end.
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
