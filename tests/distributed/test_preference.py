"""Runs on pairs and labelled answers: any number of ranks and microbatches, resumption, and reference log-probabilities."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from llmtrain.data.prepare import prepare
from llmtrain.schema.config import Config
from llmtrain.schema.data import PrepareConfig
from llmtrain.train import run
from llmtrain.train.report.loggers import read_metrics
from tests.support import runs
from tests.support.tiny import tiny_settings

STEPS = 6
NAMES = ("loss/train/total", "rewards/margins", "logps/chosen", "rewards/chosen", "tokens/trained", "train/grad_norm")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `pairs` and `labels` of shards, with unequal numbers of answers in their samples."""
    folder, rng = tmp_path_factory.mktemp("preferences"), random.Random(1)
    words = ["red", "blue", "cat", "dog", "house", "tree", "sun", "moon"]
    for name in ("pairs", "labels"):
        records = []
        for number in range(200):
            asked, some = " ".join(rng.choices(words, k=3)), [rng.choices(words, k=rng.randint(1, 4)) for _ in "ab"]
            good, bad = (f" {first} {' '.join(one)}" for first, one in zip(("yes", "no"), some, strict=True))
            label = {"completion": good if number % 3 else bad, "label": bool(number % 3)}
            records.append({"prompt": asked} | ({"chosen": good, "rejected": bad} if name == "pairs" else label))
        source = folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps(one) + "\n" for one in records))
        values = {"sources": [str(source)], "out": str(folder / name), "vocab_size": 290, "seq_len": 64, "workers": 1}
        prepare(PrepareConfig.model_validate(values | {"validation_fraction": 0.1}), progress=False)
    return folder


def config(data: Path, run_dir: Path, loss: str = "sigmoid", **changes: Any) -> Config:
    settings = {
        "objective": {"type": "preference", "loss": {loss: 1.0} if loss != "several" else {"sigmoid": 1.0, "sft": 0.5}},
        "data.seq_len": 64,
        "data.mask_documents": True,
        "model.max_seq_len": 64,
        "train.duration": f"{STEPS} steps",
        "eval.interval": f"{STEPS} steps",
    }
    shards = data / ("labels" if loss == "kto" else "pairs")
    return Config.model_validate(tiny_settings(shards, run_dir, settings | changes))


def train(config: Config, stop_before: int | None = None) -> dict[str, dict[int, float]]:
    """A job: metrics of a run by name and step."""
    recorder = runs.Recorder(stop_before)
    with runs.observed_by(recorder), contextlib.suppress(runs.Interrupted):
        run.train(config)
    torch.distributed.barrier()
    file = Path(config.run_dir) / "metrics.jsonl"
    return {
        name: dict(zip(*read_metrics(file, name), strict=True))
        for name in (*NAMES, "metrics/validation/preference_loss", "metrics/validation/accuracy")
    }


@pytest.mark.ci
@pytest.mark.parametrize("loss", ["sigmoid", "several", "orpo", "kto"])
def test_ranks_and_microbatches_do_not_change_a_run(loss: str, data: Path, tmp_path: Path, ranks):
    [expected] = ranks(1).run(train, config(data, tmp_path / "one", loss, **{"train.microbatch_size": 8}))
    found = ranks(2).run(train, config(data, tmp_path / "two", loss, **{"train.microbatch_size": 2}))[0]
    for name in expected:
        # Validation has a cross entropy, and the divergence of kto, of each batch by itself.
        tolerance = 1e-4 if loss == "sigmoid" or not name.startswith("metrics/") else 2e-2
        assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name
    assert len(expected["loss/train/total"]) == STEPS
    if loss == "sigmoid":
        assert expected["loss/train/total"][1] == pytest.approx(0.6931472, abs=1e-6)
    if loss != "orpo":
        assert expected["rewards/margins"][STEPS] > expected["rewards/margins"][1] + 0.01
        assert (tmp_path / "one" / "reference" / "train.safetensors").exists()
    else:
        assert not (tmp_path / "one" / "reference").exists()
    assert expected["metrics/validation/preference_loss"]


@pytest.mark.ci
def test_a_run_that_is_resumed_is_the_same_to_the_bit_with_its_reference_and_without(data: Path, tmp_path: Path, ranks):
    interval = {"checkpoint.interval": "2 steps"}
    [expected] = ranks(1).run(train, config(data, tmp_path / "whole", **interval))
    for lost in (False, True):
        halves = config(data, tmp_path / f"halves-{lost}", **interval)
        ranks(1).run(train, halves, 3)
        if lost:
            shutil.rmtree(Path(halves.run_dir) / "reference")
        [found] = ranks(1).run(train, halves)
        assert found == expected
        one, other = (
            load_file(f"{at}/reference/train.safetensors")["log_p"] for at in (halves.run_dir, tmp_path / "whole")
        )
        np.testing.assert_array_equal(one, other)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("loss", "parallel"),
    [
        ("sigmoid", {"tensor": 2}),
        ("kto", {"pipeline": 2}),
        pytest.param("several", {"pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=["tensor", "stages", "stages of pairs"],
)
def test_ranks_that_share_layers_or_the_model_train_preferences(loss, parallel, data: Path, tmp_path: Path, ranks):
    [expected] = ranks(1).run(train, config(data, tmp_path / "one", loss))
    found = ranks(2).run(train, config(data, tmp_path / "two", loss, **{"train.parallel": parallel}))[0]
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name
