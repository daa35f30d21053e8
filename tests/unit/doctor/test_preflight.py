"""`train.preflight: on`: who examines the job before a run."""

from pathlib import Path

import pytest

from llmtrain.commands.train import _preflight
from llmtrain.distributed.world import World
from llmtrain.doctor import cluster
from llmtrain.errors import RunError


@pytest.fixture
def asked(monkeypatch):
    """Folders that were examined; a fault is found in each."""
    found = []
    monkeypatch.setattr(cluster, "examine", lambda world, folder: found.append(str(folder)) or "a fault")
    return found


@pytest.mark.parametrize(("preflight", "local_size"), [("off", 1), ("on", 2)])
def test_one_node_or_off_is_not_examined(asked, monkeypatch, preflight, local_size):
    monkeypatch.setattr(cluster, "world_from_environment", lambda: World(0, 2, 0, local_size))
    _preflight(preflight, Path("somewhere"))
    assert asked == []


def test_a_fault_ends_a_run_of_several_nodes(asked, monkeypatch):
    monkeypatch.setattr(cluster, "world_from_environment", lambda: World(0, 2, 0, 1))
    with pytest.raises(RunError, match=r"train\.preflight found faults"):
        _preflight("on", Path("somewhere"))
    assert asked == ["somewhere"]
