"""What launchers set in the environment, and where their ranks meet: anything wrong is named before ranks wait for each other."""

import os
import socket

import pytest

from llmtrain.distributed import world
from llmtrain.errors import UserError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch):
    for name in (*NAMES, "NODE_RANK", world.LISTENER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NODE_RANK", "0")

    def change(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return change


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"RANK": "one", "WORLD_SIZE": 2}, "RANK=one: expected a number, 0 to 1,"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2: expected a number, 0 to 1,"),
        ({"RANK": -1, "WORLD_SIZE": 2}, "RANK=-1: expected"),
        ({"RANK": 0, "WORLD_SIZE": 0}, "WORLD_SIZE=0: expected a number, 1 or more,"),
        ({"WORLD_SIZE": 2}, "WORLD_SIZE=2, but not RANK"),
        ({"RANK": "", "WORLD_SIZE": 1}, "RANK=: expected a number, 0 to 0,"),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 3}, "LOCAL_WORLD_SIZE=3: expected a number, 1 to 2,"),
        (
            {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 2},
            "LOCAL_RANK=2: expected a number, 0 to 1,",
        ),
    ],
)
def test_variables_that_no_launcher_sets_are_named(environment, values, named):
    environment(**values)
    with pytest.raises(UserError) as error:
        world.world_from_environment()
    assert str(error.value).startswith(f"the environment has {named}")


def test_variables_of_a_launcher_are_a_place(environment):
    assert world.world_from_environment() == world.World(0, 1, 0, 1)
    environment(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    assert world.world_from_environment() == world.World(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "has RANK and WORLD_SIZE, but not MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 65536}, "MASTER_PORT=65536: expected a number, 1 to 65535"),
        (
            {"MASTER_ADDR": "node.invalid", "MASTER_PORT": 29500},
            "MASTER_ADDR=node.invalid: .* finds no address of that name",
        ),
        ({"MASTER_ADDR": "127.0.0.1"}, r"MASTER_PORT=\d+: another process listens there on this machine"),
    ],
)
def test_a_place_where_ranks_cannot_meet_is_named(environment, monkeypatch, values, sentence):
    monkeypatch.setattr(world, "_LOOKUP_SECONDS", 0.0)
    environment(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, **values)
    with socket.create_server(("", 0)) as taken:
        if values and "MASTER_PORT" not in values:
            environment(MASTER_PORT=taken.getsockname()[1])
        with pytest.raises(UserError, match=sentence):
            world.initialize()
    assert "MASTER_ADDR" in os.environ or not values
