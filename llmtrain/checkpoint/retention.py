"""The rule by which checkpoints of a run are retained. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """last: how many of the newest are retained, all when None. every: also the first of every so many steps. also: a further
    step that is retained."""

    last: int | None = None
    every: int | None = None
    also: int | None = None

    def retained(self, steps: Iterable[int]) -> set[int]:
        """The steps to retain, of those of whole checkpoints."""
        ordered = sorted(steps)
        if self.last is None:
            return set(ordered)
        kept = set(ordered[-self.last :])
        if self.every is not None:
            first: dict[int, int] = {}
            for step in ordered:
                first.setdefault(step // self.every, step)
            kept |= {step for part, step in first.items() if part > 0}
        return kept | (set(ordered) & {self.also})
