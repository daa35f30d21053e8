"""Validation on several streams: a loss of each, and the pooled one, on any number of ranks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.utils import dist

from llmtrain.data.loader.loaders import build_validation_loader
from llmtrain.models.causal_lm import CausalLM
from llmtrain.schema.config import Config
from llmtrain.schema.data import SplitConfig
from llmtrain.train import run
from llmtrain.train.report.loggers import stream_metrics
from tests.support.tiny import tiny_config

ODD = "c++ [x]/a.b"
"""A name that is no regular expression and has what separates metrics."""


def config(shards: Path, run_dir: Path, changes: dict[str, Any] | None = None) -> Config:
    """Three streams; one of them has fewer samples than a batch, and its loss differs: the model has seen its text."""
    streams = {
        "held": {"local": str(shards), "split": "validation"},
        ODD: {"local": str(shards), "split": "train"},
        "few": {"local": str(shards.parent / "few")},
    }
    defaults: dict[str, Any] = {
        "data.validation": {"streams": streams},
        "eval.max_samples": None,
        "train.duration": "4 steps",
    }
    return tiny_config(shards, run_dir, defaults | {"eval.interval": "4 steps"} | (changes or {}))


@pytest.fixture(scope="module", autouse=True)
def few(shards) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(shards.parent / "few"), columns={"tokens": "ndarray:int32:32"}) as out:
        for i in range(3):
            out.write({"tokens": torch.arange(i, i + 32, dtype=torch.int32).numpy()})


def validated(made: Config) -> dict[str, float]:
    """Metrics of validation at the last step, by name without `metrics/validation/`. A job for Ranks.run."""
    outcome = run.train(made)
    dist.barrier()  # rank 0 has written its last line
    lines = [json.loads(text) for text in (Path(made.run_dir) / "metrics.jsonl").read_text().splitlines()]
    [line] = [line for line in lines if "metrics/validation/cross_entropy" in line]
    found = {name[19:]: value for name, value in line.items() if name.startswith("metrics/validation/")}
    assert outcome.validation == {name: value for name, value in found.items() if math.isfinite(value)}
    if dist.get_world_size() == 1:
        found |= {f"by hand {name}": value for name, value in by_hand(made, outcome.model).items()}
    return found


def by_hand(made: Config, model: CausalLM) -> dict[str, float]:
    """Nats per label of each stream, one sample at a time; `all`: of all of them."""
    sums: dict[str, list[float]] = {}
    for name, stream in made.data.validation_streams().items():
        data = made.data.model_copy(update={"validation": SplitConfig(streams={name: stream})})
        loader = build_validation_loader(data, global_batch_size=1)
        assert loader is not None
        with torch.no_grad():
            losses = [model.loss(batch["input_ids"], batch["labels"]) for batch in loader]
        for key in (name, "all"):
            sums.setdefault(key, []).extend(float(loss.terms["cross_entropy"]) for loss in losses)
    return {name: sum(losses) / len(losses) for name, losses in sums.items()}


def test_each_stream_has_its_loss_and_the_pooled_one_is_that_of_all_samples(ranks, shards, tmp_path):
    [found] = ranks(1).run(validated, config(shards, tmp_path / "run"))
    assert found["cross_entropy"] == pytest.approx(found["by hand all"], rel=1e-5)
    names = ["held", ODD, "few"]
    for name in names:
        assert found[f"{name}/cross_entropy"] == pytest.approx(found[f"by hand {name}"], rel=1e-5)
    assert len({round(found[f"{name}/cross_entropy"], 4) for name in names}) == 3
    assert "held/bits_per_byte" in found and "few/bits_per_byte" not in found  # whose shards do not say how much text
    assert found["few/cross_entropy"] > found["held/cross_entropy"]
    assert [name for name, _ in stream_metrics(f"metrics/validation/{name}" for name in found)] == names

    [on_two, _] = ranks(2).run(validated, config(shards, tmp_path / "two"))
    for name in ("cross_entropy", *(f"{name}/cross_entropy" for name in names)):
        assert on_two[name] == pytest.approx(found[name], rel=1e-5)
