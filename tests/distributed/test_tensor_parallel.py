"""Ranks that share every layer's work (train.parallel.tensor), and sequences too, compute what one rank does."""

from __future__ import annotations

import pytest

from tests.distributed.test_context_parallel import MODELS, SHORT, SLOW, assert_exact, assert_same_run
from tests.support.runs import Run, train
from tests.support.shared_sequences import Case, random_case
from tests.support.tiny import tiny_config


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=SLOW)])
def test_every_kind_of_layer_has_the_loss_and_gradients_of_one_rank(ranks, size):
    """Documents, and a length that the ranks do not divide; fewer groups and key/value heads than ranks, as many, and more."""
    models = {name: model for name, model in MODELS.items() if size <= 4}
    assert_exact(
        ranks, size, [Case(model, 29, borders=0.1, train={"parallel": {"tensor": size}}) for model in models.values()]
    )


def test_random_models_on_random_meshes(ranks):
    """Meshes of context, tensor, shards and replicas."""
    assert_exact(ranks, 4, [random_case(seed, 4) for seed in range(20)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_many_random_models_on_random_meshes(ranks, size):
    for begin in range(1000 * size, 1000 * size + 42, 7):
        assert_exact(ranks, size, [random_case(seed, size) for seed in range(begin, begin + 7)])


@pytest.fixture(scope="module")
def whole(ranks, shards, tmp_path_factory) -> Run:
    """The run of one rank."""
    return ranks(1).run(train, tiny_config(shards, tmp_path_factory.mktemp("whole"), SHORT))[0]


@pytest.mark.parametrize(
    "legs",
    [
        [(2, 1, 2, 2), (1, 1, 1, None)],
        pytest.param([(4, 2, 2, 1), (1, 1, 1, 2), (4, 1, 2, 3), (2, 1, 2, None)], marks=SLOW),
    ],
    ids=["there and back", "over four meshes"],
)
def test_a_run_and_its_checkpoints_move_between_meshes(ranks, shards, tmp_path, whole, legs):
    """legs: (ranks, context, tensor, the step before which it is interrupted)."""
    for size, context, tensor, stop_before in legs:
        changes = SHORT | {"train.parallel": {"context": context, "tensor": tensor}}
        run = ranks(size).run(train, tiny_config(shards, tmp_path / "run", changes), stop_before)[0]
    assert_same_run(run, whole)
