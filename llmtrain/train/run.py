"""A config becomes a trained model; read from top to bottom."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llmtrain.checkpoint.collective import newest_checkpoint
from llmtrain.config.base import Duration
from llmtrain.data.loader.loaders import build_train_loader
from llmtrain.data.loader.mixture import mixture_problems, mixture_report
from llmtrain.data.shards.checks import require_records
from llmtrain.distributed.world import initialize, world_from_environment
from llmtrain.errors import UserError
from llmtrain.logs import run_log
from llmtrain.models.causal_lm import CausalLM
from llmtrain.objectives.policy.objective import Policy
from llmtrain.schema.config import Config
from llmtrain.schema.schedule import Schedule, resolve, schedule_problems
from llmtrain.start import start_phase
from llmtrain.train.build import build
from llmtrain.train.callbacks.layer_parts import layer_parts
from llmtrain.train.callbacks.profiling import Profiling
from llmtrain.train.callbacks.samples import samples_callbacks
from llmtrain.train.callbacks.stability import Stability
from llmtrain.train.callbacks.start_report import StartReport
from llmtrain.train.callbacks.step_recorder import StepTimes
from llmtrain.train.callbacks.step_rng import StepRNG
from llmtrain.train.callbacks.throughput import Throughput
from llmtrain.train.checkpoints import Checkpoints, Uploads, require_shared, set_weights
from llmtrain.train.composer_model import ComposerHybridLM, data_spec
from llmtrain.train.extend import extension_notice
from llmtrain.train.faults.corruption import CompareRanks
from llmtrain.train.faults.watchdog import Watchdog
from llmtrain.train.optim import LearningRate
from llmtrain.train.optimizers.host_state import without_state
from llmtrain.train.pipeline.stages import shared_gradients
from llmtrain.train.reference import add_reference
from llmtrain.train.report.loggers import build_loggers
from llmtrain.train.resolved import write_resolved
from llmtrain.train.resume import continued, require_same_run, tokenizer_files
from llmtrain.train.rollouts.rollouts import rollouts_of
from llmtrain.train.trainer import StepTrainer
from llmtrain.train.validation import Validation, final_metrics, icl_callbacks


@dataclass(frozen=True)
class Outcome:
    """The result of training. validation: means of the objective's metrics; those of STREAM, where there are several, begin with
    `STREAM/`. Empty without validation data.
    uploads: still in the background; call its `finish` last."""

    folder: Path
    step: int
    tokens: int
    model: CausalLM
    schedule: Schedule
    steps_per_epoch: int
    validation: dict[str, float]
    uploads: Uploads


def train(config: Config, verified: str | None = None) -> Outcome:
    """Train, or continue the run in `config.run_dir`. Every rank calls this.

    verified: save_id of a checkpoint there whose hashes were verified already.
    Raises UserError when the folder holds a run whose config means something else, or is not one for all nodes; SaveError
    when the last checkpoint could not be written; Preempted when SIGTERM ended the run early, with a checkpoint.
    """
    folder, verify, parallel = Path(config.run_dir), config.checkpoint.verify, config.train.parallel
    with start_phase("process group"):
        device = initialize()
    world = world_from_environment().split(parallel.context, parallel.tensor, parallel.pipeline)
    torch.use_deterministic_algorithms(config.train.deterministic)
    require_shared(folder, world)
    with start_phase("search for checkpoints"):
        resumed = newest_checkpoint(folder / "checkpoints", verify=verify, warn=run_log.warning, verified=verified)
    config = continued(config, resumed) if resumed else config

    with start_phase("model, optimizer and what is auto"):
        training = build(config, world, device)
    with start_phase("training data"):
        require_records(config.data, config.objective)
        loader = build_train_loader(
            config.data,
            global_batch_size=config.samples_per_step,
            vocab_size=config.model.vocab_size,
            replication=world.replication,
            stages=world.pipeline,
            trained_only=config.objective.trained_only,
        )
    validation = Validation(training, world)
    counts = loader.dataset.samples_per_stream.tolist()
    schedule = resolved_schedule(config, len(loader), counts)
    if world.is_main:
        write_resolved(folder, training, config, world, schedule)
    if resumed:
        # The worker compared before, but the index of remote data is here only now.
        require_same_run(config, resumed)

    def steps(length: Duration) -> int:
        """A length of this run in steps, at least one."""
        known = {"steps_per_epoch": len(loader), "total_steps": schedule.total}
        return max(length.steps(tokens_per_step=config.tokens_per_step, **known), 1)

    # Before anything is computed: too few questions, or prompts that are too long, end the run.
    samples = samples_callbacks(config, training.model, steps, world.is_main)
    with start_phase("weights"):
        loaders = {"train": loader, "validation": validation.loader}
        add_reference(training, loaders, world, lambda: set_weights(training, None, device))
        beneath = set_weights(training, resumed, device)

    checkpoints = Checkpoints(training, schedule, steps, world, resumed, beneath)
    model, objective, rewind = training.model, training.objective, checkpoints.rewind
    written = config.model_dump(mode="json")
    segments, ranks, step_times = training.segments, model.hybrid.ranks, config.logging.step_times
    stability = Stability(config.train, training.spikes, shared_gradients(model), rewind and rewind.ask)
    step, compare = training.step(checkpoints.preemption.group), config.train.compare_ranks
    with start_phase("trainer of Composer"), without_state(training.optimizer):
        trainer = StepTrainer(
            step,
            model=ComposerHybridLM(model, objective, validation.streams, segments),
            run_name=config.name,
            seed=config.seed,
            # The model comes sharded, with its own precision policy; Composer must neither wrap nor autocast it.
            precision="fp32",
            optimizers=training.optimizer,
            train_dataloader=data_spec(
                loader, objective, segments, ranks, world.is_first_reader, config.objective.trained_per_sample
            ),
            eval_dataloader=validation.evaluators(),
            eval_interval=f"{steps(config.eval.interval)}ba",
            max_duration=f"{schedule.total}ba",
            device_train_microbatch_size=training.config.train.microbatch_size,
            callbacks=[
                StartReport(folder, world.is_main),
                Watchdog(folder, world),
                StepRNG(config.seed),
                *([CompareRanks(step, world, compare)] if compare else []),
                LearningRate(schedule, training.peaks),
                *layer_parts(model, stability),
                stability,
                *([training.average] if training.average is not None else []),
                Throughput(training.cost, mfu=not isinstance(training.objective, Policy)),
                *([Profiling(config.train.profile, folder, world)] if config.train.profile else []),
                *([StepTimes(step_times)] if step_times else []),
                *icl_callbacks(training, world, steps),  # after Throughput, which does not count it
                *samples,
                checkpoints.callback(written, config.data, tokenizer_files(config, resumed) if world.is_main else {}),
            ],
            loggers=build_loggers(config.logging, folder, schedule.total, config.name, written),
            progress_bar=False,
        )
    if resumed:
        trainer.state.timestamp.load_state_dict(resumed.require().clock)
        trainer.state._load_dataset_state({"train": resumed.require().data["position"]})
        run_log.info(f"resumed from {resumed.folder} (step {resumed.step} of {schedule.total})")
    run_log.info(f"learning rate: {schedule}")
    if loader.dataset.order is not None and loader.dataset.num_streams > 1:
        for line in mixture_report(config.data, loader.dataset.order, counts, schedule.total):
            run_log.info(line)
    if resumed and (notice := extension_notice(config, resumed.require(), schedule, len(loader))):
        run_log.info(notice)
    step.rollouts = rollouts_of(
        training, loader, world, checkpoints.preemption.group, lambda: trainer.state.timestamp.batch.value
    )
    with (
        checkpoints.uploads,
        checkpoints.saver,
        checkpoints.preemption,
        trainer,
        step.rollouts or contextlib.nullcontext(),
    ):
        if trainer.state.timestamp.batch.value < schedule.total:
            trainer.fit()
        elif trainer.state.evaluators:
            trainer.eval()  # complete already: report its validation loss
    return Outcome(
        folder,
        trainer.state.timestamp.batch.value,
        trainer.state.timestamp.token.value,
        model,
        schedule,
        len(loader),
        final_metrics(trainer.state),
        uploads=checkpoints.uploads,
    )


def resolved_schedule(config: Config, steps_per_epoch: int, samples: Sequence[int]) -> Schedule:
    """The schedule in steps. samples: of each training stream. Raises UserError if its lengths make none, or the mixture is
    another length, which shows only now where the data was not here."""
    problems = list(schedule_problems(config, steps_per_epoch))
    if not problems:
        schedule = resolve(config, steps_per_epoch)
        problems = list(mixture_problems(config.data, config.samples_per_step, samples, schedule.total))
        if not problems:
            return schedule
    raise UserError("\n".join(f"{problem.path} = {problem.found} {problem.message}" for problem in problems))
