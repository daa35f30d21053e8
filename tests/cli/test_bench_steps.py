"""`python -m benchmarks steps` and `.gradients`: the same training steps by different kernels."""

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
def test_kernels_train_the_same_model_the_first_twice_and_what_cannot_serve_is_told(monkeypatch, capfd, tmp_path):
    out = tmp_path / "figures" / "steps.json"
    kernels = ["auto", "reference", "public"]
    monkeypatch.setattr("sys.argv", ["steps", FILE, *TINY, "--kernels", *kernels, "--out", str(out)])
    assert steps.main() == 1
    auto, reference, public, again = json.loads(out.read_text())["steps"]
    assert [one["kernels"] for one in (auto, reference, public, again)] == [*kernels, "auto"]
    assert auto["losses"] == pytest.approx(reference["losses"], abs=1e-5) and auto["losses"] == again["losses"]
    assert len(auto["losses"]) == 5 and auto["losses"][-1] < auto["losses"][0] - 0.01
    printed = capfd.readouterr()
    assert public["failed"] == 2 and "needs a GPU" in printed.err
    assert [line.split()[0] for line in printed.out.splitlines()] == ["kernels", *kernels, "auto"]


def test_a_row_has_the_time_by_the_clock_the_hosts_and_the_gpus():
    config = steps.with_kernels(FILE, TINY, "auto")
    row = {"kernels": "auto", "seconds": 0.1, "host": 0.09, "gpu": 0.025, "losses": [4.0, 3.0], "memory": 2e9}
    assert steps.format_row(row, row, config).split()[:5] == ["auto", "100.0", "90.0", "25.0", "1,280"]
    assert steps.format_row(row | {"gpu": None}, row, config).split()[:4] == ["auto", "100.0", "90.0", "1,280"]


def test_a_bad_override_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr("sys.argv", ["steps", FILE, "model.layerz=1"])
    with pytest.raises(ConfigError, match="layerz"):
        steps.main()


def test_gradients_in_bf16_err_by_what_bf16_rounds_and_those_in_fp32_not_at_all(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gradients", FILE, *TINY, "--kernels", "auto"])
    assert gradients.main() == 0
    exactly, bf16, _, head, *lines = capsys.readouterr().out.splitlines()
    assert exactly.startswith("reference in fp32: loss 4.") and bf16.startswith("auto in bf16: loss 4.")
    assert head.split() == ["relative", "error", "of", "auto"]
    found = {kind: float(error) for kind, error in map(str.split, lines)}
    assert list(found)[:2] == ["loss", "all"] and {"embed.weight", "blocks.*.mixer.ssm.A_log"} <= set(found)
    assert 5e-4 < found["all"] < 0.05 and found["loss"] < 1e-3
    loss, exact = gradients.gradients(steps.with_kernels(FILE, TINY, "reference"), torch.float32)
    again, other = gradients.gradients(steps.with_kernels(FILE, TINY, "auto"), torch.float32)
    assert loss == pytest.approx(again, abs=1e-5) and gradients.errors(other, exact)["all"] < 1e-5


GDN = {"n_heads": 2, "key_head_dim": 8, "value_head_dim": 8, "mlp.d_ff": 32, "backend": "auto"}
ATTENTION = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "mlp.d_ff": 32}


@pytest.mark.slow
def test_ranks_that_share_sequences_have_the_gradients_of_one(monkeypatch, capsys):
    """Two microbatches, whose gradients are added up."""
    sizes = {"g": GDN, "attn": ATTENTION}
    tiny = [f"model.blocks.{name}.{key}={value}" for name, block in sizes.items() for key, value in block.items()]
    common = [one for one in TINY if "blocks" not in one and "layers" not in one]
    command = ["gradients", "yamls/pretrain/gdn-130m.yaml", *common, *tiny, "model.layers=g attn", "--kernels", "auto"]
    monkeypatch.setattr("sys.argv", [*command, "--context", "2"])
    assert gradients.main() == 0
    *losses, _, head, loss, every = capsys.readouterr().out.splitlines()[:8]
    assert [line.split(":")[0] for line in losses[-2:]] == [
        "reference in fp32, by 2 ranks",
        "auto in bf16, by 2 ranks",
    ]
    assert head.split("  ")[-2:] == ["reference in fp32, shared", "auto in bf16, shared"]
    _, _, exact, rounded = every.split()
    assert float(exact) < 1e-5 < 1e-3 < float(rounded) < 0.05 and float(loss.split()[2]) < 1e-5


def test_kernels_that_cannot_serve_are_told_before_any_gradient_is_computed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gradients", FILE, *TINY])
    with pytest.raises(ValueError, match="our Triton kernels need a GPU"):
        gradients.main()
    assert not capsys.readouterr().out


def test_the_error_of_a_kind_is_that_of_its_parameters_together():
    exact = {f"blocks.{i}.w": torch.full((2,), 1.0 + i) for i in range(2)} | {"norm.w": torch.ones(1)}
    found = exact | {"blocks.1.w": torch.tensor([2.0, 3.0])}
    assert gradients.errors(found, exact) == pytest.approx({"all": 11**-0.5, "blocks.*.w": 0.1**0.5, "norm.w": 0.0})
