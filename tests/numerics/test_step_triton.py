"""The Triton kernels of cached decoding through Triton's interpreter, on a CPU.

In one process of its own: Triton reads TRITON_INTERPRET when it is imported. The cases are in interpreted_steps.py.
"""

import os
import subprocess
import sys
from pathlib import Path


def test_the_interpreted_kernels_agree_with_the_references():
    cases = Path(__file__).with_name("interpreted_steps.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(cases),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, cwd=cases.parents[2], env=environment, timeout=300, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
