"""Comparing the training speed of two checkouts: order of the runs, resumption, and the verdict."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import llmtrain
from tests.support.processes import module_of

ROOT = Path(llmtrain.__file__).parents[1]
SCRIPT = ROOT / "scripts/gpu/compare_commits.py"
# A package whose training takes the time that SECONDS says, logs five steps and goes on for an hour.
CLI = """
import json, pathlib, sys, time
seconds, (run_dir,) = {seconds}, [a.partition("=")[2] for a in sys.argv if a.startswith("run_dir=")]
pathlib.Path(run_dir).mkdir(parents=True)
with open("../order.txt", "a") as order:
    order.write(pathlib.Path.cwd().name + " ")
if seconds is None:
    sys.exit("no kernel image is available")
with open(run_dir + "/metrics.jsonl", "w") as file:
    for step in range(1, 6):
        metrics = {{"throughput/step_seconds": 9.0 if step < 4 else seconds}} if step > 1 else {{}}
        file.write(json.dumps({{"step": step}} | metrics) + "\\n")
    file.flush()
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def script():
    return module_of(SCRIPT)


def checkout(folder: Path, seconds: float | None) -> Path:
    (folder / "llmtrain").mkdir(parents=True, exist_ok=True)
    (folder / "llmtrain/__init__.py").touch()
    (folder / "llmtrain/cli.py").write_text(CLI.format(seconds=seconds))
    return folder


def compare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "base", "new", str(ROOT / "yamls/bench/mpt-1b.yaml")]
    command += ["--steps", "5", "--out", "runs/mpt-1b", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_runs_alternate_and_are_made_once(tmp_path):
    checkout(tmp_path / "base", 2.0)
    checkout(tmp_path / "new", 2.01)
    first = compare(tmp_path)
    assert first.returncode == 0, first.stderr
    assert "131,072 tokens/s" in first.stdout and "NEW / BASE 0.9950: PASS (within 1 %)" in first.stdout
    assert (tmp_path / "order.txt").read_text().split() == ["base", "new", "base", "new"]
    assert compare(tmp_path, "--tolerance", "0.001").returncode == 1
    assert len((tmp_path / "order.txt").read_text().split()) == 4
    checkout(tmp_path / "new", 1.9)
    other = compare(tmp_path, "--rounds", "1")
    assert other.returncode == 1 and "NEW / BASE 1.0526: FAIL" in other.stdout
    assert (tmp_path / "order.txt").read_text().split()[4:] == ["base", "new"]


@pytest.mark.slow
def test_a_comparison_that_was_cut_short_goes_on(tmp_path):
    checkout(tmp_path / "base", 2.0)
    checkout(tmp_path / "new", 2.0)
    assert compare(tmp_path, "--rounds", "1").returncode == 0
    assert compare(tmp_path).returncode == 0
    assert (tmp_path / "order.txt").read_text().split() == ["base", "new", "base", "new"]


@pytest.mark.slow
def test_a_training_that_fails_is_shown(tmp_path):
    checkout(tmp_path / "base", None)
    checkout(tmp_path / "new", 2.0)
    failed = compare(tmp_path)
    assert failed.returncode == 1 and "no kernel image is available" in failed.stderr
    (tmp_path / "new/llmtrain/cli.py").unlink()
    refused = compare(tmp_path)
    assert refused.returncode == 2 and "new is no checkout" in refused.stderr


def test_only_complete_lines_and_steps_after_the_third_count(script, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert script.step_seconds(metrics, 5) == []
    lines = [json.dumps({"step": step, script.METRIC: float(step)}) + "\n" for step in range(2, 8)]
    metrics.write_text("".join(lines) + '{"step": 8, "thr')
    assert script.step_seconds(metrics, 6) == [4.0, 5.0, 6.0]
