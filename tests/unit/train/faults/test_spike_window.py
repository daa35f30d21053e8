"""The window of train.spike: what counts as a spike, and that a restored one goes on as it would have."""

import json
import random

import pytest

from llmtrain.schema.training import SpikeConfig
from llmtrain.train.callbacks.stability import _means
from llmtrain.train.faults.spike_window import SpikeWindow


def steps(count: int, seed: int = 0) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [(rng.gauss(3, 0.1), rng.gauss(1, 0.1)) for _ in range(count)]


def filled(window: int = 32) -> SpikeWindow:
    made = SpikeWindow(SpikeConfig(window=window))
    assert [made.add(*step) for step in steps(window)] == [None] * window
    return made


@pytest.mark.parametrize(
    ("loss", "norm", "name"), [(4.5, 1.0, "the loss 4.5 is"), (3.0, 2.5, "the gradient norm 2.5 is")]
)
def test_either_number_makes_a_spike(loss, norm, name):
    made = filled()
    reason = made.add(loss, norm)
    assert reason is not None and reason.startswith(name) and " and " not in reason
    assert made.skipped == 1


def test_a_fall_is_no_spike():
    assert filled().add(0.1, 0.01) is None


def test_it_begins_with_half_a_window():
    early, late = SpikeWindow(SpikeConfig(window=32)), SpikeWindow(SpikeConfig(window=32))
    for step in steps(15):
        early.add(*step)
    for step in steps(16):
        late.add(*step)
    assert early.add(100.0, 1.0) is None
    assert late.add(100.0, 1.0) is not None


def test_a_new_level_is_taken_for_one_after_a_few_steps():
    made = filled()
    skipped = [made.add(1000.0, 1.0) is not None for _ in range(10)]
    assert skipped[0] and not any(skipped[4:])


def test_a_restored_window_goes_on_as_it_would_have():
    made, restored = filled(), SpikeWindow(SpikeConfig(window=32))
    made.add(9.0, 1.0)
    restored.load_state_dict(json.loads(json.dumps(made.state_dict())))
    rest = [*steps(20, seed=1), (3.75, 1.0), (3.9, 1.7), *steps(20, seed=2)]
    assert [made.add(*step) for step in rest] == [restored.add(*step) for step in rest]
    assert made.state_dict() == restored.state_dict()


def test_a_saved_state_does_not_change_with_the_next_step():
    made = filled()
    state = made.state_dict()
    before = json.dumps(state)
    made.add(1.0, 1.0)
    assert json.dumps(state) == before


def test_a_step_is_compared_by_its_loss_per_label_and_the_mean_of_the_ranks_norms():
    assert _means([12.0, 4.0, 10.0, 2.0]) == (3.0, 5.0)
    assert _means([0.0, 0.0, 10.0, 2.0]) == (0.0, 5.0)  # a step without labels
