"""Tuning of rotary positions: one kernel, run forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llmtrain.bench.tune.memory_bound import Draw, MemoryBound, Outputs
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.reference import rotate
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.rotary.triton import default_launch, launch_rotary
from llmtrain.kernels.rotary.triton_launch import Launch


@dataclass(frozen=True)
class Case:
    """tokens: in all sequences together. heads: None: as many as make up about 2048 channels."""

    head_dim: int = 128
    heads: int | None = None
    kv_heads: int | None = None
    seq_len: int = 4096
    dtype: str = "bfloat16"
    tokens: int = 16384

    def refusal(self) -> str | None:
        """Reason why no search can serve the case on any GPU, or None."""
        if self.head_dim % 2:
            return f"rotary positions turn channels in pairs: head_dim must be even, not {self.head_dim}"
        return None

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.seq_len)


class Problem(MemoryBound):
    """The part `every` turns q and k, and then as much back."""

    operation, parts, launch = "rotary", ("every",), Launch

    def __init__(self, case: Case, device: str, where: Platform):
        super().__init__(case, where)
        self.table = default_launch(RotarySpec(case.head_dim, case.dtype), where)
        draw = Draw(device, case.dtype)
        heads = case.heads or max(1, 2048 // case.head_dim)

        def sliced(count: int) -> torch.Tensor:
            width = count * case.head_dim
            return draw.slice(case.batch, case.seq_len, width).unflatten(-1, (count, case.head_dim))

        self.q, self.k = sliced(heads), sliced(case.kv_heads or heads)
        shape = (case.seq_len, 1, case.head_dim // 2)
        self.cos, self.sin = (torch.empty(shape, device=device) for _ in range(2))
        if device != "meta":
            angle = torch.randn(shape, generator=torch.Generator(device).manual_seed(1), device=device)
            self.cos, self.sin = angle.cos(), angle.sin()

    def launches(self, part: str, quick: bool) -> Iterator[Launch]:
        """Candidates in which a thread holds 2 to 16 numbers of a head's half."""
        yield self.table
        lanes, columns = 64 if self.where.vendor == "amd" else 32, 1 << (self.case.head_dim // 2 - 1).bit_length()
        tokens = (16, 32, 64) if quick else (8, 16, 32, 64, 128)
        for rows, heads, num_warps in itertools.product(tokens, (8,) if quick else (2, 4, 8, 16), (1, 2, 4, 8)):
            if rows * columns // (lanes * num_warps) in (2, 4, 8, 16):
                yield Launch(rows, heads, num_warps)

    def run(self, part: str, launch: Launch | None) -> Outputs:
        options = (launch or self.table).dump()
        forward, backward = (
            launch_rotary(self.q, self.k, self.cos, self.sin, inverse, options) for inverse in (False, True)
        )
        return (*forward, *backward)

    def in_float64(self) -> dict[str, Outputs]:
        cos, sin = self.cos.double(), self.sin.double()
        turned = [rotate(t.double(), cos, way) for way in (sin, -sin) for t in (self.q, self.k)]
        return {"every": tuple(turned)}

    def bytes(self, part: str) -> int:
        """q and k, in and out, twice."""
        return 4 * (self.q.numel() + self.k.numel()) * self.q.element_size()
