"""Training on a GPU: compiled layers under FSDP2 in bf16, with every kind of activation checkpointing."""

import json
from pathlib import Path

import pytest
import torch

from llmtrain.eval.report.tracking import flat_metrics
from llmtrain.eval.runner import evaluate
from llmtrain.generate.load import load_model
from llmtrain.schema.load import load_config
from tests.support.evaluation import Place
from tests.support.selection import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("training"),  # they share a run that is trained first
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

KINDS = ("none", "full", "every_k", "selective")
CONFIG = """
name: gpu-test
seed: 1
model:
  vocab_size: 512
  d_model: 256
  max_seq_len: 256
  blocks:
    m: {type: mamba2, d_state: 64, head_dim: 64, chunk_size: 64}
    s: {type: shared_attention, n_heads: 4, n_shared: 2, position: {type: rotary}, mlp: {type: geglu, d_ff: 512}, adapter_rank: 8}
    a: {type: attention, n_heads: 4, n_kv_heads: 2, position: {type: rotary}, mlp: {type: swiglu, d_ff: 512}}
  layers: m s+m a s+m
data:
  seq_len: 256
  prepare: {sources: [SOURCE], out: OUT, vocab_size: 400, seq_len: 256, workers: 1, validation_fraction: 0}
train:
  duration: 8 steps
  global_batch_size: 8
  microbatch_size: 4
  precision: amp_bf16
optimizer: {lr: 1e-3}
logging: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    source = folder / "source"
    source.mkdir()
    for i, module in enumerate((json, pytest)):
        for file in Path(module.__file__).parent.glob("*.py"):
            (source / f"{i}-{file.name}").write_text(file.read_text())
    for i, file in enumerate(sorted(Path(torch.__file__).parent.glob("nn/modules/*.py"))):
        (source / f"torch-{i}.py").write_text(file.read_text())
    path = folder / "config.yaml"
    path.write_text(CONFIG.replace("SOURCE", str(source)).replace("OUT", str(folder / "data")))
    return path


def losses(config_file: Path, name: str, *overrides: str) -> list[float]:
    from llmtrain.data.prepare import prepare
    from llmtrain.train.report.loggers import read_metrics
    from llmtrain.train.run import train

    torch._dynamo.reset()  # each model compiles the same functions anew, of which it keeps twelve
    run_dir = config_file.parent / name
    config = load_config(config_file, [f"run_dir={run_dir}", *overrides])
    assert config.data.prepare is not None
    prepare(config.data.prepare, progress=False)
    train(config)
    return read_metrics(run_dir / "metrics.jsonl", "loss/train/total")[1]


@pytest.fixture(scope="module")
def plain(config_file: Path) -> list[float]:
    """Eager, without activation checkpointing."""
    return losses(config_file, "plain", "train.compile=off")


def test_the_loss_falls(plain: list[float]):
    assert plain[-1] < plain[0] - 0.5


@pytest.mark.parametrize("kind", cases({kind: kind for kind in KINDS}, "none", "selective"))
def test_compiled_and_checkpointed_training_follows_eager(config_file: Path, plain: list[float], kind: str):
    setting = f"train.activation_checkpointing={{type: {kind}{', k: 2' if kind == 'every_k' else ''}}}"
    compiled = losses(config_file, kind, "train.compile=on", setting)
    assert compiled == pytest.approx(plain, rel=1e-2)
    assert compiled[0] == pytest.approx(plain[0], rel=1e-3)


@pytest.mark.parametrize("kind", cases({kind: kind for kind in KINDS[:2] + KINDS[3:]}, "full", "selective"))
def test_our_kernels_in_every_block_follow_too(config_file: Path, plain: list[float], kind: str):
    """`auto` takes cuDNN for such attention. In bf16, under FSDP2 and compiled."""
    kernels = ["model.norm.backend=triton", *(f"model.blocks.{block}.backend=triton" for block in "msa")]
    setting = f"train.activation_checkpointing={{type: {kind}}}"
    ours = losses(config_file, f"ours-{kind}", "train.compile=on", setting, *kernels)
    assert ours == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("microbatch", [8, 4])
@pytest.mark.parametrize("kind", cases({kind: kind for kind in KINDS}, "none", "selective"))
def test_cuda_graphs_change_no_bit(config_file: Path, kind: str, microbatch: int):
    """Under FSDP2, clipped, with a validation and skipped steps (the guard against spikes is set to skip most) in between."""
    settings = (
        f"train.activation_checkpointing={{type: {kind}{', k: 2' if kind == 'every_k' else ''}}}",
        f"train.microbatch_size={microbatch}",
        "train.spike={window: 4, deviations: 0.1}",
        "train.compile=on",
    )
    name = f"{kind}-{microbatch}"
    without = losses(config_file, f"launched-{name}", "train.cuda_graphs=off", *settings)
    found = losses(config_file, f"graphed-{name}", "train.cuda_graphs=on", *settings)
    assert found == without


def test_muon_trains_and_an_average_is_kept(config_file: Path, plain: list[float]):
    """Muon's iterations run in bf16 here, and the average beside compiled layers; `load_model` reads it back."""
    settings = ("optimizer={type: muon, lr: 1e-3}", "train.ema={}", "train.spike={}")
    found = losses(config_file, "muon", "train.compile=on", *settings)
    assert found[0] == pytest.approx(plain[0], rel=1e-3)
    assert found[-1] < found[0] - 0.5
    average, _ = load_model(str(config_file.parent / "muon"), ema=True)
    assert all(parameter.isfinite().all() for parameter in average.parameters())


def test_inputs_in_host_memory_change_nothing(config_file: Path, plain: list[float]):
    """Copied on a stream of their own, beside compiled layers."""
    setting = "train.activation_checkpointing={{type: full, offload: {}}}"
    kept = losses(config_file, "kept-here", "train.compile=on", "train.cuda_graphs=off", setting.format("false"))
    found = losses(config_file, "kept-there", "train.compile=on", setting.format("true"))
    assert found == pytest.approx(kept, rel=1e-4)
    assert found == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_state_in_host_memory_changes_nothing(config_file: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    """Copied on streams of their own, a few parameters at a time; resumed in the middle, so that it is loaded there too."""
    from llmtrain.train import optim
    from llmtrain.train.optimizers.host_state import keep_on_host

    made: list[torch.optim.Optimizer] = []
    monkeypatch.setattr(
        optim, "keep_on_host", lambda optimizer: (made.append(optimizer), keep_on_host(optimizer, 10_000))
    )
    settings = (
        "train.compile=off",
        f"optimizer.type={kind}",
        "schedule.type=constant",
        "schedule.final_lr_fraction=null",
    )
    kept = losses(config_file, f"state-here-{kind}", *settings)
    losses(config_file, f"state-there-{kind}", "optimizer.offload=true", "train.duration=4 steps", *settings)
    found = losses(config_file, f"state-there-{kind}", "optimizer.offload=true", *settings)
    assert found == kept
    assert len(made) == 2
    for optimizer in made:
        tensors = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        local = [value.to_local() if hasattr(value, "to_local") else value for value in tensors]
        assert local and all(one.device.type == "cpu" and one.is_pinned() for one in local if one.numel())


def test_adamw_in_8_bits_follows_adamw(config_file: Path, plain: list[float]):
    """The update is one compiled function here, of matrices of any shape."""
    found = losses(config_file, "adamw-8bit", "train.compile=on", "optimizer.type=adamw_8bit")
    assert found[0] == pytest.approx(plain[0], rel=1e-3)
    assert found == pytest.approx(plain, rel=3e-2)


def test_tasks_are_scored_in_training_as_afterwards(config_file: Path, tmp_path: Path):
    """In bf16: packed, by sharded layers; what is generated, with a cache."""
    place = Place(tmp_path / "eval", documents=3)
    file = place.write({"models": []}).rename(tmp_path / "icl.yaml")
    losses(config_file, "scored", "train.compile=on", f"eval.icl={{file: {file}, interval: 8 steps}}")
    run_dir = config_file.parent / "scored"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {name: value for line in lines for name, value in line.items() if name.startswith("icl/")}
    report = evaluate(place.run(models=[str(run_dir)], cache=None, dtype="bfloat16"))
    assert found == pytest.approx(flat_metrics(report.results), rel=1e-3, abs=1e-3)


def test_fp32_agrees_with_bf16(config_file: Path, plain: list[float]):
    fp32 = losses(config_file, "fp32", "train.precision=fp32", "train.compile=off")
    assert plain == pytest.approx(fp32, rel=2e-2)
