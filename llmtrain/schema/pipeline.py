"""Settings under which a model cannot be trained in stages (train.parallel.pipeline). No torch here."""

from collections.abc import Iterator
from typing import Protocol

from llmtrain.config.base import Problem
from llmtrain.models.config import ModelConfig
from llmtrain.objectives.section import ObjectiveSection
from llmtrain.schema.adapt import AdaptConfig
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.training import TrainConfig

KEY = "train.parallel.pipeline"


class _Config(Protocol):
    """Sections of the whole config (config.py)."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def adapt(self) -> AdaptConfig | None: ...
    @property
    def objective(self) -> ObjectiveSection: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...


def pipeline_problems(config: _Config) -> Iterator[Problem]:
    """Problems on any number of ranks."""
    train, stages = config.train, config.train.parallel.pipeline
    if stages == 1:
        return
    layers = len(config.model.layer_list())
    if stages > layers:
        yield Problem(KEY, stages, f"makes more stages than the model has layers ({layers}); use at most {layers}")
    shard_size = train.sharding.shard_size
    if shard_size is not None and shard_size % train.parallel.of_stage:
        text = f"must be a multiple of the {train.parallel.of_stage} ranks of a stage that read the same samples"
        yield Problem("train.sharding.shard_size", shard_size, text)
    if config.objective.pipeline_refusal is not None:
        text = f"{config.objective.pipeline_refusal}; use another, or {KEY}: 1"
        yield Problem("objective.type", config.objective.type_name, text)
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
        "adapt": (config.adapt is not None, "adapters are of whole models; leave it out"),
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


def microbatch_problems(train: TrainConfig, groups: int) -> Iterator[Problem]:
    """Fewer microbatches than stages: some stage would wait all the time. groups: of ranks that read the same samples."""
    stages = train.parallel.pipeline
    count = train.global_batch_size // (groups * train.least_microbatch)
    if stages > 1 and count < stages:
        text = (
            f"gives each of {groups} pipelines {count} microbatches of {train.least_microbatch}, fewer than its {stages} stages; "
            f"use at least {groups * train.least_microbatch * stages}, a smaller train.microbatch_size, or fewer stages"
        )
        yield Problem("train.global_batch_size", train.global_batch_size, text)
