"""The time of a pipeline's passes: in torch's order, and as long as closed forms say."""

import random

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import FORWARD

from llmtrain.plan.scaling import order, pass_seconds
from llmtrain.schema.pipeline import rounds


@pytest.mark.parametrize(
    ("stages", "virtual", "microbatches"), [(2, 2, 2), (2, 3, 8), (4, 2, 7), (4, 4, 16), (8, 2, 12), (3, 2, 10)]
)
def test_the_order_of_passes_in_turn_is_that_of_torch(stages: int, virtual: int, microbatches: int):
    of_torch = object.__new__(ScheduleInterleaved1F1B)
    of_torch.n_local_stages, of_torch.pp_group_size, of_torch._n_microbatches = virtual, stages, microbatches
    of_torch.number_of_rounds = rounds(stages, microbatches)
    of_torch.microbatches_per_round = microbatches // of_torch.number_of_rounds
    for rank in range(stages):
        passes = [one for one in of_torch._calculate_single_rank_operations(rank) if one is not None]
        assert order(rank, stages, virtual, microbatches) == [
            (one.computation_type == FORWARD, one.stage_index, one.microbatch_index) for one in passes
        ]


def test_a_stage_of_1f1b_keeps_as_many_microbatches_as_stages_are_left():
    assert order(1, 3, 1, 4) == [
        *((True, 1, 0), (True, 1, 1), (False, 1, 0), (True, 1, 2), (False, 1, 1)),
        *((True, 1, 3), (False, 1, 2), (False, 1, 3)),
    ]


@pytest.mark.parametrize(
    ("stages", "virtual", "microbatches"), [(2, 1, 8), (4, 1, 5), (4, 2, 8), (8, 4, 64), (4, 1, 512)]
)
def test_of_equal_stages_each_waits_for_the_others_once(stages: int, virtual: int, microbatches: int):
    forward, backward = [1.0] * stages * virtual, [2.0] * stages * virtual
    took = pass_seconds(forward, backward, virtual, microbatches)
    assert took == pytest.approx(3 * virtual * microbatches + 3 * (stages - 1))


def test_of_unequal_stages_all_wait_for_the_longest():
    forward, backward = [1.0, 1.0, 1.0, 3.0], [2.0, 2.0, 2.5, 2.0]
    for microbatches in (4, 16, 100):
        took = pass_seconds(forward, backward, 1, microbatches)
        assert took == pytest.approx(sum(forward + backward) + 5 * (microbatches - 1))
    longer, shorter = (pass_seconds([3.0, 1.0, 1.0], [2.0, 2.0, 2.5], 1, n) for n in (16, 12))
    assert longer - shorter == pytest.approx(5 * 4)


def test_one_stage_waits_for_none():
    assert pass_seconds([1.0], [2.0], 1, 5, handed_on=9.0) == 15


def test_sending_is_waited_for_in_1f1b_and_beside_computation_in_turn():
    both_ways_at_once = 0.5 * 17
    assert pass_seconds([1.0, 1.0], [2.0, 2.0], 1, 16, handed_on=0.5) == pytest.approx(3 * 17 + both_ways_at_once)
    took = pass_seconds([1.0] * 4, [2.0] * 4, 2, 16, handed_on=0.1)
    assert 3 * 33 < took < 3 * 33 + 0.1 * 16


def test_many_microbatches_take_what_following_each_pass_would(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(0)
    for _ in range(20):
        stages, virtual = rng.randint(2, 4), rng.randint(1, 2)
        forward, backward = ([rng.uniform(1, 2) for _ in range(stages * virtual)] for _ in range(2))
        arguments = forward, backward, virtual, stages * rng.randint(9, 20), 0.1
        found = pass_seconds(*arguments)
        with monkeypatch.context() as every:
            every.setattr("llmtrain.plan.scaling._COUNTED", 1000)
            assert found == pytest.approx(pass_seconds(*arguments), rel=0.01)
