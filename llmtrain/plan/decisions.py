"""Everything that a run decides where its config leaves it open (`auto`, or null where that stands for a choice): for
RUN/resolved.json and `llmtrain describe`. docs/auto.md lists the settings."""

from collections.abc import Iterable
from typing import Any

from llmtrain.adapt.float8 import casts_by_triton
from llmtrain.kernels.platform import Platform
from llmtrain.models.backends import Chosen
from llmtrain.models.loss import loss_type
from llmtrain.plan.graph_gain import reason_against
from llmtrain.plan.memory import shard_ranks
from llmtrain.schema.config import Config


def decisions(
    given: Config,
    config: Config,
    platform: Platform,
    kernels: Iterable[Chosen],
    parameters: int,
    world_size: int,
    local_size: int,
) -> dict[str, Any]:
    """Values by setting, of those that `given` leaves open, and kernels: `model.blocks.NAME.backend`; those that go with it by
    their operation, as `model.blocks.NAME.conv1d`.

    config: after resolve_auto. kernels: as chosen on `platform`. parameters: of the model. local_size: ranks of a node. What shows
    only when a run starts, such as whether GPUs read each other's memory, is as it is expected to be.
    """
    train, gpu = config.train, platform.vendor != "cpu"
    compiled = train.compiles("cuda" if gpu else "cpu")
    nvidia, shards = platform.vendor == "nvidia", shard_ranks(config, world_size)
    against_graphs = reason_against(config, platform, parameters, world_size, world_size == local_size)
    found: dict[str, tuple[Any, Any]] = {
        "train.microbatch_size": (given.train.microbatch_size, train.microbatch_size),
        "train.sharding.strategy": (given.train.sharding.strategy, train.sharding.strategy),
        "train.sharding.shard_size": (given.train.sharding.shard_size, shards),
        "train.sharding.sync_every_microbatch": (
            given.train.sharding.sync_every_microbatch,
            train.sharding.sync_every_microbatch is not False and shards > train.parallel.tensor,
        ),
        "train.activation_checkpointing.type": (
            given.train.activation_checkpointing.type,
            train.activation_checkpointing.type,
        ),
        "train.loss.type": (given.train.loss.type, loss_type(train.loss, platform)),
        "train.compile": (given.train.compile, _on(compiled)),
        "train.cuda_graphs": (given.train.cuda_graphs, _on(against_graphs is None)),
        "eval.microbatch_size": (given.eval.microbatch_size, train.microbatch_size),
        "data.order": (given.data.order, config.data.order_name),
    }
    if train.parallel.tensor > 1:
        found["train.parallel.async_tensor"] = (train.parallel.async_tensor, _on(nvidia and compiled))
    if train.float8 is not None:
        casts = "triton" if casts_by_triton(train.float8, platform) else "compiled"
        found["train.float8.casts"] = (train.float8.casts, casts)
    if (rollout := given.objective.own_rollout) and (chosen := config.objective.own_rollout):
        found["objective.rollout.weights"] = (rollout.weights, chosen.weights)
    decided = {setting: value for setting, (was, value) in found.items() if was in ("auto", None)}
    return decided | _backends(kernels)


def _backends(kernels: Iterable[Chosen]) -> dict[str, Any]:
    """The backend of each kernel that its config leaves open, or of one that goes with a block's."""
    found: dict[str, Any] = {}
    for one in kernels:
        where = "model" if one.block == "model" else f"model.blocks.{one.block}"
        name = f"{where}.norm.backend" if one.kernel.operation == "norm" else f"{where}.backend"
        if name in found:
            name = f"{where}.{one.kernel.operation}"
        if one.kernel.backend == "auto":
            found[name] = one.backend or f"none: {one.refusal}"
    return found


def _on(value: bool) -> str:
    return "on" if value else "off"
