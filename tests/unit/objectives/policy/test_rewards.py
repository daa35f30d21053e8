"""Rewards by name, and what becomes of those that raise, hang, print, end their process, or are NaN."""

import importlib.util
import math

import pytest
from pydantic import ValidationError

from llmtrain.errors import UserError
from llmtrain.objectives.policy.rewards import RewardProcess
from llmtrain.objectives.policy.sections import RewardSection

OWN = """
import os, time

def own(answer, record):
    print("printed beside the answer", flush=True)
    if answer == "hang": time.sleep(60)
    if answer == "raise": raise KeyError("no such thing")
    if answer == "lines": raise ValueError("two\\nlines")
    if answer == "exit": os._exit(3)
    if answer == "nan": return float("nan")
    if answer == "huge": return -1e300
    if answer == "text": return "many"
    if answer == "fork": os.fork()
    if answer == "stop": raise SystemExit("enough")
    if answer == "large": return 10**400
    if answer == "vector": return [1.0, 2.0]
    if answer == "unspoken": raise Unspoken
    return len(answer) / record["most"]

class Unspoken(Exception):
    def __str__(self): raise RuntimeError("no words")

number = 3
"""


def test_exact_and_regex():
    record = {"answer": " 12 "}
    with RewardProcess(RewardSection(name="exact")) as rewards:
        assert rewards.score([("12", record), (" 12\n", record), ("1 2", record), ("", record)]) == [1, 1, 0, 0]
        assert math.isnan(rewards.score([("12", {})])[0]) and rewards.failures == {"KeyError: 'answer'": 1}
    with RewardProcess(RewardSection(name="regex", pattern=r"= *(-?\d+)")) as rewards:
        answers = ["3 = 3, so = 12", "= 12 = 13", "12", "\ud800 = 12", "= 12" * 10_000]
        assert rewards.score([(one, record) for one in answers]) == [1, 0, 0, 1, 1]
    with RewardProcess(RewardSection(name="regex", pattern="a|12")) as rewards:
        assert rewards.score([("a 12", record), ("12 a", record)]) == [1, 0]


def test_a_regular_expression_that_does_not_end_costs_its_answer_alone():
    with RewardProcess(RewardSection(name="regex", pattern=r"(a+)+b", seconds=0.5)) as rewards:
        found = rewards.score([("a" * 40, {"answer": "x"}), ("aab", {"answer": "aa"})])
        assert math.isnan(found[0]) and found[1] == 1
        assert rewards.failures == {"took longer than 0.5 s, or ended its process": 1}


def test_an_own_function_may_fail_in_any_way(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    record = {"most": 4}
    with RewardProcess(RewardSection(name="function", function="mine:own", allow_code=True, seconds=1.0)) as rewards:
        answers = ["ab", "hang", "raise", "exit", "nan", "huge", "text", "lines", "abcd"]
        found = rewards.score([(one, record) for one in answers])
        assert (found[0], found[-1]) == (0.5, 1) and all(map(math.isnan, found[1:-1]))
        assert rewards.failures == {
            "took longer than 1 s, or ended its process": 2,
            "KeyError: 'no such thing'": 1,
            "ValueError: two lines": 1,
            "the reward is nan, not within ±1e+12": 1,
            "the reward is -1e+300, not within ±1e+12": 1,
            "ValueError: could not convert string to float: 'many'": 1,
        }
    for function, message in (
        ("mine:absent", "has no attribute 'absent'"),
        ("absent:own", "No module named"),
        ("mine:number", "mine:number is no function"),
    ):
        with pytest.raises(UserError, match=message):
            RewardProcess(RewardSection(name="function", function=function, allow_code=True))


def test_what_answers_twice_or_not_at_all_does_not_shift_the_rewards_of_others(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with RewardProcess(RewardSection(name="function", function="mine:own", allow_code=True, seconds=5.0)) as rewards:
        answers = ["fork", "a", "abc", "stop", "ab", "large", "vector", "unspoken", "a"]
        found = rewards.score([(one, {"most": 4}) for one in answers])
    assert found[:3] == [1.0, 0.25, 0.75] and (found[4], found[-1]) == (0.5, 0.25)
    assert [at for at, one in enumerate(found) if math.isnan(one)] == [3, 5, 6, 7]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "exct"}, "Input should be 'exact', 'regex', 'math', 'code' or 'function'"),
        ({"name": "regex"}, "pattern: is missing"),
        ({"name": "regex", "pattern": "("}, "is no regular expression"),
        ({"name": "exact", "pattern": "a"}, "pattern: is of regex alone"),
        ({"name": "function"}, "function: is missing"),
        ({"name": "function", "function": "a b"}, "expected MODULE:FUNCTION"),
        ({"name": "code"}, "runs code of the model's; true allows it"),
        ({"name": "function", "function": "a:b"}, "runs code of yours; true allows it"),
    ],
)
def test_rejects_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValidationError, match=message):
        RewardSection(**settings)


def test_math_needs_math_verify():
    if importlib.util.find_spec("math_verify") is None:
        with pytest.raises(UserError, match="reward math needs math-verify"):
            RewardProcess(RewardSection(name="math"))
        return
    with RewardProcess(RewardSection(name="math")) as rewards:
        found = rewards.score([(r"\boxed{\frac{1}{2}}", {"answer": "0.5"}), ("3", {"answer": "4"})])
        assert found == [1, 0]
