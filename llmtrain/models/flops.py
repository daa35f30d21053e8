"""What a module says one sequence costs.

One multiply-add is 2 FLOP. Matrix products, attention, scan and convolution count; elementwise work and
embedding look-ups do not. The backward pass costs twice the forward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Flops:
    """Forward FLOP of one sequence, by kind of work."""

    projection: int = 0
    attention: int = 0
    scan: int = 0
    convolution: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Flops) -> Flops:
        return Flops(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})
