"""One rank: how it ends."""

import signal
import subprocess
import sys

PROGRAM = """
import signal
from llmtrain.train.worker import run_rank
run_rank(lambda ranks: signal.raise_signal(signal.SIGBUS), "run.yaml", [], fresh=False)
"""


def test_a_fault_in_c_code_is_reported(tmp_path):
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGBUS
    assert ended.stderr.startswith("Fatal Python error: Bus error")
