"""benchmarks kept: the same batch on all GPUs and on each."""

import json

import pytest

from benchmarks.programs.training.kept import Case
from llmtrain.bench.train.cases import cases
from llmtrain.bench.train.sweep import load_sweep


def test_a_case_trains_the_same_batch_on_all_and_on_each(tmp_path):
    (tmp_path / "data").mkdir()
    case = Case(tmp_path, 2, "yamls/pretrain/zamba2-2.7b.yaml", 4096, 2, 16)
    programs = case.programs({"steps": 20, "warmup": 2}, ["optimizer.lr=1e-3"])
    assert [program.gpus for program in programs] == [2, 1, 1]
    for program in programs:
        [found] = cases(load_sweep(tmp_path / program.name / "sweep.yaml"), tmp_path / program.name)
        train = found.config.train
        assert (found.gpus, train.global_batch_size, train.microbatch_size) == (program.gpus, 16, 2)
        assert found.config.optimizer.lr == 1e-3


def test_what_is_kept_of_each_gpu_s_speed(tmp_path):
    case = Case(tmp_path, 2, "mpt-1b.yaml", 2048, 16, 128)
    assert case.result() == {}
    for name, speed in zip(case.folders, (95.0, 100.0, 50.0), strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text(json.dumps({"name": "a", "tokens_per_second_per_gpu": speed}))
    assert case.result() == {
        "together_tokens_per_s": 95.0,
        "alone0_tokens_per_s": 100.0,
        "kept_alone0_percent": pytest.approx(95.0),
        "alone1_tokens_per_s": 50.0,
        "kept_alone1_percent": pytest.approx(190.0),
    }
