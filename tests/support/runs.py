"""Training runs inside ranks, observed."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.convert.checkpoint_tensors import CheckpointTensors
from llmtrain.schema.config import Config
from llmtrain.train import run
from llmtrain.train.report.loggers import read_metrics


class Interrupted(Exception):
    """Replacement of a kill: raised on every rank before a step, after which nothing is saved."""


class Recorder(LoggerDestination):
    """Sample ids of each step over all ranks, sorted; raises Interrupted before step `stop_before` (from 0)."""

    def __init__(self, stop_before: int | None):
        self.stop_before = stop_before
        self.samples: dict[int, list[int]] = {}

    def batch_start(self, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        if step == self.stop_before:
            raise Interrupted
        ids = dist.all_gather_object(state.batch["sample_ids"].tolist())
        self.samples[step + 1] = sorted(id for rank in ids for id in rank)


@dataclass(frozen=True)
class Run:
    """losses, samples: by step, from 1; losses of the whole run as metrics.jsonl holds them, samples of this session."""

    losses: dict[int, float]
    samples: dict[int, list[int]]
    validation: dict[int, float]


@contextlib.contextmanager
def observed_by(*observers: LoggerDestination) -> Iterator[None]:
    """Add these callbacks to every run in the context. Composer runs them (as loggers) after the others at the end of events."""
    build = run.build_loggers
    with patch.object(run, "build_loggers", lambda *args: [*build(*args), *observers]):
        yield


def train(config: Config, stop_before: int | None = None) -> Run:
    """A job for Ranks.run: trains, or continues, the run of a config."""
    recorder = Recorder(stop_before)
    with observed_by(recorder), contextlib.suppress(Interrupted):
        run.train(config)
    dist.barrier()  # rank 0 has written its last line
    return Run(
        losses=_metric(config, "loss/train/total"),
        samples=recorder.samples,
        validation=_metric(config, "metrics/validation/cross_entropy"),
    )


def _metric(config: Config, name: str) -> dict[int, float]:
    return dict(zip(*read_metrics(Path(config.run_dir) / "metrics.jsonl", name), strict=True))


def read_tensors(checkpoint: Path) -> dict[str, Any]:
    """{model.NAME: tensor, optimizer.NAME: tensor or value} of a checkpoint, unsharded, without a process group."""
    manifest = manifests.read(checkpoint)
    index = indexes.read(checkpoint, manifest)
    tensors = CheckpointTensors(checkpoint, manifest)
    found: dict[str, Any] = dict(index.values)
    for name, record in index.tensors.items():
        count = torch.Size(record.shape).numel()
        found[name] = torch.cat(list(tensors.elements(name, [count]))).reshape(record.shape)
    return found
