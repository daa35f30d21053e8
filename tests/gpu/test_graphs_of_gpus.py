"""CUDA graphs over two GPUs, by the command that a user types: around validation, checkpoints, a resumption and the search for a
microbatch, losses are those of a run without. Ranks of a CPU: tests/distributed/test_graphs_of_ranks.py."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

from llmtrain.train.report.loggers import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("two_gpus"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CONFIG = yaml.safe_load("""
name: graphs
seed: 1
model:
  vocab_size: 512
  d_model: 256
  max_seq_len: 256
  blocks:
    m: {type: mamba2, d_state: 64, head_dim: 64, chunk_size: 64}
    s:
      type: shared_attention
      n_heads: 4
      n_shared: 2
      position: {type: rotary}
      mlp: {type: geglu, d_ff: 512}
      adapter_rank: 8
  layers: m s+m m s+m
data: {seq_len: 256}
train:
  duration: 12 steps
  global_batch_size: 16
  microbatch_size: 4
  precision: amp_bf16
  compile: "on"
  sharding: {strategy: grad_op, sync_every_microbatch: false}
optimizer: {lr: 0.001}
schedule: {type: constant}
eval: {interval: 3 steps, max_samples: 16}
checkpoint: {interval: 4 steps}
logging: {tensorboard: false, step_times: 1}
""")

VALIDATION = "metrics/validation/cross_entropy"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains runs beside each other, each a name and settings; their folders are those names, beside this file's data."""
    from llmtrain.data.prepare import prepare
    from llmtrain.schema.load import load_config

    folder = tmp_path_factory.mktemp("two")
    sources = str(Path(torch.__file__).parent / "nn" / "modules")
    made = {"sources": [sources], "out": str(folder / "data"), "vocab_size": 400, "seq_len": 256, "workers": 1}
    file = folder / "config.yaml"
    file.write_text(json.dumps(CONFIG | {"data": {"seq_len": 256, "prepare": made}}))
    config = load_config(file, [])
    assert config.data.prepare is not None
    prepare(config.data.prepare, progress=False)

    def train(each: tuple[str, ...]) -> None:
        name, *settings = each
        command = [sys.executable, "-m", "llmtrain", "train", str(file), "--nproc", "2", f"run_dir={folder / name}"]
        done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=240, check=False)
        (folder / f"{name}.log").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, f"{name}: {done.stdout[-3000:]}{done.stderr[-3000:]}"

    def run(*each: tuple[str, ...]) -> Path:
        with ThreadPoolExecutor() as pool:
            list(pool.map(train, each))
        return folder

    return run


@pytest.fixture(scope="module")
def folder(runs: Callable[..., Path]) -> Path:
    """Without graphs, with graphs, and with graphs in two parts, the second of which starts at a checkpoint."""
    on, off = "train.cuda_graphs=on", "train.cuda_graphs=off"
    runs(
        ("launched", off),
        ("graphed", on),
        ("parts", on, "train.duration=6 steps"),
        ("searched", "train.microbatch_size=auto"),
    )
    return runs(("parts", on))


def curve(folder: Path, run: str, name: str = "loss/train/total") -> list[float]:
    return read_metrics(folder / run / "metrics.jsonl", name)[1]


def graphed(folder: Path, run: str) -> bool:
    return "CUDA graphs: on" in (folder / f"{run}.log").read_text()


@pytest.mark.parametrize("run", ["graphed", "parts"])
def test_losses_and_validation_are_those_of_a_run_without(folder: Path, run: str):
    assert graphed(folder, run)
    assert not graphed(folder, "launched")
    expected = curve(folder, "launched")
    assert len(expected) == 12
    assert curve(folder, run) == pytest.approx(expected, rel=2e-3)
    assert curve(folder, run, "train/grad_norm") == pytest.approx(
        curve(folder, "launched", "train/grad_norm"), rel=2e-2
    )
    validation = curve(folder, "launched", VALIDATION)
    assert len(validation) == 4
    assert curve(folder, run, VALIDATION) == pytest.approx(validation, rel=2e-3)


def test_a_microbatch_is_found_by_graphs(folder: Path):
    assert graphed(folder, "searched")
    assert curve(folder, "searched") == pytest.approx(curve(folder, "launched"), rel=5e-3)
