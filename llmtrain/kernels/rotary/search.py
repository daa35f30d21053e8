"""Tuning space of rotary positions: one kernel, run forward and backward."""

import itertools
from collections.abc import Iterator
from typing import Any

from llmtrain.kernels.rotary.reference import rotate
from llmtrain.kernels.rotary.triton import default_launch, launch_rotary
from llmtrain.kernels.rotary.triton_launch import Launch
from llmtrain.kernels.search import Outputs, Search, lanes


class RotarySearch(Search):
    """The part `every` turns q and k, and then as much back."""

    parts, launch = ("every",), Launch

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.table, (self.q, self.k) = default_launch(self.spec, self.where), self.tensors
        self.cos, self.sin = self.operation.tables(self.spec, self.shape.seq_len, device=self.device)

    def launches(self, part: str, quick: bool) -> Iterator[Launch]:
        """Candidates in which a thread holds 2 to 16 numbers of a head's half."""
        yield self.table
        threads, columns = lanes(self.where), 1 << (self.spec.head_dim // 2 - 1).bit_length()
        tokens = (16, 32, 64) if quick else (8, 16, 32, 64, 128)
        for rows, heads, num_warps in itertools.product(tokens, (8,) if quick else (2, 4, 8, 16), (1, 2, 4, 8)):
            if rows * columns // (threads * num_warps) in (2, 4, 8, 16):
                yield Launch(rows, heads, num_warps)

    def run(self, part: str, launch: Launch | None) -> Outputs:
        options = (launch or self.table).dump()
        forward, backward = (
            launch_rotary(self.q, self.k, self.cos, self.sin, inverse, options) for inverse in (False, True)
        )
        return (*forward, *backward)

    def in_float64(self) -> dict[str, Any]:
        cos, sin = self.cos.double(), self.sin.double()
        return {"every": tuple(rotate(t.double(), cos, way) for way in (sin, -sin) for t in (self.q, self.k))}

    def work(self, part: str) -> float:
        """Bytes of q and k, in and out, twice."""
        return 4 * (self.q.numel() + self.k.numel()) * self.q.element_size()
