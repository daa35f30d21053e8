"""RUN/resolved.json: what a run made of the settings that its config leaves open (`auto`)."""

import json
from pathlib import Path
from typing import Any

from llmtrain.config.regular_file import read_json
from llmtrain.distributed.world import World
from llmtrain.plan.decisions import decisions
from llmtrain.schema.config import Config
from llmtrain.schema.schedule import Schedule
from llmtrain.train.build import Training

FILE = "resolved.json"
OLD_FILE = "settled.json"
"""The name of FILE in runs before 2026-11-27."""
_KEYS = ("microbatch_size", "sharding", "activation_checkpointing")


def write_resolved(folder: Path, training: Training, given: Config, world: World, schedule: Schedule) -> None:
    """Settings of _KEYS; all that the config leaves open, by setting (plan/decisions.py); the split of the ranks; lengths in
    steps. given: with `auto`. Written at each start, by one rank."""
    config, model = training.config, training.model.hybrid
    parameters = sum(p.numel() for p in model.parameters())
    decided = decisions(given, config, model.platform, model.chosen_kernels(), parameters, world.size, world.local_size)
    if "train.cuda_graphs" in decided:
        decided["train.cuda_graphs"] = "on" if training.graphs is not None else "off"
    if "train.parallel.async_tensor" in decided and model.ranks is not None:
        decided["train.parallel.async_tensor"] = "on" if model.ranks.overlapped else "off"
    ranks = {"data": world.data_size, "context": world.context, "tensor": world.tensor, "pipeline": world.pipeline}
    lengths = {"total": schedule.total, "warmup": schedule.warmup, "decay": schedule.decay}
    train = config.train.model_dump(mode="json")
    found = {key: train[key] for key in _KEYS} | {"decided": decided, "ranks": ranks, "schedule": lengths}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(found, indent=1), encoding="utf-8")


def read_resolved(folder: Path) -> dict[str, Any]:
    """Settings that a run resolved, from the file in its folder, under its name or its old one."""
    path = folder / FILE
    return read_json(path if path.exists() else folder / OLD_FILE)
