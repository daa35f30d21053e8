"""Saves beside training: the step waits for a copy of the state; a thread writes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.beneath import Beneath
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.save_load import Part, RunState, SaveError
from llmtrain.checkpoint.staging import Staging

_SECONDS_AFTER_A_FAILURE = 60.0


class Saver:
    """Writes one checkpoint at a time, in the background or not. Every rank has one and calls the same methods in order.

    A save that fails in the background is reported through `warn` by `poll`, or by the next `save`; training goes on, and
    earlier checkpoints stay as they were. `finish` raises it. Use it as a context manager.

    group: a gloo group that nothing else uses: the thread's messages must not come between those of the step. It is
    destroyed at the end. warn: called on every rank. parts: what a checkpoint holds beside model and optimizer.
    beneath: the checkpoint that has what these leave out.
    blocked_seconds: duration of the last `save`, for which the step waited.
    """

    def __init__(
        self,
        root: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        retention: Retention,
        background: bool,
        group: dist.ProcessGroup,
        warn: Callable[[str], None],
        parts: Sequence[Part] = (),
        beneath: Beneath | None = None,
    ):
        self._parts, self._beneath = parts, beneath
        self.root, self.model, self.optimizer, self.retention = root, model, optimizer, retention
        self.background, self.warn = background, warn
        self._group = group
        self.blocked_seconds = 0.0
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: BaseException | None = None

    def prepare(self) -> None:
        """Allocate the buffers of background saves. Call it once the optimizer has a state: after the first step."""
        if self.background:
            self._staging.prepare(save_load.local_tensors(self._state()))

    def save(self, run: RunState) -> None:
        """Save the state as it is now. In the background: returns when it has been copied.

        Waits for an unfinished save first, with a warning. Never raises SaveError: see `poll` and `finish`.
        """
        began = time.perf_counter()
        if self._thread is not None and self.busy:
            self._thread.join()
            self.warn(
                f"checkpoint: step {run.step} waited {time.perf_counter() - began:.1f} s for the save of step "
                f"{self._step}, which was not finished; save less often or to a faster disk"
            )
        self.poll()
        self._step = run.step
        state = self._state()
        tensors = save_load.local_tensors(state)
        if self.background:
            tensors = self._staging.copy(tensors)

        def work() -> None:
            try:
                base = self._beneath and self._beneath.base
                save_load.write(self.root, state, tensors, run, self.retention, self._group, base)
            except BaseException as error:  # of any kind: it must not be lost with the thread
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()
        if not self.background:
            self._thread.join()
        self.blocked_seconds = time.perf_counter() - began

    def _state(self) -> dict[str, Any]:
        state = save_load.flat_state(self.model, self.optimizer, self._parts)
        left_out = () if self._beneath is None else self._beneath.names
        return {name: value for name, value in state.items() if name.removeprefix("model.") not in left_out}

    @property
    def busy(self) -> bool:
        """True while a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> None:
        """Report a save that has failed; never waits."""
        if not self.busy:
            self._thread = None
        if self._thread is None and self._error is not None:
            error, self._error = self._error, None
            self.warn(
                f"WARNING: the checkpoint of step {self._step} was not saved; training goes on, earlier checkpoints are "
                f"as they were: {_message(error)}"
            )

    def wait(self) -> None:
        """Wait for the last save, and report it if it failed."""
        if self._thread is not None:
            self._thread.join()
        self.poll()

    def finish(self) -> None:
        """Wait for the last save. Raises SaveError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, SaveError):
                raise error
            raise SaveError(f"the checkpoint of step {self._step} was not saved: {_message(error)}") from error

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for an unfinished save: with a time limit when training failed, since another rank may be gone."""
        if self._thread is not None:
            self._thread.join(_SECONDS_AFTER_A_FAILURE if kind else None)
            if self._thread.is_alive():
                self.warn(f"WARNING: the checkpoint of step {self._step} was given up, half written")
                return  # with the group in use
        self.poll()
        dist.destroy_process_group(self._group)


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, SaveError) else f"{type(error).__name__}: {error}"
