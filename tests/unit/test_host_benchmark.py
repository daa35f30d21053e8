"""Options of benchmarks host that make no measurement."""

import pytest

from benchmarks.programs.kernels import host
from llmtrain.errors import UserError


@pytest.mark.parametrize(
    "words, told",
    [
        ("--calls 0", "^--calls 0: expected at least 11, whose fastest tenth is shown$"),
        ("--calls 10", "^--calls 10: expected at least 11"),
        ("--only norm bogus", "^--only bogus: there is mamba_mixer, attention, norm, rotary$"),
    ],
)
def test_what_makes_no_measurement_is_told_before_any_call(monkeypatch, words, told):
    monkeypatch.setattr(host, "stand_in", lambda: pytest.fail("a kernel would be launched"))
    with pytest.raises(UserError, match=told):
        host.main(words.split())
