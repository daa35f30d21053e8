"""Nodes whose disks are their own are refused before anything is built; a checkpoint could never be whole there."""

from pathlib import Path

import pytest
import torch.distributed as dist

from llmtrain.distributed.world import World
from llmtrain.train.checkpoints import require_shared
from tests.support.ranks import RankFailed


def ask(roots: list[Path], local_size: int = 1) -> None:
    """A job: each rank is a node with its own root."""
    rank = dist.get_rank()
    require_shared(roots[rank], World(rank, 2, 0, local_size), seconds=0.5)


def test_one_folder_for_all_nodes_is_fine(ranks, tmp_path):
    ranks(2).run(ask, [tmp_path / "run"] * 2)
    assert list((tmp_path / "run").iterdir()) == []


def test_nodes_with_disks_of_their_own_are_reported_on_every_rank(ranks, tmp_path):
    roots = [tmp_path / "one", tmp_path / "other"]
    with pytest.raises(RankFailed) as error:
        ranks(2).run(ask, roots)
    assert str(error.value).count("is not the same folder on every node: rank(s) 1 do not see") == 2
    assert "Put run_dir on a file system that all nodes share" in str(error.value)
    assert list(roots[0].iterdir()) == []


def test_one_node_is_not_asked(ranks, tmp_path):
    ranks(2).run(ask, [tmp_path / "one", tmp_path / "other"], 2)
    assert list(tmp_path.iterdir()) == []
