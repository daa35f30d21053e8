"""A config checked against this machine: data folders, the run's folder, eval tasks, initial weights; and its parameter
groups and float8 patterns against the model's names. No torch here, unless there are some."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain.checkpoint.local import misplaced
from llmtrain.config.base import Problem
from llmtrain.config.output_folder import unwritable_reason
from llmtrain.data.prepare_problems import prepare_problems
from llmtrain.data.shards.checks import (
    check_streams,
    check_trained,
    check_vocabulary,
    record_problems,
    steps_per_epoch,
    stream_samples,
)
from llmtrain.data.tokenize.end_of_document import check_documents
from llmtrain.errors import UserError
from llmtrain.schema.config import Config
from llmtrain.schema.load import Check, load_config
from llmtrain.schema.schedule import schedule_problems

_SHARED_MEMORY, _LEAST_SHARED = "/dev/shm", 1 << 20
"""Where processes share memory, and the bytes of it without which not even small batches pass."""


def load_runnable(
    path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None, fresh: bool = False
) -> Config:
    """Read a config and check that it can run here. fresh: it will not continue an earlier run in its folder.

    Raises ConfigError, which holds every problem, those of `load_config` among them.
    """
    checks = (
        Check(_data_problems, reads=("data", "objective")),
        Check(_shared_memory_problems, reads=("data",)),
        Check(_mixture_problems, reads=("data", "train")),
        Check(_epoch_problems, reads=("data", "train", "schedule")),
        Check(lambda config: _folder_problems(config, fresh)),
        Check(_parameter_problems, reads=("model", "adapt", "optimizer", "data", "train")),
        Check(_float8_problems, reads=("model", "train")),
        Check(_in_context_problems, reads=("eval",)),
        Check(lambda config: _initial_problems(config, fresh), reads=("model", "init_from", "run_dir", "name")),
    )
    return load_config(path, overrides, world_size=world_size, checks=checks)


def _data_problems(config: Config) -> Iterator[Problem]:
    problems = [*prepare_problems(config)] or [*check_streams(config.data, config.samples_per_step)]
    problems += check_vocabulary(config.data, config.model.vocab_size)
    problems = problems or [*record_problems(config.data, config.objective)]
    if config.objective.trained_only and not problems:
        problems += check_trained(config.data)
    yield from problems or check_documents(config.data)


def _shared_memory_problems(config: Config) -> Iterator[Problem]:
    with contextlib.suppress(OSError):  # a system without it
        free = os.statvfs(_SHARED_MEMORY).f_bavail * os.statvfs(_SHARED_MEMORY).f_bsize
        if config.data.num_workers and free < _LEAST_SHARED:
            what = f"{_SHARED_MEMORY} has {free:,} bytes free, and the loader's processes pass batches through it; "
            yield config.problem_at("data.num_workers", what + "enlarge it (docker run --shm-size 1g), or write 0")


def _mixture_problems(config: Config) -> Iterator[Problem]:
    if config.data.mixture:
        from llmtrain.data.loader.mixture import mixture_problems  # imports numpy

        duration, batch = config.train.duration, config.samples_per_step
        epoch = steps_per_epoch(config.data, batch)
        length = {"tokens_per_step": config.tokens_per_step, "steps_per_epoch": epoch, "total_steps": None}
        known = duration.unit != "epochs" or epoch is not None
        steps = duration.steps(**length) if known else None
        yield from mixture_problems(config.data, batch, stream_samples(config.data), steps)


def _epoch_problems(config: Config) -> Iterator[Problem]:
    """Problems of lengths in epochs, where the data is here; those of other lengths keep a config from being one."""
    yield from schedule_problems(config, steps_per_epoch(config.data, config.samples_per_step))


def _folder_problems(config: Config, fresh: bool) -> Iterator[Problem]:
    checkpoints = Path(config.run_dir) / "checkpoints"
    if reason := unwritable_reason(config.run_dir if fresh else checkpoints):
        yield config.problem_at("run_dir", reason)
    elif not fresh and (found := misplaced(checkpoints)):
        names = ", ".join(path.name for path in found)
        yield config.problem_at(
            "run_dir", f"{checkpoints} has something else where a checkpoint's folder belongs: {names}; move it away"
        )


def _parameter_problems(config: Config) -> Iterator[Problem]:
    """Problems of the changes that `adapt` makes, and of optimizer.groups, by the names of what is trained."""
    if config.optimizer.groups or config.adapt is not None:
        from llmtrain.adapt.base import meta_model  # imports torch
        from llmtrain.models.parameters import parameter_info
        from llmtrain.plan.stages import stage_spans, untrained
        from llmtrain.schema.parameter_groups import group_problems

        try:
            model = meta_model(config.model, config.adapt)
        except UserError as error:
            yield Problem("adapt", None, str(error))
            return
        yield from group_problems(config.optimizer, parameter_info(model).values())
        parallel = config.train.parallel
        if config.adapt is not None and parallel.pipeline > 1:
            spans_of = stage_spans(
                meta_model(config.model), config.data.seq_len, parallel.pipeline, parallel.virtual_stages
            )
            for stage in untrained(model, spans_of):
                layers = ", ".join(f"{first} to {last - 1}" for first, last in spans_of[stage])
                text = f"makes a stage {stage} of layers {layers}, of which adapt trains nothing; use fewer stages, or more targets"
                yield Problem("train.parallel.pipeline", parallel.pipeline, text)


def _float8_problems(config: Config) -> Iterator[Problem]:
    float8 = config.train.float8
    if float8 is None:
        return
    if importlib.util.find_spec("torchao") is None:
        yield Problem("train.float8", None, "needs torchao: pip install 'llmtrain[float8]'")
    if float8.exclude:
        from llmtrain.adapt.base import meta_model  # imports torch
        from llmtrain.models.float8_products import exclude_problems, float8_experts, float8_products

        model = meta_model(config.model)
        yield from exclude_problems(float8, {**float8_products(model, float8), **float8_experts(model, float8)})


def _in_context_problems(config: Config) -> Iterator[Problem]:
    """Problems of the eval YAML that eval.icl names, in its own report."""
    if config.eval.icl is None:
        return
    from llmtrain.eval.run_config import load_eval_run

    try:
        load_eval_run(config.eval.icl.file, needs_models=False)
    except UserError as error:
        yield Problem("eval.icl.file", None, str(error))


def _initial_problems(config: Config, fresh: bool) -> Iterator[Problem]:
    if config.init_from is None:
        return
    # Imported here: a dozen files that other configs do not need.
    from llmtrain.checkpoint.initial_weights import initial_problems

    yield from initial_problems(config, fresh)
