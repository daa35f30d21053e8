"""Programs of a model in a process with limits: what is right, what is wrong, and what means harm."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.objectives.policy.code import program_of
from llmtrain.objectives.policy.rewards import RewardProcess
from llmtrain.objectives.policy.sections import RewardSection

TESTS = "assert double(4) == 8"
RIGHT = "def double(x):\n    return 2 * x"


@pytest.fixture(scope="module")
def rewards() -> Iterator[RewardProcess]:
    """In a process of its own: one that runs programs ends all of its children."""
    os.environ["SECRET_OF_THE_RUN"] = "1"
    with RewardProcess(RewardSection(name="code", allow_code=True, seconds=5.0, memory_gb=1.0)) as process:
        yield process
    del os.environ["SECRET_OF_THE_RUN"]


def test_the_program_of_an_answer_is_its_last_block():
    assert program_of("so:\n```python\na = 1\n```\nno:\n```\nb = 2\n```\n") == "b = 2\n"
    assert program_of("a = 1") == "a = 1"


PROGRAMS = {
    RIGHT: True,
    f"First.\n```python\n{RIGHT}\n```\nDone.": True,
    f"{RIGHT}\nprint('x' * 1000)": True,
    f"{RIGHT}\nimport sys; sys.stdin.read()": True,
    "def double(x): return x": False,
    "def double(x) return": False,
    "import sys; sys.exit(0)": False,
    "import os; os._exit(0)": False,
    "import time; time.sleep(100)": False,
    f"{RIGHT}\nx = bytearray(3_000_000_000)": False,
    f"{RIGHT}\nopen('a', 'wb').write(bytes(1 << 25))": False,
    f"{RIGHT}\nimport os; os.kill(os.getpid(), 9)": False,
    f"{RIGHT}\nimport os\nassert 'SECRET_OF_THE_RUN' in os.environ": False,
    "\ud800": False,
    "\0": False,
    "": False,
}
"""Answers, and whether they are right."""


def test_programs(rewards: RewardProcess):
    found = rewards.score([(answer, {"answer": TESTS}) for answer in PROGRAMS])
    assert dict(zip(PROGRAMS, found, strict=True)) == {answer: float(right) for answer, right in PROGRAMS.items()}


def test_what_a_program_leaves_behind_is_ended(rewards: RewardProcess, tmp_path: Path):
    mark = tmp_path / "alive"
    code = f"""{RIGHT}
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(2)
        open({str(mark)!r}, "w").close()
    os._exit(0)
"""
    assert rewards.score([(code, {"answer": TESTS})]) == [1.0]
    time.sleep(2.5)
    assert not mark.exists()
