"""A rank that imports what it will need, and then waits for its turn on the GPUs: Python runs this file at its start where this
folder is among those of PYTHONPATH. `benchmarks many_gpus` starts the ranks of a program while those of the one before train.

TURN: file whose existence says that the GPUs are free; TURN_IMPORTS: modules, by commas. Processes that are no ranks, and those
that a rank starts later, do not wait.
"""

import contextlib
import importlib
import os
import signal
import time
from pathlib import Path

_turn = os.environ.get("TURN")
if _turn and "RANK" in os.environ and not Path(_turn).exists():
    _handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for _name in os.environ.get("TURN_IMPORTS", "torch").split(","):
        with contextlib.suppress(ImportError):  # what it is needed for says what is missing
            importlib.import_module(_name)
    for _number, _handler in _handlers.items():  # Composer sets its own
        signal.signal(_number, _handler)
    while not Path(_turn).exists():
        time.sleep(0.05)
