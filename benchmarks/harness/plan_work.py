"""The work of a plan for scoring: what sharing prefixes saves, and what padding costs."""

from dataclasses import dataclass

from llmtrain.eval.scoring.packed_plan import PackedPlan
from llmtrain.eval.scoring.prefix_plan import Plan


@dataclass(frozen=True)
class Work:
    """tokens: read, without padding. slots: padding included. calls: forward passes."""

    tokens: int
    slots: int
    calls: int


def work(plan: Plan | PackedPlan) -> Work:
    if isinstance(plan, PackedPlan):
        tokens = sum(len(segment.tokens) for pack in plan.packs for segment in pack)
        return Work(tokens, tokens, len(plan.packs))
    roots = [[subtree.root] for subtree in plan.subtrees if subtree.root]
    batches = [batch for subtree in plan.subtrees for batch in subtree.batches]
    prefixes = [batch.prefixes for batch in batches if batch.prefixes]
    suffixes = [[suffix.tokens for suffix in some] for batch in batches for some in batch.suffix_batches]
    calls = [*roots, *prefixes, *suffixes]
    tokens = sum(len(row) for rows in calls for row in rows)
    return Work(tokens, sum(len(rows) * max(map(len, rows)) for rows in calls), len(calls))
