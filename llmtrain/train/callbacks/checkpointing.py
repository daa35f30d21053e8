"""Checkpoints at intervals, after the last step, and at SIGTERM or Ctrl-C."""

from collections.abc import Callable, Mapping
from typing import Any

from composer.core import Callback, Event, State
from composer.loggers import Logger

from llmtrain.checkpoint.local import folder_name
from llmtrain.checkpoint.save_load import RunState
from llmtrain.checkpoint.saver import Saver
from llmtrain.data.loader.token_dataset import TokenDataset
from llmtrain.errors import Preempted
from llmtrain.train.faults.preemption import Preemption
from llmtrain.train.faults.rewind import PassedOver, Rewind


class Checkpointing(Callback):
    """Writes a checkpoint every `interval` steps, after step `also`, and after the last one, for which it waits.

    After a SIGTERM or Ctrl-C it saves, waits, and raises Preempted. Raises SaveError when a save that is waited for fails. config:
    as checkpoints hold it. fingerprint: of the training data. rewind: goes back before a step is saved.
    more_files: see RunState.
    """

    def __init__(
        self,
        saver: Saver,
        preemption: Preemption,
        config: dict[str, Any],
        fingerprint: Callable[[], str],
        interval: int,
        passed: PassedOver,
        also: int | None = None,
        rewind: Rewind | None = None,
        more_files: Mapping[str, bytes] | None = None,
    ):
        self.saver, self.preemption, self.interval, self.also = saver, preemption, interval, also
        self.rewind, self.more_files = rewind, more_files or {}
        self.config, self.fingerprint, self.passed = config, fingerprint, passed
        self.prepared = False

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event != Event.BATCH_CHECKPOINT:
            return
        if self.rewind is not None and self.rewind.perform(state):
            logger.log_metrics({"train/rewinds": len(self.rewind.passed)})
            return  # at a step that is saved
        step = state.timestamp.batch.value
        last = state.max_duration is not None and state.timestamp >= state.max_duration
        preempted = self.preemption.signalled()
        self.saver.poll()
        if not self.prepared:
            self.saver.prepare()  # the first step is slow anyway
            self.prepared = True
        if step % self.interval == 0 or step == self.also or last or preempted:
            self.save(state)
            logger.log_metrics({"checkpoint/blocked_seconds": self.saver.blocked_seconds})
        if last or preempted:
            self.saver.finish()
        if preempted and not last:
            raise Preempted(step, self.saver.root / folder_name(step), self.preemption.number)

    def save(self, state: State) -> None:
        clock = state.timestamp.state_dict()
        self.saver.save(
            RunState(
                step=state.timestamp.batch.value,
                tokens=state.timestamp.token.value,
                config=self.config,
                clock={key: value for key, value in clock.items() if isinstance(value, int)},
                data=self.data_position(state),
                more_files=self.more_files,
            )
        )

    def data_position(self, state: State) -> dict[str, Any]:
        """The position of a run in its data, at a step boundary: samples that were prefetched do not count."""
        dataset = state._dataset_of(state.train_dataloader)
        assert isinstance(dataset, TokenDataset)
        position = dataset.state_dict(state.timestamp.sample_in_epoch.value, True)
        found = {"position": position, "fingerprint": self.fingerprint()}
        return found | ({"passed_over": [*self.passed]} if self.passed else {})
