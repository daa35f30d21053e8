"""A few of the kills of scripts/soak.py, and what it finds wrong."""

import random
import sys
from pathlib import Path

import pytest

from scripts.soak import Soak, SoakError
from tests.support.project import Project

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


def test_what_only_the_disturbed_run_has_was_left_behind(tmp_path):
    for run in ("whole", "disturbed"):
        for name in ("metrics.jsonl", "resolved.json", "checkpoints/step-00000040/manifest.json"):
            (tmp_path / run / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / run / name).touch()
    soak = Soak(tmp_path, random.Random(0))
    soak.require_clean("disturbed", "whole")
    for left in ("lock.json", "checkpoints/step-00000040.partial"):
        (tmp_path / "disturbed" / left).touch()
        with pytest.raises(SoakError, match=Path(left).name):
            soak.require_clean("disturbed", "whole")
        (tmp_path / "disturbed" / left).unlink()


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_been(project: Project):
    status, text = project.run(sys.executable, str(SCRIPT), "--kills", "6", "--ranks", "2", timeout=1800)
    assert status == 0, text
    assert "6 kills" in text and "1 complete runs equal the undisturbed one" in text
