import pytest

from llmtrain.config.base import Problem
from llmtrain.config.report import ConfigError


@pytest.mark.parametrize(
    ("found", "message", "line"),
    [
        (64, "must be 32, as in /runs/pytest-648/a", "64: must be 32, as in /runs/pytest-648/a"),
        (64, "must be 32, as in /runs/64/a", "64: must be 32, as in /runs/64/a"),
        (1, "expected at most 1e+18 tokens", "1: expected at most 1e+18 tokens"),
        (2, "expected at least 2.5", "2: expected at least 2.5"),
        ("a", "expected 'abc'", "'a': expected 'abc'"),
        (6, "must divide the number of ranks (6)", "must divide the number of ranks (6)"),
        (-1, "is above -1.", "is above -1."),
        ("ab", "there is no 'ab'; did you mean 'abc'?", "there is no 'ab'; did you mean 'abc'?"),
    ],
)
def test_a_value_is_reported_unless_the_message_does(found, message, line):
    assert str(ConfigError("a.yaml", [Problem(path="model.x", message=message, found=found)])).endswith(f"  {line}")
