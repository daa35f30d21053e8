"""8-bit AdamW over several ranks: codes, scales and steps are those of one rank, and checkpoints move between rank counts."""

import pytest
import torch

from llmtrain.schema.config import Config
from tests.support.sharded import assert_same, state_after
from tests.support.tiny import tiny_config


@pytest.fixture(scope="module")
def config(shards, tmp_path_factory) -> Config:
    """Three ranks hold 11, 11 and 10 rows of 32; a matrix of 4 rows leaves one of them empty."""
    return tiny_config(shards, tmp_path_factory.mktemp("run"), {"optimizer.type": "adamw_8bit"})


@pytest.mark.ci
def test_many_ranks_are_bit_identical_to_one_and_continue_each_others_checkpoints(ranks, config, tmp_path):
    [one] = ranks(1).run(state_after, config, None, tmp_path / "one", 1)
    [more] = ranks(1).run(state_after, config, tmp_path / "one" / "step-00000001", None, 1)
    codes = [name for name in one if name.endswith("_codes")]
    assert len(codes) > 10 and all(one[name].dtype == torch.uint8 for name in codes)
    assert any(not torch.equal(one[name], more[name]) for name in codes)
    for size in (2, 3):
        for found in ranks(size).run(state_after, config, None, tmp_path / str(size), 1):
            assert_same(found, one)
        for found in ranks(size).run(state_after, config, tmp_path / "one" / "step-00000001", None, 1):
            assert_same(found, more)
    for found in ranks(2).run(state_after, config, tmp_path / "3" / "step-00000001", None, 1):
        assert_same(found, more)
