"""Back to the last checkpoint after a spike, and on from its step with the data behind the spike (train.spike.action: rewind)."""

from collections.abc import Callable

from composer.core import State

from llmtrain.checkpoint.collective import newest_checkpoint
from llmtrain.checkpoint.local import LocalCheckpoint
from llmtrain.checkpoint.saver import Saver
from llmtrain.logs import run_log
from llmtrain.schema.training import SpikeConfig
from llmtrain.train.callbacks.stability import SpikeError
from llmtrain.train.faults.spike_window import SpikeWindow

PassedOver = list[list[int]]
"""[step, steps' worth of data that was passed over behind it], of every rewind so far; checkpoints hold it as `passed_over`."""


class Rewind:
    """Goes back between two steps, on all ranks alike. The loader stays where it is: the run goes on with what it gives next.

    A run that ends before its next checkpoint resumes from the one that it went back to, meets the spike again and goes back again:
    it trains what it would have trained without the interruption.

    saver: of the run's checkpoints, which has to exist first. load: loads a checkpoint into all that it holds. passed: of the
    checkpoint that the run resumed from; grows with each rewind.
    """

    def __init__(
        self,
        config: SpikeConfig,
        saver: Saver,
        spikes: SpikeWindow,
        load: Callable[[LocalCheckpoint], None],
        passed: PassedOver,
        verify: bool = True,
    ):
        self.config, self.saver, self.spikes, self.load, self.passed = config, saver, spikes, load, passed
        self.verify = verify
        self.asked = False
        self._times: tuple[int, int] = (-1, 0)  # a checkpoint's step, and how often the run went back to it

    def ask(self) -> None:
        """Go back at the next call of `perform`: this step was a spike, and was skipped."""
        self.asked = True

    def perform(self, state: State) -> bool:
        """Go back if that was asked for and there is a checkpoint; True if so. Every rank calls this between two steps.

        Raises SpikeError after max_rewinds to one checkpoint, CheckpointError where none can be used.
        """
        if not self.asked:
            return False
        self.asked = False
        self.saver.wait()
        found = newest_checkpoint(self.saver.root, verify=self.verify, warn=run_log.warning)
        step = state.timestamp.batch.value
        if found is None:
            run_log.warning(f"no checkpoint to go back to: step {step} was skipped")
            return False
        before, times = self._times
        times = times + 1 if before == found.step else 1
        if times > self.config.max_rewinds:
            raise SpikeError(
                f"a spike at step {step} after the run went back to step {found.step} {times - 1} times (train.spike.max_rewinds)"
            )
        self._times = found.step, times
        spikes = self.spikes.skipped
        self.load(found)
        self.spikes.skipped = spikes  # those since the checkpoint count too
        clock = found.require().clock
        # Epoch and place in the epoch stay those of the loader.
        state.timestamp = state.timestamp.copy(**{name: clock[name] for name in ("batch", "sample", "token")})
        self.passed.append([found.step, step - found.step])
        run_log.warning(
            f"went back from step {step} to {found.folder} (rewind {times} of {self.config.max_rewinds}): the samples of the steps "
            f"from {found.step + 1} to {step} are passed over"
        )
        return True
