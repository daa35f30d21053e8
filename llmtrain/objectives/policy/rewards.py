"""Rewards of answers, by name, computed in a process of their own: one that hangs, breaks or is fed hostile text costs its answer.

with RewardProcess(RewardSection(name="regex", pattern=r"= (-?\\d+)")) as rewards:
    found = rewards.score([("1 + 1 = 2", {"answer": "2"})])       # [1.0]; NaN, counted in rewards.failures, where there is none
"""

import contextlib
import importlib
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from llmtrain.errors import UserError
from llmtrain.objectives.policy.code import run_code
from llmtrain.objectives.policy.sections import RewardSection

Record = Mapping[str, Any]
Function = Callable[[str, Record], float]
START_SECONDS = 60.0
"""For the process to start and to import what the reward needs."""
MOST_REWARD = 1e12
"""Sums of rewards stay within fp32, and their squares within fp64: with more, a group's standard deviation would be infinite."""


def _exact(reward: RewardSection) -> Function:
    return lambda answer, record: float(answer.strip() == _expected(record))


def _regex(reward: RewardSection) -> Function:
    pattern = re.compile(reward.pattern or "")

    def score(answer: str, record: Record) -> float:
        found = [match[1] if match.re.groups else match[0] for match in pattern.finditer(answer)]
        return float(bool(found) and (found[-1] or "").strip() == _expected(record))

    return score


def _math(reward: RewardSection) -> Function:
    try:
        found = importlib.import_module("math_verify")
    except ImportError:
        raise UserError("reward math needs math-verify: pip install 'math-verify[antlr4_13_2]>=0.9,<0.10'") from None
    parse, verify = found.parse, found.verify

    def score(answer: str, record: Record) -> float:
        # No timeouts of its own, which are signals: this process has a limit of time.
        gold = parse(_expected(record), parsing_timeout=None)
        if not gold:
            raise UserError(f"answer {_expected(record)[:40]!r} of the record is no mathematical expression")
        return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

    return score


def _own(reward: RewardSection) -> Function:
    module, _, name = str(reward.function).partition(":")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), name)


def _code(reward: RewardSection) -> Function:
    return lambda answer, record: float(run_code(answer, _expected(record), reward.seconds, reward.memory_gb))


_MAKERS: dict[str, Callable[[RewardSection], Function]] = {
    "exact": _exact,
    "regex": _regex,
    "math": _math,
    "code": _code,
    "function": _own,
}


def _expected(record: Record) -> str:
    return str(record["answer"]).strip()


class RewardProcess:
    """A process that computes a reward; `with` ends it.

    failures: numbers of answers without a reward, by reason. Raises UserError where the reward cannot be made at all.
    """

    def __init__(self, reward: RewardSection):
        self.reward, self.seconds = reward, reward.seconds
        if reward.name == "code":  # whose program has the limit, and is wrong where it reaches it
            self.seconds = 2 * reward.seconds + 5
        self.failures: Counter[str] = Counter()
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def __enter__(self) -> "RewardProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def score(self, answers: Sequence[tuple[str, Record]]) -> list[float]:
        """Reward of each (answer, record): a finite float, or NaN."""
        return [self._score(answer, record) for answer, record in answers]

    def _score(self, answer: str, record: Record) -> float:
        if self._process is None:
            self._start()
        found = self._ask({"answer": answer, "record": record}, self.seconds)
        if found is None:
            self._end()  # the next answer gets a new process
            self.failures[f"took longer than {self.seconds:g} s, or ended its process"] += 1
            return math.nan
        if "error" in found:
            self.failures[found["error"]] += 1
            return math.nan
        return found["reward"]

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "llmtrain.objectives.policy.rewards"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._rest, self._asked = b"", 0
        found = self._ask({"settings": self.reward.model_dump(mode="json")}, START_SECONDS)
        if found is None or "error" in found:
            self._end()
            reason = f"does not start within {START_SECONDS:g} s" if found is None else found["error"]
            raise UserError(f"reward {self.reward.name}: {reason}")

    def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and what it started
            self._process.communicate()
            self._process = None

    def _ask(self, what: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """The process' answer, None if none comes."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        deadline = time.monotonic() + seconds
        self._asked += 1
        try:
            self._process.stdin.write(json.dumps({**what, "number": self._asked}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" not in self._rest:
                    if not selector.select(max(0.0, deadline - time.monotonic())):
                        return None
                    if not (more := os.read(self._process.stdout.fileno(), 1 << 16)):
                        return None
                    self._rest += more
                line, self._rest = self._rest.split(b"\n", 1)
                found = json.loads(line)
                if found.pop("number") == self._asked:  # a function that forks may answer twice
                    return found


def _main() -> None:
    """Answer the lines of standard input until it ends: first the reward's settings, then answers with their records."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a function prints is no answer

    def say(what: Mapping[str, Any], to: IO[str] = answers) -> None:
        to.write(json.dumps({**what, "number": number}) + "\n")
        to.flush()

    first = json.loads(sys.stdin.readline())
    number, settings = first["number"], RewardSection.model_validate_json(json.dumps(first["settings"]))
    try:
        function = _MAKERS[settings.name](settings)
        if not callable(function):
            raise TypeError(f"{settings.function} is no function")
    except Exception as error:
        say({"error": _reason(error)})
        return
    say({})
    for line in sys.stdin:
        asked = json.loads(line)
        number = asked["number"]
        try:
            found = float(function(asked["answer"], asked["record"]))
            usable = abs(found) <= MOST_REWARD  # nor is NaN
            say({"reward": found} if usable else {"error": f"the reward is {found:g}, not within ±{MOST_REWARD:g}"})
        except Exception as error:
            say({"error": _reason(error)})


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]  # one line


if __name__ == "__main__":
    _main()
