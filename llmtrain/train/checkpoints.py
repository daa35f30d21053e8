"""The checkpoints of a training run: its first weights, saving, going back to one, and uploads."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.adapt.base import adaptations
from llmtrain.checkpoint.beneath import Beneath, base_of
from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.initial_weights import initial_checkpoint
from llmtrain.checkpoint.local import LocalCheckpoint
from llmtrain.checkpoint.partial_load import load_part, together
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.save_load import SaveError, beneath_of
from llmtrain.checkpoint.saver import Saver
from llmtrain.checkpoint.stores.open import open_store
from llmtrain.checkpoint.uploader import Uploader
from llmtrain.config.base import Duration
from llmtrain.data.shards.checks import data_fingerprint
from llmtrain.distributed.world import World, gloo_group
from llmtrain.errors import Preempted, RunError, UserError
from llmtrain.logs import run_log
from llmtrain.schema.data import DataConfig
from llmtrain.schema.schedule import Schedule
from llmtrain.train.build import Training
from llmtrain.train.callbacks.checkpointing import Checkpointing
from llmtrain.train.faults.preemption import Preemption
from llmtrain.train.faults.rewind import PassedOver, Rewind
from llmtrain.train.resume import other_tokenizers

_NO_FAULT = (OSError, UserError, RunError)
_APPEARANCE_SECONDS = 30.0
"""A network file system may show a new file to other nodes that late."""
_TOGETHER_SECONDS = 30.0
"""Well below the time after which a collective gives up."""


class Uploads:
    """Upload of the run's checkpoints to `checkpoint.remote`, if there is one, by rank 0. Never fails training.

    Every rank makes one, and uses it as a context manager. After the block call `finish`, once no other rank waits for this
    one. An exception ends the upload: for Preempted at the end of the time limit; for SaveError (a full disk), which every
    rank raises, and for any error of a lone process that is no fault of the program, when it is finished; else at once.
    """

    def __init__(self, address: str | None, root: Path, retention: Retention, world: World, preemption: Preemption):
        self._preemption, self._world, self._remote = preemption, world, address is not None
        self._uploader = Uploader(open_store(address), root, retention) if address and world.is_main else None

    def finish(self) -> None:
        """Wait until everything is uploaded, or has failed once more, which is logged."""
        self._close(None)

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        if issubclass(kind, Preempted):
            self._close(self._preemption.seconds_left)
        elif issubclass(kind, SaveError) or (self._world.size == 1 and issubclass(kind, _NO_FAULT)):
            self._wait_together()
            self._close(None)
        else:
            self._close(0.0)

    def _wait_together(self) -> None:
        """Wait on every rank until rank 0 is done: a rank that ends makes the launcher end all."""
        done = self._world.size == 1 or not self._remote
        with contextlib.suppress(RuntimeError):  # a rank is gone after all
            while not done:
                answer = [self._uploader is None or self._uploader.wait(_TOGETHER_SECONDS)]
                dist.broadcast_object_list(answer, src=0)
                done = answer[0]

    def _close(self, seconds: float | None) -> None:
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.close(seconds)


class Checkpoints:
    """A run's folder of checkpoints. `uploads`, `saver` and `preemption` are contexts, entered in this order.

    resumed: what the run goes on from. beneath: what its checkpoints leave out. steps: a length in steps.
    `uploads` is of use after its block too.
    """

    def __init__(
        self,
        training: Training,
        schedule: Schedule,
        steps: Callable[[Duration], int],
        world: World,
        resumed: LocalCheckpoint | None,
        beneath: Beneath | None,
    ):
        config = training.config.checkpoint
        # What a longer run of this schedule would go on from.
        self.also = schedule.decay_start if schedule.type == "wsd" and schedule.decay else None
        retention = Retention(config.keep_last, config.keep_every and steps(config.keep_every), also=self.also)
        self.saver = Saver(
            Path(training.config.run_dir) / "checkpoints",
            training.model.hybrid,
            training.optimizer,
            retention=retention,
            background=config.background,
            group=gloo_group(),
            warn=run_log.warning,
            parts=training.parts,
            beneath=beneath,
        )
        self.passed: PassedOver = list(resumed.require().data.get("passed_over", [])) if resumed else []
        self.rewind: Rewind | None = None
        spikes = training.spikes
        if spikes is not None and spikes.config.action == "rewind":
            self.rewind = Rewind(spikes.config, self.saver, spikes, training.go_back, self.passed, verify=config.verify)
        self.preemption = Preemption(config.grace_seconds)
        self.uploads = Uploads(config.remote, self.saver.root, retention, world, self.preemption)
        self.interval = steps(config.interval)

    def callback(self, written: dict[str, Any], data: DataConfig, more_files: Mapping[str, bytes]) -> Checkpointing:
        """written: the config as the user gave it, which checkpoints hold. more_files: see RunState."""
        fingerprint = partial(data_fingerprint, data)
        places = self.interval, self.passed, self.also, self.rewind
        return Checkpointing(self.saver, self.preemption, written, fingerprint, *places, more_files)


def set_weights(training: Training, resumed: LocalCheckpoint | None, device: torch.device) -> Beneath | None:
    """Set the weights, in the form in which they are read in training. See `_loaded`."""
    beneath = _loaded(training, resumed)
    for converter in adaptations(training.config.adapt):
        converter.finish(training.model.hybrid, device)
    return beneath


def _loaded(training: Training, resumed: LocalCheckpoint | None) -> Beneath | None:
    """The weights with which a run goes on or begins: of its checkpoint, of `init_from`, or drawn. Returns the frozen ones that its
    checkpoints may leave out, if there are any."""
    config, model = training.config, training.model.hybrid
    if resumed:
        training.load(resumed, verify_base=config.checkpoint.verify)
        return beneath_of(model, resumed.require().base, held=resumed.read_index().tensors)
    beneath = None
    if config.init_from:
        if training.added or not config.init_from.is_whole:
            # What is not loaded.
            model.init_weights(config.seed, training.added if config.init_from.is_whole else None)
        initial = initial_checkpoint(config)
        local = LocalCheckpoint(initial.fetch())
        if config.init_from.is_whole:
            for line in other_tokenizers(config, local, "the weights of init_from were trained"):
                run_log.warning(line)
        loaded = load_part(
            local.folder,
            initial.require(),
            model,
            training.optimizer,
            config.init_from,
            verify=config.checkpoint.verify,
            added=training.added,
            seed=config.seed,
        )
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, loaded, gloo_group())
        run_log.info(together(found).summary())
        beneath = beneath_of(model, base_of(initial), held=[f"model.{name}" for name in loaded.fresh])
    else:
        model.init_weights(config.seed)
        if config.adapt is not None:
            run_log.warning("adapt: the frozen weights are random ones; name the model to adapt in init_from")
    for converter in adaptations(config.adapt):
        converter.begin(model)
    if training.average is not None:
        training.average.begin()
    return beneath


def require_shared(root: Path, world: World, seconds: float = _APPEARANCE_SECONDS) -> None:
    """Raise CheckpointError, on all ranks, if `root` is another disk on some node: each rank writes and reads its part of a
    checkpoint there. Every rank calls this, first of all."""
    if world.size == world.local_size:
        return
    names = [f".rank0-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names, src=0)
    mark = root / names[0]
    if world.is_main:
        root.mkdir(parents=True, exist_ok=True)
        mark.touch()
    dist.barrier()
    deadline = time.monotonic() + seconds
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    answers: list[bool] = [False] * world.size
    dist.all_gather_object(answers, seen)
    if world.is_main:
        mark.unlink()
    if not all(answers):
        apart = [str(rank) for rank, answer in enumerate(answers) if not answer]
        raise CheckpointError(
            f"{root} is not the same folder on every node: rank(s) {', '.join(apart)} do not see what rank 0 writes there. "
            "Put run_dir on a file system that all nodes share; checkpoint.remote does not replace it"
        )
