"""`llmtrain bench train` with runs of its own."""

import csv
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from tests.support.tiny import tiny_settings


def test_sigterm_ends_the_run_that_is_measured(tmp_path, monkeypatch):
    """It is a session of its own, which the signal does not reach."""
    write_sweep(tmp_path, {"precisions": ["fp32"]})
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nkill -TERM {os.getpid()}\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "train", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out")])
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def write_sweep(folder: Path, sweep: dict[str, Any]) -> None:
    """FOLDER/sweep.yaml, of one tiny model."""
    (folder / "tiny.yaml").write_text(json.dumps(tiny_settings(folder / "none", folder / "run")), encoding="utf-8")
    sweep = {"models": [str(folder / "tiny.yaml")]} | sweep
    (folder / "sweep.yaml").write_text(json.dumps(sweep), encoding="utf-8")


@pytest.mark.slow
def test_a_sweep_trains_measures_and_leaves_its_results_and_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = ["train.microbatch_size=auto"]
    write_sweep(tmp_path, {"precisions": ["fp32"], "steps": 3, "warmup": 2, "gpus": [1, 2], "settings": settings})
    out = tmp_path / "out"
    assert main(["bench", "train", str(tmp_path / "sweep.yaml"), "--out", str(out)]) == 0, capsys.readouterr().out
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [row["# GPUs"] for row in rows] == ["1", "2"]
    for row in rows:
        assert float(row["Throughput (T/s)"]) > 0 and row["GlobalBatchSize"] == "8"
        assert int(row["MicroBatchSize"]) * int(row["GradAccum"]) * int(row["# GPUs"]) == 8
    logs = [f"tiny-32-{gpus}gpu-fp32.txt" for gpus in (1, 2)]
    assert sorted(path.name for path in (out / "runs").iterdir()) == logs
