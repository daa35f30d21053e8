"""Results that a run keeps of its evaluations: RUN/icl/step-N, a folder of results as `llmtrain eval` writes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.local import folder_name, step_of
from llmtrain.config.held_folder import require_in_place
from llmtrain.eval.report.results import DOCUMENTS, RESULTS, Report, write_results
from llmtrain.logs import run_log


class KeptResults:
    """Folder of a run's evaluations. keep_answers: number of evaluations, the newest, whose documents are kept; None: all.

    A step that is run again after a resume replaces its folder's files. Where nothing can be written (a full disk, say), a warning
    says so and training goes on.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], keep_answers: int | None):
        self.root, self.settings, self.keep_answers = run_dir / "icl", settings, keep_answers

    def write(self, step: int, report: Report) -> None:
        folder = self.root / folder_name(step)
        try:
            require_in_place(folder)
            write_results(report, folder, settings=self.settings, picture=False)
            for old in self._older(step):
                if (old / RESULTS).is_file():  # or it is none of ours
                    shutil.rmtree(old / DOCUMENTS, ignore_errors=True)
        except OSError as error:
            run_log.warning(f"WARNING: {folder} cannot be written: {error}. Training goes on without it")

    def _older(self, step: int) -> list[Path]:
        """Folders whose documents are kept no longer. Those of later steps, of a run that was resumed before them, do not count."""
        if self.keep_answers is None:
            return []
        done = sorted(folder for folder in self.root.glob("step-" + "[0-9]" * 8) if step_of(folder) <= step)
        return done[: -self.keep_answers]
