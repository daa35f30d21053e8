"""Measurements of a run beside its training loss: validation, as a whole and by stream, and tasks of eval.icl."""

import math
from collections.abc import Callable
from pathlib import Path

from composer.core import Callback, Evaluator, State

from llmtrain.config.base import Duration
from llmtrain.data.loader.loaders import ValidationLoader, build_validation_loader
from llmtrain.distributed.world import World
from llmtrain.logs import run_log
from llmtrain.train.build import Training
from llmtrain.train.composer_model import data_spec


class Validation:
    """The validation data of a run, if it has any. streams: sample ids of each stream that gets a loss of its own: all, where there
    are several."""

    def __init__(self, training: Training, world: World):
        config = training.config
        self.training, self.counts = training, world.is_first_reader
        self.size = config.eval.microbatch_size or config.train.least_microbatch
        self.loader: ValidationLoader | None = build_validation_loader(
            config.data,
            global_batch_size=self.size * world.data_size,
            max_samples=config.eval.max_samples,
            vocab_size=config.model.vocab_size,
            replication=world.replication,
            stages=world.pipeline,
            trained_only=config.objective.trained_only,
        )
        self.streams: dict[str, range] = {}
        if self.loader is not None and len(self.loader.dataset.streams) > 1:
            unused = self.loader.dataset.unused
            if unused:
                names = ", ".join(unused)
                run_log.info(
                    f"WARNING: no sample of validation stream {names} is among eval.max_samples {config.eval.max_samples}"
                )
            self.streams = {name: ids for name, ids in self.loader.dataset.streams.items() if name not in unused}

    def evaluators(self) -> list[Evaluator]:
        if self.loader is None:
            return []
        of, ranks = self.training, self.training.model.hybrid.ranks
        spec = data_spec(self.loader, of.objective, of.segments, ranks, self.counts)
        return [Evaluator(label="validation", dataloader=spec, device_eval_microbatch_size=self.size)]


def final_metrics(state: State) -> dict[str, float]:
    """Metrics of the last validation that are finite."""
    metrics = state.eval_metrics.get("validation", {})
    values = {name: float(metric.compute()) for name, metric in metrics.items() if metric.update_called}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def icl_callbacks(training: Training, world: World, steps: Callable[[Duration], int]) -> list[Callback]:
    """The callback of eval.icl, if there is one."""
    config = training.config
    icl = config.eval.icl
    if icl is None:
        return []
    from llmtrain.data.tokenize.stored_tokenizer import load_run_tokenizer
    from llmtrain.eval.run_config import load_eval_run
    from llmtrain.train.callbacks.evaluation import Evaluation, KeptResults

    tokenizer = load_run_tokenizer(config.data.model_dump(mode="json"))
    run = load_eval_run(icl.file, needs_models=False)
    kept = KeptResults(Path(config.run_dir), run.model_dump(mode="json"), icl.keep_answers)
    return [Evaluation(run, training.model, tokenizer, world, steps(icl.interval), config.name, kept)]
