"""Users who start runs on one machine in the same second: no two meet at one port."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "many_starts.py"
RANK_MIB = 200
"""Memory of a rank that has imported PyTorch."""


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "ranks"), [(100, 2), (30, 8)])
def test_groups_that_start_in_the_same_second_all_succeed(groups, ranks):
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    fitting = free // RANK_MIB // ranks
    if fitting < 2:
        pytest.skip(f"{free} MiB of free memory are not enough for two groups of {ranks} ranks")
    command = [sys.executable, str(SCRIPT), "--groups", str(min(groups, fitting)), "--ranks", str(ranks)]
    done = subprocess.run([*command, "--seconds", "1800"], capture_output=True, text=True)
    assert done.returncode == 0 and f" groups of {ranks} ranks: 0 failed" in done.stdout, done.stdout
