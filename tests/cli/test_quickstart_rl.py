"""The page of policies as a reader follows it: a short SFT, then rewards alone, which teach sums that no answer was shown for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def train(folder: Path, *arguments: str) -> list[dict[str, float]]:
    """The metrics of each step of a shipped YAML's run."""
    command = [sys.executable, "-m", "llmtrain.cli", "train", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "runs" / arguments[0] / "metrics.jsonl").read_text().splitlines()]


def of(metrics: list[dict[str, float]], name: str) -> list[float]:
    return [one[name] for one in metrics if name in one]


@pytest.mark.slow
def test_rewards_alone_teach_sums_that_were_held_out(tmp_path):
    sums = train(tmp_path, "quickstart-sums")
    shorter = ("train.duration=60 steps", "eval.interval=60 steps", "eval.samples.interval=60 steps")
    found = train(tmp_path, "quickstart-rl", *shorter, "checkpoint.interval=60 steps")
    before, after = of(found, "samples/exact_match")
    reward = of(found, "rollout/reward")
    assert before == of(sums, "samples/exact_match")[-1] < 0.6
    assert after > before + 0.1
    assert sum(reward[-10:]) / 10 > sum(reward[:10]) / 10 + 0.1
    assert of(found, "policy/kl")[0] == pytest.approx(0, abs=1e-6) and of(found, "policy/kl")[-1] > 0.01
    assert (tmp_path / "runs/quickstart-rl/loss.png").is_file()
