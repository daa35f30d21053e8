"""The cost of one sequence or token: FLOP by kind of work, and bytes kept for the backward pass. No torch here.

One multiply-add is 2 FLOP. Matrix products, attention, scan and convolution count; elementwise work and
embedding look-ups do not. The backward pass costs twice the forward, less what frozen weights spare. Counts are of the
mathematics and of what is trained: no launch setting, backend or chunk size changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Work:
    """FLOP of one sequence, by kind of work."""

    projection: int = 0
    attention: int = 0
    scan: int = 0
    convolution: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Work) -> Work:
        return Work(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True)
class Flops:
    """FLOP of training on one sequence: the forward pass, the gradients of activations, and those of weights."""

    forward: Work = Work()
    grad_input: Work = Work()
    grad_weight: Work = Work()

    @classmethod
    def with_weight(cls, work: Work, trained: bool) -> Flops:
        """work: of a product with a weight, whose gradient is as much once more if it is trained."""
        return cls(work, work, work if trained else Work())

    @classmethod
    def between_activations(cls, work: Work) -> Flops:
        """work: without weights, such as attention's or a scan's. The gradients of its inputs are twice as much."""
        return cls(work, work + work)

    @property
    def total(self) -> int:
        return self.forward.total + self.grad_input.total + self.grad_weight.total

    def without_backward(self) -> Flops:
        """The same below the first trained layer, where no gradient arrives."""
        return Flops(self.forward)

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that one layer keeps per token: without activation checkpointing; of these, results of the operators that the kinds
    `kernels` and `selective` keep (saved_ops); and those of the products that `selective` keeps (kept_products)."""

    everything: float
    results: float = 0.0
    products: float = 0.0

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(
            self.everything + other.everything, self.results + other.results, self.products + other.products
        )
