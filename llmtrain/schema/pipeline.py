"""Settings under which a model cannot be trained in stages (train.parallel.pipeline). No torch here."""

from collections.abc import Iterator
from typing import Protocol

from llmtrain.config.base import Problem
from llmtrain.models.config import ModelConfig
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.training import TrainConfig

KEY = "train.parallel.pipeline"
_VIRTUAL = "train.parallel.virtual_stages"
_ZERO_BUBBLE = (
    "cannot run: it divides a backward pass at the nodes of autograd's graph, of which a compiled layer is one (pytorch issue "
    "161904), and FSDP2 sums gradients in hooks that the divided pass leaves out (144530); use 1f1b, and for a shorter bubble "
    f"{_VIRTUAL}: 2 or more microbatches"
)


class _Config(Protocol):
    """Sections of the whole config (config.py)."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...


def pipeline_problems(config: _Config) -> Iterator[Problem]:
    """Problems on any number of ranks."""
    train, stages, virtual = config.train, config.train.parallel.pipeline, config.train.parallel.virtual_stages
    if train.parallel.schedule == "zero_bubble":
        yield Problem("train.parallel.schedule", "zero_bubble", _ZERO_BUBBLE)
    if stages == 1:
        if virtual > 1:
            yield Problem(_VIRTUAL, virtual, f"has no effect with {KEY}: 1; use 1, or more stages")
        return
    layers = len(config.model.layer_list())
    if stages > layers:
        yield Problem(KEY, stages, f"makes more stages than the model has layers ({layers}); use at most {layers}")
    elif stages * virtual > layers:
        text = f"makes {stages * virtual} parts of {layers} layers; use at most {layers // stages} with {KEY}: {stages}"
        yield Problem(_VIRTUAL, virtual, text)
    shard_size = train.sharding.shard_size
    if shard_size is not None and shard_size % train.parallel.of_stage:
        text = f"must be a multiple of the {train.parallel.of_stage} ranks of a stage that read the same samples"
        yield Problem("train.sharding.shard_size", shard_size, text)
    for name, mlp in config.model.experts().items():
        if mlp.balance.weight > 0 and mlp.balance.over == "model":
            text = f"counts the layers of all stages together; use layer, or {KEY}: 1"
            yield Problem(f"model.blocks.{name}.mlp.balance.over", "model", text)
        if mlp.balance.weight > 0 and mlp.balance.tokens == "step":
            text = (
                f"counts microbatches in turn, of which a pipeline has several under way; use microbatch, or {KEY}: 1"
            )
            yield Problem(f"model.blocks.{name}.mlp.balance.tokens", "step", text)
    refused = {
        "train.microbatch_size": (
            train.microbatch_size == "auto",
            "is tried on whole models, and the size decides how much of a pipeline is idle; use a number",
        ),
        "train.compare_ranks": (
            train.compare_ranks is not None,
            "repeats the forward pass of whole models; use null",
        ),
        "train.cuda_graphs": (
            train.cuda_graphs == "on",
            "there can be none, as stages exchange tensors within a microbatch; use auto or off",
        ),
        "optimizer.type": (
            config.optimizer.type == "muon" and any(block.shared_copies for block in config.model.blocks.values()),
            "would round the matrices of a shared block otherwise on each stage that holds it; use adamw",
        ),
    }
    for path, (is_set, text) in refused.items():
        if is_set:
            yield Problem(path, None, f"cannot be with {KEY}: {stages}: {text}")
    if train.global_batch_size < stages * train.least_microbatch:  # already of one pipeline
        yield from microbatch_problems(train, 1)


def microbatch_problems(train: TrainConfig, groups: int) -> Iterator[Problem]:
    """Fewer microbatches than stages: some stage would wait all the time. groups: of ranks that read the same samples."""
    stages = train.parallel.pipeline
    count = train.global_batch_size // (groups * train.least_microbatch)
    whom = "the pipeline" if groups == 1 else f"each of {groups} pipelines"
    if stages > 1 and count < stages:
        text = (
            f"gives {whom} {count} of the {stages} microbatches (of {train.least_microbatch}) that its {stages} stages need; "
            f"use at least {groups * train.least_microbatch * stages}, a smaller train.microbatch_size, or fewer stages"
        )
        yield Problem("train.global_batch_size", train.global_batch_size, text)
    elif stages > 1 and train.parallel.virtual_stages > 1 and count % rounds(stages, count):
        fitting = [n for n in range(stages, 2 * count) if n % rounds(stages, n) == 0]
        fewer, more = (
            groups * train.least_microbatch * n
            for n in (max(n for n in fitting if n < count), min(n for n in fitting if n > count))
        )
        text = (
            f"gives {whom} {count} microbatches, which an interleaved schedule cannot divide into "
            f"{rounds(stages, count)} equal rounds; use {fewer} or {more}, or {_VIRTUAL}: 1"
        )
        yield Problem("train.global_batch_size", train.global_batch_size, text)


def rounds(stages: int, microbatches: int) -> int:
    """Rounds of an interleaved schedule, of which each has as many microbatches, at least one per stage where there are so many."""
    return max(1, microbatches // stages)
