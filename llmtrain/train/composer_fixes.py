"""What we bend in Composer, each with its reason.

Most of Composer's traps are avoided rather than patched: the model comes to the Trainer already sharded (run.py,
parallel.py), the RNG and the learning rate are functions of the step (callbacks/), checkpoints are our own (checkpoint/).
"""

from __future__ import annotations

import logging
import os
import warnings


def quiet() -> None:
    """Silences what Composer and its libraries say at every start that no user can act on. LLMTRAIN_VERBOSE=1 keeps it."""
    warnings.filterwarnings("ignore", module=r"(composer|streaming|torchmetrics|google|pydantic|torch_optimizer)\b.*")
    # The trainer is told of an evaluation interval also when there is no validation data.
    warnings.filterwarnings("ignore", message=r"Specifying `eval_interval")
    # Said by invalid escapes in torchao, which Composer imports.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logging.getLogger("composer").setLevel(logging.ERROR)
    logging.getLogger("streaming").setLevel(logging.ERROR)
    # Python's resource tracker, a process of its own, complains of StreamingDataset's segments after a failed run;
    # the next run removes them.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
