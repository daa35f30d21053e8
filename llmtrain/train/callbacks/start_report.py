"""Report of a start, at the end of its first step."""

import contextlib
import re
from pathlib import Path

from composer.core import Callback, State
from composer.loggers import Logger

from llmtrain.logs import log
from llmtrain.start import end_start, start_phase, table, write_start


class StartReport(Callback):
    """Takes the time of the first step, and logs and writes where the time of the start went. folder: of the run; main: rank 0.

    Metrics: start/seconds, and start/PART by the first words of a part's name.
    """

    def __init__(self, folder: Path, main: bool):
        self.folder, self.main = folder, main
        self._phase = contextlib.ExitStack()
        self._over = False

    def fit_start(self, state: State, logger: Logger) -> None:
        self._phase.enter_context(start_phase("first step, with compilation and graphs"))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._over:
            return
        self._over = True
        self._phase.close()
        parts = end_start()
        names = {name: re.sub(r"\W+", "_", re.split("[,:]", name)[0]).lower() for name in parts}
        logger.log_metrics(
            {"start/seconds": sum(parts.values()), **{f"start/{names[name]}": parts[name] for name in parts}}
        )
        if self.main:
            for line in table(parts):
                log.info(line)
            with contextlib.suppress(OSError):  # a full disk; the run goes on
                write_start(self.folder, parts)

    def close(self, state: State, logger: Logger) -> None:
        self._phase.close()  # a first step that failed
