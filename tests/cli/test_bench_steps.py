"""`python -m benchmarks steps` and `gradients`: the same training steps by different kernels."""

import json

import pytest
import torch

from benchmarks.programs.training import gradients, steps
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
def test_kernels_train_the_same_model_the_first_twice_and_what_cannot_serve_is_told(capfd, tmp_path):
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


def test_gradients_in_bf16_err_by_what_bf16_rounds_and_those_in_fp32_not_at_all(capsys):
    assert gradients.main([FILE, *TINY, "--kernels", "auto"]) == 0
    exactly, bf16, _, head, *lines = capsys.readouterr().out.splitlines()
    assert exactly.startswith("reference in fp32: loss 4.") and bf16.startswith("auto in bf16: loss 4.")
    assert head.split() == ["relative", "error", "of", "auto"]
    found = {kind: float(error) for kind, error in map(str.split, lines)}
    assert list(found)[:2] == ["loss", "all"] and {"embed.weight", "blocks.*.mixer.ssm.A_log"} <= set(found)
    assert 5e-4 < found["all"] < 0.05 and found["loss"] < 1e-3
    loss, exact = gradients.gradients(steps.with_kernels(FILE, TINY, "reference"), torch.float32)
    again, other = gradients.gradients(steps.with_kernels(FILE, TINY, "auto"), torch.float32)
    assert loss == pytest.approx(again, abs=1e-5) and gradients.errors(other, exact)["all"] < 1e-5


def test_kernels_that_cannot_serve_are_told_before_any_gradient_is_computed(capsys):
    with pytest.raises(ValueError, match="our Triton kernels need a GPU"):
        gradients.main([FILE, *TINY])
    assert not capsys.readouterr().out


def test_the_error_of_a_kind_is_that_of_its_parameters_together():
    exact = {f"blocks.{i}.w": torch.full((2,), 1.0 + i) for i in range(2)} | {"norm.w": torch.ones(1)}
    found = exact | {"blocks.1.w": torch.tensor([2.0, 3.0])}
    assert gradients.errors(found, exact) == pytest.approx({"all": 11**-0.5, "blocks.*.w": 0.1**0.5, "norm.w": 0.0})
