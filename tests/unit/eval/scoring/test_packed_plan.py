"""A shared prefix is stored once per pack; each row is read completely and once."""

import pytest

from benchmarks.harness.plan_work import work
from llmtrain.eval.scoring.batching import Rows, make_rows
from llmtrain.eval.scoring.packed_plan import PackedPlan, pack_rows
from tests.support.scoring import KINDS, choices


def make_packs(rows: Rows, capacity: int) -> PackedPlan:
    return PackedPlan(rows.rows, list(pack_rows(rows, capacity)))


def read_by(plan: PackedPlan) -> dict[int, tuple[int, ...]]:
    """Tokens read up to the end of each row, by row."""
    found = {}
    for pack in plan.packs:
        for segment in pack:
            if segment.row is not None:
                assert segment.row not in found
                seen = [pack[i] for i in segment.ancestors]
                assert all(one.row is None for one in seen)
                assert len(segment.tokens) >= plan.rows[segment.row].scored
                found[segment.row] = tuple(token for one in [*seen, segment] for token in one.tokens)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [10, 100, 10_000])
def test_every_row_is_read_whole_and_once(kind, capacity):
    rows = make_rows(KINDS[kind](), 1000)
    plan = make_packs(rows, capacity)
    assert read_by(plan) == {i: row.tokens[:-1] for i, row in enumerate(rows.rows)}
    for pack in plan.packs:
        # More than the capacity only for the sake of one text.
        assert sum(len(segment.tokens) for segment in pack) <= capacity or sum(s.row is not None for s in pack) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_segments_come_in_the_order_of_what_they_continue(kind):
    """Ancestors ascend at each depth, as attention needs it."""
    for pack in make_packs(make_rows(KINDS[kind](), 1000), 10_000).packs:
        for depth in range(2):
            order = [segment.ancestors[depth] for segment in pack if len(segment.ancestors) > depth]
            assert order == sorted(order)
        for at, segment in enumerate(pack):
            assert all(ancestors < at for ancestors in segment.ancestors)


def test_a_few_shot_prompt_is_read_once_per_pack():
    rows = make_rows(choices(20, shots=200), 1000)
    naive = sum(row.length for row in rows.rows)
    one, several = make_packs(rows, 10_000), make_packs(rows, 600)
    assert work(one).calls == 1 and work(one).tokens < naive / 8
    assert work(several).calls > 2
    assert work(one).tokens < work(several).tokens <= work(one).tokens + 200 * (work(several).calls - 1)
    assert work(several).slots == work(several).tokens
