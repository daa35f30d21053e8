"""A config becomes a trained model; read from top to bottom."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, Evaluator, State

from llmtrain.adapt.base import adapted
from llmtrain.adapt.float8 import compute_scales, compute_scales_after_steps
from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.beneath import base_of
from llmtrain.checkpoint.collective import newest_checkpoint
from llmtrain.checkpoint.initial_weights import initial_checkpoint
from llmtrain.checkpoint.local import LocalCheckpoint
from llmtrain.checkpoint.partial_load import load_part
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.saver import Saver
from llmtrain.data.loader.loaders import ValidationLoader, build_train_loader, build_validation_loader
from llmtrain.data.loader.mixture import mixture_problems, mixture_report
from llmtrain.data.loader.token_dataset import TokenDataset
from llmtrain.data.shards.checks import data_fingerprint
from llmtrain.data.tokenize.tokenizer import load_tokenizer
from llmtrain.distributed.world import World, gloo_group, initialize, world_from_environment
from llmtrain.errors import UserError
from llmtrain.kernels.platform import detect
from llmtrain.logs import run_log
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.parameters import parameter_info
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.tensor_parallel import TensorRanks
from llmtrain.objectives.base import Objective, build_objective
from llmtrain.plan.automatic import resolve_auto
from llmtrain.plan.describe import parameter_sizes
from llmtrain.schema.config import Config
from llmtrain.schema.schedule import Schedule, resolve, schedule_problems
from llmtrain.train.callbacks.checkpointing import Checkpointing
from llmtrain.train.callbacks.profiling import Profiling
from llmtrain.train.callbacks.stability import Stability
from llmtrain.train.callbacks.step_rng import StepRNG
from llmtrain.train.callbacks.step_times import StepTimes
from llmtrain.train.callbacks.throughput import Throughput, token_cost
from llmtrain.train.callbacks.weight_average import WeightAverage
from llmtrain.train.composer_model import ComposerHybridLM, data_spec
from llmtrain.train.extend import extension_notice
from llmtrain.train.faults.preemption import Preemption
from llmtrain.train.faults.rewind import PassedOver, Rewind
from llmtrain.train.faults.spike_window import SpikeWindow
from llmtrain.train.graphs.cuda_graphs import graphed_loss
from llmtrain.train.microbatch import choose_microbatch, of_size
from llmtrain.train.optim import LearningRate, build_optimizer, learning_rates
from llmtrain.train.optimizers.host_state import without_state
from llmtrain.train.parallel import parallelize
from llmtrain.train.ranks.same_kernels import require_same_kernels
from llmtrain.train.ranks.shared_folder import require_shared
from llmtrain.train.ranks.tensor_gradients import TensorGradients
from llmtrain.train.report.loggers import build_loggers
from llmtrain.train.resolved import write_resolved
from llmtrain.train.resume import continued, require_same_run, tokenizer_files
from llmtrain.train.step import GradientSync, Step
from llmtrain.train.trainer import StepTrainer
from llmtrain.train.uploads import Uploads


@dataclass(frozen=True)
class Outcome:
    """The result of training. validation_loss: nats per token; None without validation data, as is bits_per_byte.
    stream_losses: the same for each validation stream, where there are several.
    uploads: still in the background; call its `finish` last."""

    folder: Path
    step: int
    tokens: int
    model: CausalLM
    schedule: Schedule
    steps_per_epoch: int
    validation_loss: float | None
    bits_per_byte: float | None
    stream_losses: dict[str, float]
    uploads: Uploads


def train(config: Config, verified: str | None = None) -> Outcome:
    """Train, or continue the run in `config.run_dir`. Every rank calls this.

    verified: save_id of a checkpoint there whose hashes were verified already.
    Raises UserError when the folder holds a run whose config means something else, or is not one for all nodes; SaveError
    when the last checkpoint could not be written; Preempted when SIGTERM ended the run early, with a checkpoint.
    """
    folder = Path(config.run_dir)
    device = initialize()
    parallel = config.train.parallel
    world = world_from_environment().split(parallel.context, parallel.tensor)
    torch.use_deterministic_algorithms(config.train.deterministic)
    checkpoint = config.checkpoint
    require_shared(folder, world)
    resumed = newest_checkpoint(
        folder / "checkpoints", verify=checkpoint.verify, warn=run_log.warning, verified=verified
    )
    config = continued(config, resumed) if resumed else config

    with torch.device("meta"):
        dtype, documents = config.train.dtype, config.data.mask_documents
        model = HybridLM(config.model, dtype=getattr(torch, dtype), documents=documents)
    require_same_kernels(config.model, model.platform, dtype, documents, world)
    causal_lm, objective = CausalLM(model, config.train.loss), build_objective(config.train.loss)
    plain = dict(model.named_parameters())
    resolved = resolved_config(config, world, device)
    # Before checkpointing wraps the layers.
    cost = token_cost(adapted(model, config.adapt), resolved.train, config.data.seq_len, device)
    segments = parallelize(causal_lm, resolved.train, world, device, config.adapt)
    ranks, added = model.ranks, {info.name for info in parameter_info(model).values()} - plain.keys()
    optimizer = build_optimizer(model, config.optimizer)
    if config.train.float8 is not None and config.train.float8.gathers:
        compute_scales_after_steps(model, optimizer)
    spikes = SpikeWindow(config.train.spike) if config.train.spike else None
    average = WeightAverage(model, config.train.ema) if config.train.ema else None
    parts: list[save_load.Part] = [part for part in (spikes, average) if part is not None]
    if config.train.microbatch_size == "auto":
        resolved = with_microbatch(config, resolved, causal_lm, objective, segments, world, device)
    graphs = graphed_loss(resolved, causal_lm, objective, world)
    if world.is_main:
        write_resolved(folder, resolved)
    peaks = learning_rates(optimizer)  # before a checkpoint brings those of its step
    loader = build_train_loader(
        config.data,
        global_batch_size=config.train.global_batch_size,
        vocab_size=config.model.vocab_size,
        replication=world.replication,
    )
    validation = validation_loader(resolved, world)
    streams = stream_samples(validation, config)
    schedule = resolved_schedule(config, len(loader), loader.dataset.samples_per_stream.tolist())
    beneath = None
    if resumed:
        # The worker compared before, but the index of remote data is here only now.
        require_same_run(config, resumed)
        # Verified before.
        load = {"manifest": resumed.require(), "verify": False, "verify_base": checkpoint.verify, "parts": parts}
        save_load.load(resumed.folder, model, optimizer, **load)
        beneath = save_load.beneath_of(model, resumed.require().base, held=resumed.read_index().tensors)
    elif config.init_from:
        if added or not config.init_from.is_whole:
            model.init_weights(config.seed)  # for what is not loaded
        initial = initial_checkpoint(config)
        arguments = (initial.fetch(), initial.require(), model, optimizer, config.init_from)
        loaded = load_part(*arguments, verify=checkpoint.verify, added=added)
        run_log.info(loaded.summary())
        beneath = save_load.beneath_of(model, base_of(initial), held=[f"model.{name}" for name in loaded.fresh])
    else:
        model.init_weights(config.seed)
    if average is not None and not resumed:
        average.begin()

    total_steps = schedule.total
    length: dict[str, Any] = {
        "tokens_per_step": config.tokens_per_step,
        "steps_per_epoch": len(loader),
        "total_steps": total_steps,
    }
    # What a longer run of this schedule would go on from.
    before_decay = schedule.decay_start if schedule.type == "wsd" and schedule.decay else None
    retention = Retention(
        checkpoint.keep_last,
        checkpoint.keep_every and max(checkpoint.keep_every.steps(**length), 1),
        also=before_decay,
    )
    saver = Saver(
        folder / "checkpoints",
        model,
        optimizer,
        retention=retention,
        background=checkpoint.background,
        group=gloo_group(),
        warn=run_log.warning,
        parts=parts,
        beneath=beneath,
    )
    scales_stale = config.train.float8 is not None and config.train.float8.gathers

    def load_again(found: LocalCheckpoint) -> None:
        save_load.load(found.folder, model, optimizer, manifest=found.require(), verify=False, parts=parts)
        if scales_stale:
            compute_scales(model)

    passed: PassedOver = list(resumed.require().data.get("passed_over", [])) if resumed else []
    rewind = None
    if spikes is not None and spikes.config.action == "rewind":
        rewind = Rewind(spikes.config, saver, spikes, load_again, passed, verify=checkpoint.verify)
    preemption = Preemption(checkpoint.grace_seconds)
    uploads = Uploads(checkpoint.remote, saver.root, retention, world, preemption)
    with without_state(optimizer):
        trainer = StepTrainer(
            Step(
                causal_lm,
                objective,
                resolved.train.least_microbatch,
                GradientSync(causal_lm, resolved.train.sharding),
                preemption.group,
                segments,
                graphs,
            ),
            model=ComposerHybridLM(causal_lm, objective, streams, segments),
            run_name=config.name,
            seed=config.seed,
            # The model comes sharded, with its own precision policy; Composer must neither wrap nor autocast it.
            precision="fp32",
            optimizers=optimizer,
            train_dataloader=data_spec(loader, objective, segments, ranks),
            eval_dataloader=evaluators(config, validation, objective, segments, ranks),
            eval_interval=f"{max(config.eval.interval.steps(**length), 1)}ba",
            max_duration=f"{total_steps}ba",
            device_train_microbatch_size=resolved.train.microbatch_size,
            callbacks=[
                StepRNG(config.seed),
                LearningRate(schedule, peaks),
                Stability(config.train, spikes, ranks and TensorGradients(model, ranks), rewind and rewind.ask),
                *([average] if average is not None else []),
                Throughput(cost),
                *([Profiling(config.train.profile, folder, world)] if config.train.profile else []),
                *([StepTimes(step_times)] if (step_times := config.logging.step_times) and world.is_main else []),
                *icl_callbacks(config, causal_lm, world, length),  # after Throughput, which does not count it
                Checkpointing(
                    saver,
                    preemption,
                    config=config.model_dump(mode="json"),
                    data_position=lambda state: data_position(state, config, passed),
                    interval=max(checkpoint.interval.steps(**length), 1),
                    also=before_decay,
                    rewind=rewind,
                    more_files=tokenizer_files(config, resumed) if world.is_main else None,
                ),
            ],
            loggers=build_loggers(config, folder, total_steps),
            progress_bar=False,
        )
    if resumed:
        trainer.state.timestamp.load_state_dict(resumed.require().clock)
        trainer.state._load_dataset_state({"train": resumed.require().data["position"]})
        run_log.info(f"resumed from {resumed.folder} (step {resumed.step} of {total_steps})")
    run_log.info(f"learning rate: {schedule}")
    if loader.dataset.order is not None and loader.dataset.num_streams > 1:
        samples = loader.dataset.samples_per_stream.tolist()
        for line in mixture_report(config.data, loader.dataset.order, samples, total_steps):
            run_log.info(line)
    if resumed and (notice := extension_notice(config, resumed.require(), schedule, len(loader))):
        run_log.info(notice)
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
        schedule,
        len(loader),
        validation_loss=final_metric(trainer.state, "cross_entropy"),
        bits_per_byte=final_metric(trainer.state, "bits_per_byte"),
        stream_losses={
            name: loss for name in streams if (loss := final_metric(trainer.state, f"{name}/cross_entropy")) is not None
        },
        uploads=uploads,
    )


def resolved_schedule(config: Config, steps_per_epoch: int, samples: Sequence[int]) -> Schedule:
    """The schedule in steps. samples: of each training stream. Raises UserError if its lengths make none, or the mixture is
    another length, which shows only now where the data was not here."""
    problems = list(schedule_problems(config, steps_per_epoch))
    if not problems:
        schedule = resolve(config, steps_per_epoch)
        problems = list(mixture_problems(config.data, config.train.global_batch_size, samples, schedule.total))
        if not problems:
            return schedule
    raise UserError("\n".join(f"{problem.path} = {problem.found} {problem.message}" for problem in problems))


def resolved_config(config: Config, world: World, device: torch.device) -> Config:
    """The config without `auto`, the same on all ranks."""
    available = None
    if device.type == "cuda":
        smallest = torch.tensor(detect(device).memory_bytes, device=device)
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN)
        available = smallest.item()
    sizes = parameter_sizes(config)
    resolved = resolve_auto(config, sizes, world.size, world.local_size, available)
    for line in resolved.reasons:
        if "microbatch_size" not in line:  # which is searched for
            run_log.info(line)
    return resolved.config


def with_microbatch(
    config: Config,
    resolved: Config,
    model: CausalLM,
    objective: Objective,
    segments: ContextParallelRanks | None,
    world: World,
    device: torch.device,
) -> Config:
    """The resolved config with the size of a microbatch that was found to be the fastest."""
    size, reason = choose_microbatch(config, resolved, model, objective, segments, world, device)
    run_log.info(reason)
    return of_size(resolved, size)


def icl_callbacks(config: Config, model: CausalLM, world: World, length: dict[str, Any]) -> list[Callback]:
    """The callback of eval.icl, if there is one. length: the run's, as arguments of Duration.steps."""
    icl = config.eval.icl
    if icl is None:
        return []
    from llmtrain.data.tokenize.stored_tokenizer import run_tokenizer_path
    from llmtrain.eval.run_config import load_eval_run
    from llmtrain.train.callbacks.evaluation import Evaluation
    from llmtrain.train.report.kept_results import KeptResults

    tokenizer = load_tokenizer(run_tokenizer_path(config.data.model_dump(mode="json")))
    run = load_eval_run(icl.file, needs_models=False)
    kept = KeptResults(Path(config.run_dir), run.model_dump(mode="json"), icl.keep_answers)
    return [Evaluation(run, model, tokenizer, world, max(icl.interval.steps(**length), 1), config.name, kept)]


def final_metric(state: State, name: str) -> float | None:
    metric = state.eval_metrics.get("validation", {}).get(name)
    value = float(metric.compute()) if metric is not None and metric.update_called else math.nan
    return value if math.isfinite(value) else None


def validation_loader(config: Config, world: World) -> ValidationLoader | None:
    size = config.eval.microbatch_size or config.train.least_microbatch
    return build_validation_loader(
        config.data,
        global_batch_size=size * world.data_size,
        max_samples=config.eval.max_samples,
        vocab_size=config.model.vocab_size,
        replication=world.replication,
    )


def stream_samples(loader: ValidationLoader | None, config: Config) -> dict[str, range]:
    """Sample ids of each validation stream that gets a loss of its own: all, where there are several."""
    if loader is None or len(loader.dataset.streams) == 1:
        return {}
    unused = loader.dataset.unused
    if unused:
        names = ", ".join(unused)
        run_log.info(
            f"WARNING: no sample of validation stream {names} is among eval.max_samples {config.eval.max_samples}"
        )
    return {name: ids for name, ids in loader.dataset.streams.items() if name not in unused}


def evaluators(
    config: Config,
    loader: ValidationLoader | None,
    objective: Objective,
    segments: ContextParallelRanks | None,
    ranks: TensorRanks | None,
) -> list[Evaluator]:
    if loader is None:
        return []
    size = config.eval.microbatch_size or config.train.least_microbatch
    spec = data_spec(loader, objective, segments, ranks)
    return [Evaluator(label="validation", dataloader=spec, device_eval_microbatch_size=size)]


def data_position(state: State, config: Config, passed: PassedOver) -> dict[str, Any]:
    """The position of a run in its data, at a step boundary: samples that were prefetched do not count."""
    dataset = state._dataset_of(state.train_dataloader)
    assert isinstance(dataset, TokenDataset)
    seen = state.timestamp.sample_in_epoch.value
    found = {"position": dataset.state_dict(seen, True), "fingerprint": data_fingerprint(config.data)}
    return found | ({"passed_over": [*passed]} if passed else {})
