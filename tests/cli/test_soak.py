"""A few of the kills of scripts/soak.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.project import Project

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_been(project: Project):
    status, text = project.run(sys.executable, str(SCRIPT), "--kills", "6", "--ranks", "2", timeout=1800)
    assert status == 0, text
    assert "6 kills" in text and "1 complete runs equal the undisturbed one" in text
