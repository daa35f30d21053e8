"""`python -m benchmarks steps`: the same training steps by different kernels."""

import json

import pytest

from benchmarks.programs.training import steps
from llmtrain.config.report import ConfigError

TINY = [
    "model.d_model=32", "model.blocks.m.head_dim=16", "model.blocks.m.d_state=8", "model.blocks.m.chunk_size=16",
    "model.blocks.s.n_heads=2", "model.blocks.s.n_shared=1", "model.blocks.s.mlp.d_ff=32", "model.blocks.s.adapter_rank=2",
    "model.layers=m s+m", "model.vocab_size=64", "data.seq_len=32", "train.global_batch_size=4", "train.microbatch_size=2",
    "train.duration=5 steps", "schedule.warmup=1 steps", "train.compile=off", "train.precision=fp32",
]  # fmt: skip
FILE = "yamls/pretrain/zamba2-2.7b.yaml"


def test_every_block_takes_the_kernels_of_its_kind():
    model = steps.with_kernels(FILE, [*TINY, "model.blocks.s.norm.eps=1e-6"], "public").model
    assert {name: block.backend for name, block in model.blocks.items()} == {"m": "mamba_ssm", "s": "sdpa:flash"}  # pyright: ignore[reportAttributeAccessIssue]
    assert model.blocks["s"].norm and model.blocks["s"].norm.backend == model.norm.backend == "reference"


@pytest.mark.slow
def test_kernels_train_the_same_model_the_first_twice_and_what_cannot_serve_is_reported(capfd, tmp_path):
    out = tmp_path / "figures" / "steps.json"
    kernels = ["auto", "reference", "public"]
    assert steps.main([FILE, *TINY, "--kernels", *kernels, "--out", str(out)]) == 1
    auto, reference, public, again = json.loads(out.read_text())["rows"]
    assert [one["what"] for one in (auto, reference, public, again)] == [*kernels, "auto, again"]
    losses = auto["losses_nats"]
    assert losses == pytest.approx(reference["losses_nats"], abs=1e-4) and losses == again["losses_nats"]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.01
    assert public["failed"] == "status 2" and "needs a GPU" in capfd.readouterr().err


def test_a_row_has_the_time_by_the_clock_the_hosts_and_the_gpus():
    config = steps.with_kernels(FILE, TINY, "auto")
    measured = {"step": 0.1, "host": 0.09, "gpu": 0.025, "losses": [4.0, 3.0], "memory": 2e9}
    row = steps.figures(measured, config, [{"step_ms": 150.0}])
    expected = {
        "step_ms": 100.0,
        "host_ms": 90.0,
        "gpu_ms": 25.0,
        "tokens_per_s": 1280.0,
        "peak_gb": 2.0,
        "first_x": 1.5,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert steps.figures(measured | {"gpu": None}, config, [])["gpu_ms"] is None


def test_a_bad_override_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="layerz"):
        steps.main([FILE, "model.layerz=1"])
