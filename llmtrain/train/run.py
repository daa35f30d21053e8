"""A config becomes a trained model; read from top to bottom."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, Evaluator, State
from composer.utils import dist

from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.collective import newest_checkpoint
from llmtrain.checkpoint.initial_weights import initial_checkpoint
from llmtrain.checkpoint.partial_load import load_part
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.saver import Saver
from llmtrain.data.shards import data_fingerprint
from llmtrain.data.streaming import TokenDataset, build_train_loader, build_validation_loader
from llmtrain.data.tokenizer import load_tokenizer
from llmtrain.distributed.world import World, gloo_group, initialize, world_from_environment
from llmtrain.logs import run_log
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.train.callbacks.checkpointing import Checkpointing
from llmtrain.train.callbacks.gradient_sync import GradientSync
from llmtrain.train.callbacks.stability import Stability
from llmtrain.train.callbacks.step_rng import StepRNG
from llmtrain.train.callbacks.throughput import Throughput, token_cost
from llmtrain.train.composer_model import ComposerHybridLM, data_spec
from llmtrain.train.loggers import build_loggers
from llmtrain.train.optim import LearningRate, build_optimizer
from llmtrain.train.parallel import compute_dtype, parallelize
from llmtrain.train.preemption import Preemption
from llmtrain.train.resume import require_same_run
from llmtrain.train.shared_folder import require_shared
from llmtrain.train.uploads import Uploads


@dataclass(frozen=True)
class Outcome:
    """The result of training. validation_loss: nats per token; None without validation data, as is bits_per_byte.
    uploads: still in the background; call its `finish` last."""

    folder: Path
    step: int
    tokens: int
    model: CausalLM
    validation_loss: float | None
    bits_per_byte: float | None
    uploads: Uploads


def train(config: Config, verified: str | None = None) -> Outcome:
    """Train, or continue the run in `config.run_dir`. Every rank calls this.

    verified: save_id of a checkpoint there whose hashes were verified already.
    Raises UserError when the folder holds a run whose config means something else, or is not one for all nodes; SaveError
    when the last checkpoint could not be written; Preempted when SIGTERM ended the run early, with a checkpoint.
    """
    folder = Path(config.run_dir)
    device = initialize()
    world = world_from_environment()
    torch.use_deterministic_algorithms(config.train.deterministic)
    checkpoint = config.checkpoint
    require_shared(folder, world)
    resumed = newest_checkpoint(
        folder / "checkpoints", verify=checkpoint.verify, warn=run_log.warning, verified=verified
    )

    with torch.device("meta"):
        dtype, documents = compute_dtype(config.train.precision), config.data.mask_documents
        model = HybridLM(config.model, dtype=dtype, documents=documents)
    causal_lm = CausalLM(model, config.train.loss)
    cost = token_cost(model, config.train, config.data.seq_len, device)  # before checkpointing wraps the layers
    parallelize(causal_lm, config.train, world, device)
    optimizer = build_optimizer(model, config.optimizer)
    loader = build_train_loader(
        config.data, global_batch_size=config.train.global_batch_size, vocab_size=config.model.vocab_size
    )
    if resumed:
        # The worker compared before, but the index of remote data is here only now.
        require_same_run(config, resumed)
        save_load.load(resumed.folder, model, optimizer, manifest=resumed.require(), verify=False)  # it was
    elif config.init_from:
        if not config.init_from.is_whole:
            model.init_weights(config.seed)  # for what is not loaded
        initial = initial_checkpoint(config)
        loaded = load_part(*initial, model, optimizer, config.init_from, verify=checkpoint.verify)
        run_log.info(loaded.summary())
    else:
        model.init_weights(config.seed)

    length: dict[str, Any] = {"tokens_per_step": config.tokens_per_step, "steps_per_epoch": len(loader)}
    length["total_steps"] = total_steps = config.train.duration.steps(**length, total_steps=None)
    retention = Retention(checkpoint.keep_last, checkpoint.keep_every and max(checkpoint.keep_every.steps(**length), 1))
    saver = Saver(
        folder / "checkpoints",
        model,
        optimizer,
        retention=retention,
        background=checkpoint.background,
        group=gloo_group(),
        warn=run_log.warning,
    )
    preemption = Preemption(checkpoint.grace_seconds)
    uploads = Uploads(checkpoint.remote, saver.root, retention, world, preemption)
    trainer = Trainer(
        model=ComposerHybridLM(causal_lm),
        run_name=config.name,
        seed=config.seed,
        # The model comes sharded, with its own precision policy; Composer must neither wrap nor autocast it.
        precision="fp32",
        optimizers=optimizer,
        train_dataloader=data_spec(loader),
        eval_dataloader=evaluators(config),
        eval_interval=f"{max(config.eval.interval.steps(**length), 1)}ba",
        max_duration=f"{total_steps}ba",
        device_train_microbatch_size=config.train.microbatch_size,
        accumulate_train_batch_on_tokens=True,
        callbacks=[
            StepRNG(config.seed),
            LearningRate(config, total_steps, len(loader)),
            GradientSync(causal_lm, config.train.sharding.sync_every_microbatch),
            Stability(config.train),
            Throughput(cost),
            *in_context(config, causal_lm, world, length),  # after Throughput, which does not count it
            Checkpointing(
                saver,
                preemption,
                config=config.model_dump(mode="json"),
                data_position=lambda state: data_position(state, config),
                interval=max(checkpoint.interval.steps(**length), 1),
            ),
        ],
        loggers=build_loggers(config, folder, total_steps),
        progress_bar=False,
    )
    if resumed:
        trainer.state.timestamp.load_state_dict(resumed.require().clock)
        trainer.state._load_dataset_state({"train": resumed.require().data["position"]})
        run_log.info(f"resumed from {resumed.folder} (step {resumed.step} of {total_steps})")
    with uploads, saver, preemption, contextlib.closing(trainer):
        if trainer.state.timestamp.batch.value < total_steps:
            trainer.fit()
        elif trainer.state.evaluators:
            trainer.eval()  # complete already: report its validation loss
    clock = trainer.state.timestamp
    return Outcome(
        folder,
        clock.batch.value,
        clock.token.value,
        causal_lm,
        validation_loss=final_metric(trainer.state, "cross_entropy"),
        bits_per_byte=final_metric(trainer.state, "bits_per_byte"),
        uploads=uploads,
    )


def in_context(config: Config, model: CausalLM, world: World, length: dict[str, Any]) -> list[Callback]:
    """The callback of eval.icl, if there is one. length: the run's, as arguments of Duration.steps."""
    icl = config.eval.icl
    if icl is None:
        return []
    from llmtrain.eval.run_config import load_eval_run
    from llmtrain.generate.load import run_tokenizer_path
    from llmtrain.train.callbacks.evaluation import Evaluation

    tokenizer = load_tokenizer(run_tokenizer_path(config.data.model_dump(mode="json")))
    run = load_eval_run(icl.file, needs_models=False)
    return [Evaluation(run, model, tokenizer, world, max(icl.interval.steps(**length), 1))]


def final_metric(state: State, name: str) -> float | None:
    metric = state.eval_metrics.get("validation", {}).get(name)
    value = float(metric.compute()) if metric is not None and metric.update_called else math.nan
    return value if math.isfinite(value) else None


def evaluators(config: Config) -> list[Evaluator]:
    size = config.eval.microbatch_size or config.train.microbatch_size
    loader = build_validation_loader(
        config.data,
        global_batch_size=size * dist.get_world_size(),
        max_samples=config.eval.max_samples,
        vocab_size=config.model.vocab_size,
    )
    if loader is None:
        return []
    return [Evaluator(label="validation", dataloader=data_spec(loader), device_eval_microbatch_size=size)]


def data_position(state: State, config: Config) -> dict[str, Any]:
    """The position of a run in its data, at a step boundary: samples that were prefetched do not count."""
    dataset = state._dataset_of(state.train_dataloader)
    assert isinstance(dataset, TokenDataset)
    seen = state.timestamp.sample_in_epoch.value
    return {"position": dataset.state_dict(seen, True), "fingerprint": data_fingerprint(config.data)}
