"""What the programs of a tree's scan do, and what the windows of its convolution hold, against the definition."""

import random

import pytest

from llmtrain.kernels.conv1d.prefix_tree import predecessors
from llmtrain.kernels.ssd.prefix_tree import MAX_SHORT_CHUNKS, ScanSchedule, scan_schedule
from tests.support import prefix_trees as trees

SHAPES = [trees.prompts(seed, longest) for seed in range(12) for longest in (4, 40, 200)]
CHUNK = 32


def programs(made: ScanSchedule) -> list[list[list[int]]]:
    return [one.tolist() for one in made.rounds]


def text_of(shape: trees.Shape, segment: int) -> list[int]:
    ends = [sum(shape.lengths[: i + 1]) for i in range(len(shape.lengths))]
    return [t for one in (*shape.ancestors[segment], segment) for t in range(ends[one] - shape.lengths[one], ends[one])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_token_is_scanned_once_after_what_its_segment_continues(shape):
    """By following the tokens that the state has seen through the programs."""
    made = scan_schedule(shape.lengths, shape.ancestors, CHUNK)
    owner = [i for i, length in enumerate(shape.lengths) for _ in range(length)]
    steps, segment_start = made.steps.tolist(), made.segment_start.tolist()
    state_slots: dict[int, list[int]] = {}
    seen: dict[int, list[int]] = {}
    for some in programs(made):
        left: dict[int, list[int]] = {}
        for begin, end, carried, before, after in some:
            state = [] if before < 0 else state_slots[before]
            for number, (first, last) in enumerate(steps[begin:end], begin):
                assert 0 < last - first <= CHUNK
                for t in range(first, last):
                    assert t not in seen
                    seen[t] = [*state, *range(first + segment_start[number][t - first], t + 1)]
                if number - begin < carried:
                    state = seen[last - 1]
                else:  # short segments, whole ones
                    assert (first == 0 or owner[first - 1] != owner[first]) and owner[last - 1] != ([*owner, -1])[last]
            if after >= 0:
                left[after] = state
        state_slots |= left
    assert len(state_slots) == made.state_slots
    for segment, length in enumerate(shape.lengths):
        text = text_of(shape, segment)
        for back in range(length):
            token = text[len(text) - 1 - back]
            assert seen[token] == text[: len(text) - back]


def test_short_segments_share_a_step_and_a_program_with_what_they_continue():
    made = scan_schedule([20, 5, 6, 7, 8], [(), (0,), (0,), (0,), (0,)], CHUNK)
    assert programs(made) == [[[0, 2, 1, -1, -1]]] and made.steps.tolist() == [[0, 20], [20, 46]]
    assert made.segment_start[1, :26].tolist() == [0] * 5 + [5] * 6 + [11] * 7 + [18] * 8


def test_a_crowd_is_spread_over_programs_that_begin_from_a_state_in_memory():
    count = 2 * MAX_SHORT_CHUNKS + 1
    made = scan_schedule([3, *[CHUNK] * count], [(), *[(0,)] * count], CHUNK)
    (first,), rest = programs(made)
    assert first[2:] == [1, -1, 0] and made.state_slots == 1
    assert sorted(end - begin for begin, end, *_ in rest) == [1, MAX_SHORT_CHUNKS, MAX_SHORT_CHUNKS]
    assert all(row[2:] == [0, 0, -1] for row in rest)


@pytest.mark.parametrize("reach", [0, 1, 3])
def test_a_window_holds_the_tokens_before_in_a_text(reach):
    for shape in random.Random(reach).sample(SHAPES, 6):
        found = predecessors(shape.lengths, shape.ancestors, reach)
        assert found.shape == (sum(shape.lengths), reach)
        for segment, length in enumerate(shape.lengths):
            text = text_of(shape, segment)
            for place in range(len(text) - length, len(text)):
                before = [text[place - k] if place >= k else -1 for k in range(1, reach + 1)]
                assert found[text[place]].tolist() == before
