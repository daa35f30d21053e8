"""What a process keeps beside its objects: the tests of a file leave it as they would like to find it."""

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
LOGGERS = ("", "llmtrain", "composer", "streaming", "lm_eval", "torch", "transformers")
KEYED_ON_VARIABLES = {
    "llmtrain.kernels.tuning": ("_select", "_exact", "own_rows"),
    "llmtrain.kernels.attention.measured": ("_models",),
    "llmtrain.data.sources.storage": ("_s3", "_hub"),
    "llmtrain.eval.instructions": ("_sentence_tokenizer",),
    "llmtrain.eval.lm_eval.index": ("_scan_installed",),
    "llmtrain.models.mixers.replay": ("_warn",),
}
"""Caches of functions whose results depend on variables of the environment or on files, or that warn once."""


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Inside, a run may set RANK and MASTER_PORT, join a process group, compile, choose numbers of another width. Afterwards the
    environment, folder, signals, loggers and search path are as before, and torch is as it is imported."""
    environment, folder, path, collects = dict(os.environ), os.getcwd(), list(sys.path), gc.isenabled()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    (gc.enable if collects else gc.disable)()
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    for name, cached in KEYED_ON_VARIABLES.items():
        for function in cached if name in sys.modules else ():
            getattr(sys.modules[name], function).cache_clear()
    if tuning := sys.modules.get("llmtrain.kernels.tuning"):
        for kept in tuning.BY_ROWS:
            kept.clear()
    if "torch" in sys.modules:
        _restore_torch(sys.modules["torch"])


def _restore_torch(torch: Any) -> None:
    if "torch.distributed" in sys.modules and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)  # what draws without a generator of its own draws the same beside any other file
    if "torch._dynamo" in sys.modules:  # it keeps eight compilations of a function, over all the files of a worker
        torch._dynamo.reset()
    from torch.utils._config_module import ConfigModule

    for module in [one for one in sys.modules.values() if isinstance(one, ConfigModule)]:
        for entry in module._config.values():  # such as recompile_limit, which each run of many kinds of layers raises
            entry.user_override = type(entry).user_override
        module._is_dirty = True
