"""What a file of tests may change in its process is as before for the next one."""

import gc
import logging
import os
import signal
import sys

import torch
import torch._dynamo
import torch._inductor.config as inductor
from composer.core import Engine

from llmtrain.kernels import tuning
from tests.support.process_state import restored


def seen() -> list[object]:
    return [
        dict(os.environ),
        os.getcwd(),
        list(sys.path),
        gc.isenabled(),
        signal.getsignal(signal.SIGUSR1),
        logging.getLogger("composer").level,
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch._dynamo.config.recompile_limit,
        inductor.comprehensive_padding,
        tuning.own_rows.cache_info().currsize,
    ]


def test_all_that_a_run_changes_is_as_before(tmp_path):
    with restored():
        pass
    before = seen()
    with restored():
        os.environ["RANK"] = "1"
        os.chdir(tmp_path)
        sys.path.insert(0, str(tmp_path))
        (gc.disable if gc.isenabled() else gc.enable)()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        logging.getLogger("composer").setLevel(logging.CRITICAL)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch._dynamo.config.recompile_limit += 100
        inductor.comprehensive_padding = False
        tuning.own_rows("sm90")
        changed = seen()
    assert not [at for at, (one, other) in enumerate(zip(before, changed, strict=True)) if one == other]
    assert seen() == before


def test_no_library_that_tests_import_has_taken_signals():
    assert Engine, "its import takes them"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
