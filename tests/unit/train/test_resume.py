"""What may differ when a run is resumed: of data.mixture, what comes behind the samples that were read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.data.shards.checks import data_fingerprint
from llmtrain.data.shards.mds_writer import ShardWriter, write_index
from llmtrain.schema.config import Config
from llmtrain.train.resume import require_same_run
from tests.support.tiny import GLOBAL_BATCH, SEQ_LEN, tiny_config

OPEN = [{"until": "20 steps", "proportions": {"web": 3, "code": 1}}, {"proportions": {"web": 1, "code": 1}}]
"""Blocks are of 64 draws of a lane, of which there are as many as samples in a batch: so of 64 steps."""


def config(tmp_path: Path, mixture: list[dict[str, Any]]) -> Config:
    streams = {name: {"local": str(tmp_path / name)} for name in ("web", "code")}
    changes = {"data.train": {"streams": streams}, "data.validation": None, "data.mixture": mixture}
    return tiny_config(Path("unused"), tmp_path / "run", changes | {"data.num_canonical_nodes": GLOBAL_BATCH})


@pytest.fixture
def shards(tmp_path) -> None:
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        writer = ShardWriter(tmp_path / name, "0", {"tokens": (f"ndarray:uint16:{SEQ_LEN}", 2 * SEQ_LEN)})
        writer.write(np.zeros((500, 2 * SEQ_LEN), np.uint8))
        write_index(tmp_path / name, writer.finish())


def resume(old: Config, new: Config, step: int, passed_over: int = 0) -> None:
    data = {
        "position": {"order": "mixed"},
        "fingerprint": data_fingerprint(old.data),
        "passed_over": [[4, passed_over]],
    }
    manifest = SimpleNamespace(config=old.model_dump(mode="json"), data=data)
    require_same_run(new, SimpleNamespace(address="step", step=step, require=lambda: manifest))  # type: ignore[arg-type]


def test_phases_behind_what_was_read_may_change(tmp_path, shards):
    old = config(tmp_path, OPEN)
    longer = config(tmp_path, [OPEN[0], OPEN[1] | {"until": "90 steps"}, {"proportions": {"web": 1, "code": 3}}])
    resume(old, longer, 84)  # 20 + 64: one block of the second phase is whole
    with pytest.raises(CheckpointError) as refused:
        resume(old, longer, 85)
    assert "data.mixture: other samples would have been read from step 85 on, and the run is at step 85" in str(
        refused.value
    )
    resume(old, longer, 80, passed_over=4)
    with pytest.raises(CheckpointError, match="from step 85 on, and the run is at step 85"):
        resume(old, longer, 80, passed_over=5)
    resume(old, config(tmp_path, [OPEN[0], {"proportions": {"web": 1, "code": 3}}]), 20)


def test_a_refusal_names_the_ends_that_the_phase_at_work_may_have(tmp_path, shards):
    def ended(step: int) -> Config:
        return config(tmp_path, [OPEN[0], OPEN[1] | {"until": f"{step} steps"}, {"proportions": {"web": 1, "code": 3}}])

    old = config(tmp_path, OPEN)
    with pytest.raises(
        CheckpointError, match=r"from step 20 on is at work: it may have no end, or end at step 148 or later;"
    ):
        resume(old, ended(147), 85)
    resume(old, ended(148), 85)
    with pytest.raises(
        CheckpointError, match=r"may end where it does, at step 200, or at step 84 or later; .* init_from"
    ):
        resume(ended(200), ended(83), 84)
    resume(ended(200), ended(84), 84)
    with pytest.raises(CheckpointError, match="may end where it does, at step 100;"):
        resume(ended(100), ended(500), 85)


def test_other_differences_are_reported_beside_it(tmp_path, shards):
    old = config(tmp_path, OPEN)
    new = config(tmp_path, [OPEN[0], {"proportions": {"web": 1, "code": 3}}])
    changed = new.model_copy(update={"data": new.data.model_copy(update={"shuffle_seed": 1})})
    with pytest.raises(CheckpointError) as refused:
        resume(old, changed, 10)
    assert "data.shuffle_seed" in str(refused.value) and "data.mixture" not in str(refused)
    with pytest.raises(CheckpointError, match=r"data\.mixture"):
        resume(old, new.model_copy(update={"data": new.data.model_copy(update={"mixture": None})}), 10)
