"""What ends a program that has started others."""

import signal
import subprocess
import sys
import time

from llmtrain.distributed.processes import start_time

STARTS_ANOTHER = """
import subprocess, sys, time
from llmtrain.distributed.processes import exit_on_sigterm
exit_on_sigterm()
other = subprocess.Popen(["sleep", "60"])
try:
    print(other.pid, flush=True)
    time.sleep(60)
finally:
    time.sleep(1)
    other.kill()
    other.wait()
    print("ended", flush=True)
"""


def test_a_second_sigterm_does_not_interrupt_what_the_first_ends():
    """`timeout` sends one to the program and one to its group."""
    process = subprocess.Popen([sys.executable, "-c", STARTS_ANOTHER], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    other = int(process.stdout.readline())
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    assert process.communicate() == (b"ended\n", b"")
    assert process.returncode == 143 and start_time(other) is None
