"""`llmtrain bench train` with runs of its own."""

from __future__ import annotations

import csv
import json

import pytest

from llmtrain.cli import main
from tests.support.tiny import tiny_settings


@pytest.mark.slow
def test_a_sweep_trains_measures_and_leaves_only_its_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tiny.yaml").write_text(
        json.dumps(tiny_settings(tmp_path / "none", tmp_path / "run")), encoding="utf-8"
    )
    sweep = {"models": [str(tmp_path / "tiny.yaml")], "precisions": ["fp32"], "steps": 3, "warmup": 2}
    sweep |= {"gpus": [1, 2], "settings": ["train.microbatch_size=auto"]}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep), encoding="utf-8")
    out = tmp_path / "out"
    assert main(["bench", "train", str(tmp_path / "sweep.yaml"), "--out", str(out)]) == 0, capsys.readouterr().out
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [row["# GPUs"] for row in rows] == ["1", "2"]
    for row in rows:
        assert float(row["Throughput (T/s)"]) > 0 and row["GlobalBatchSize"] == "8"
        assert int(row["MicroBatchSize"]) * int(row["GradAccum"]) * int(row["# GPUs"]) == 8
    assert list((out / "runs").iterdir()) == []
