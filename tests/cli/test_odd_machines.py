"""Machines that lack something: shared memory, loopback, IPv4. The start ends with one sentence, before anything is written.

In namespaces of Linux, where they are allowed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TINY_MEMORY = "mount -t tmpfs -o size=4k x /dev/shm"
ALLOWED = (
    bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-rmn", "true"], capture_output=True).returncode
)
pytestmark = pytest.mark.skipif(not ALLOWED, reason="namespaces are not allowed here")


@pytest.mark.parametrize(
    ("preparation", "arguments", "words"),
    [
        (TINY_MEMORY, ["check", "run.yaml", "data.num_workers=2"], "data.num_workers"),
        ("", ["train", "run.yaml"], "127.0.0.1 cannot be reached"),
        ("", ["train", "run.yaml", "--nproc", "2"], "127.0.0.1 cannot be reached"),
        (
            "ip link set lo up; ip addr del 127.0.0.1/8 dev lo",
            ["train", "run.yaml", "--nproc", "2"],
            "127.0.0.1 cannot be reached (Cannot assign requested address",
        ),
    ],
    ids=["tiny shared memory", "no loopback", "no loopback, two processes", "IPv6 alone"],
)
def test_what_a_machine_lacks_is_named(project, preparation, arguments, words):
    if "ip " in preparation and not shutil.which("ip"):
        pytest.skip("there is no `ip`")
    program = [sys.executable, "-m", "llmtrain.cli", *arguments]
    shell = f'{preparation}\nexec "$@"'
    done = subprocess.run(
        ["unshare", "-rmn", "sh", "-c", shell, "sh", *program],
        capture_output=True,
        text=True,
        cwd=project.folder,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not Path(project.folder, "run").exists()
