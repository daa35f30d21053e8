"""Filters for warnings of Composer and its libraries that no user can act on."""

from __future__ import annotations

import logging
import os
import warnings


def silence_warnings() -> None:
    """Filter what every start would print. Nothing is filtered with LLMTRAIN_VERBOSE=1."""
    if os.environ.get("LLMTRAIN_VERBOSE"):
        return
    warnings.filterwarnings("ignore", module=r"(composer|streaming|torchmetrics|google|pydantic|torch_optimizer)\b.*")
    # The Trainer is given an evaluation interval also when there is no validation data.
    warnings.filterwarnings("ignore", message=r"Specifying `eval_interval")
    # Invalid escapes in torchao, which Composer imports.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logging.getLogger("composer").setLevel(logging.ERROR)
    logging.getLogger("streaming").setLevel(logging.ERROR)
    # Python's resource tracker, a process of its own, warns of StreamingDataset's segments after a failed run;
    # the next run removes them.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
