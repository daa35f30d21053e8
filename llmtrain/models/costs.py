"""The cost of one sequence or token: FLOP by kind of work, and bytes kept for the backward pass. No torch here.

One multiply-add is 2 FLOP. Matrix products, attention, scan and convolution count; elementwise work and
embedding look-ups do not. The backward pass costs twice the forward. Counts are of the mathematics: no launch setting,
backend or chunk size changes them.
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


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that one layer keeps per token: without activation checkpointing, and with the kinds that keep some results."""

    everything: float
    selective: float
    kernels: float = 0.0

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(
            self.everything + other.everything, self.selective + other.selective, self.kernels + other.kernels
        )
