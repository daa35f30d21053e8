"""Programs of a model and the tests of their records, run in a process with limits: time, memory, files, and an empty folder.

These limits keep a program that errs from the run. They are no wall against one that means harm, for which a machine or a container
of its own is needed.
"""

import contextlib
import ctypes
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_MOST_BYTES = 1 << 24
"""Of a file that the program writes."""
_PR_SET_CHILD_SUBREAPER = 36


def program_of(answer: str) -> str:
    """The last fenced block of an answer; the answer itself where it has none."""
    blocks = _FENCED.findall(answer)
    return blocks[-1] if blocks else answer


def run_code(answer: str, tests: str, seconds: float, memory_gb: float) -> bool:
    """True if the program of an answer, with the tests behind it, runs to its end within the limits. For a process of its own: what
    the program leaves behind becomes this one's child, and is ended."""
    _adopt_orphans()
    mark = secrets.token_hex(16)
    # Behind the tests: a program that ends the process before them, with whatever status, does not reach it.
    text = f"{program_of(answer)}\n{tests}\nprint('\\n{mark}', flush=True)\n"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        (Path(folder) / "program.py").write_bytes(text.encode(errors="surrogatepass"))
        process = subprocess.Popen(
            [sys.executable, "-I", "program.py"],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: _limit(seconds, memory_gb),
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _end_children()
        output.seek(max(os.fstat(output.fileno()).st_size - 100, 0))
        return process.returncode == 0 and output.read().rstrip().endswith(mark.encode())


def _limit(seconds: float, memory_gb: float) -> None:
    """Limits of this process; it has just been forked."""
    for kind, most in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, int(memory_gb * 1e9)),
        (resource.RLIMIT_FSIZE, _MOST_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _adopt_orphans() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_children() -> None:
    """End what is left of children, and theirs in turn, which become children as they lose their parents."""
    folder = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):
        while found := folder.read_text().split():
            for child in map(int, found):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
