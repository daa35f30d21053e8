"""scripts/restart_times.py: what it kills."""

import os
import subprocess
import sys

from scripts.restart_times import rank_processes


def test_the_ranks_of_a_launcher_are_told_from_its_other_children():
    """One that compiles kernels stands before the ranks of a restart, also when it has ended and nobody has waited for it."""
    begun = []
    try:
        for rank in (None, None, "1", "0"):
            environment = {name: value for name, value in os.environ.items() if name != "RANK"}
            command = [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]
            known = environment | ({} if rank is None else {"RANK": rank})
            begun.append(subprocess.Popen(command, env=known, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert begun[-1].stdout.readline() == b"\n"
        begun[1].stdin.close()
        os.waitid(os.P_PID, begun[1].pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert rank_processes(os.getpid()) == {1: begun[2].pid, 0: begun[3].pid}
    finally:
        for process in begun:
            process.kill()
            process.wait()
