"""Tuning space of the attention kernels: forward, dq and dkdv, each on its own."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.attention import stored_dscores
from llmtrain.kernels.attention.documents import documents
from llmtrain.kernels.attention.float8_call import Float8Call
from llmtrain.kernels.attention.triton_call import Call
from llmtrain.kernels.attention.triton_launch import KERNELS, Launch, StoredLaunch
from llmtrain.kernels.attention.triton_select import choose
from llmtrain.kernels.search import Search

# Backward is 2.5 x forward, of which dq makes three products of seven, dkdv four.
_SHARES = {"forward": 1.0, "dq": 2.5 * 3 / 7, "dkdv": 2.5 * 4 / 7}


def _forms(part: str, launch: Launch, head_dim: int) -> list[dict[str, Any]]:
    """Forms of a kernel beside the plain one; see triton_launch.Launch."""
    one = {"one_loop": True}
    if part != "dkdv":
        return [one]
    if head_dim <= 128:
        return [one, *({"single_loop": m, "dv_first": d} for m, d in ((False, True), (True, False), (True, True)))]
    split = {"split": True, "single_loop": True}
    found = [one, {"single_loop": True, "dv_first": True}, split, {"split": True, **one}]
    return [*found, *[{**split, "dv_block_m": 64}] * (launch.block_m < 64)]


def _parts(head_dim: int) -> list[int | None]:
    """Widths of the tiles that may make up head_dim; None: powers of two, as few as pad nothing."""
    whole = 1 << (head_dim - 1).bit_length()
    if whole == head_dim:
        return [None]
    return [None, whole, max(16, head_dim & -head_dim)]


class AttentionSearch(Search):
    parts, launch, unit = KERNELS, Launch, "tflops"
    by_pieces = True

    def __init__(self, *given: Any):
        super().__init__(*given)
        (self.q, self.k, self.v, *sinks), spec, shape, device = self.tensors, self.spec, self.shape, self.device
        self.causal = not self.operation.full(shape)
        slopes, bounds, ids = None, (None, None), self.operation.ids(shape, device)
        if ids is not None:
            packed = documents(ids) if device != "meta" else None
            empty = torch.empty(ids.shape, dtype=torch.int32, device=device)
            bounds = (packed.starts, packed.ends) if packed else (empty, empty)
        if spec.slopes is not None:
            slopes = torch.tensor(spec.slopes, device=device)
        of_heads = sinks[0].float() if sinks else None
        self.settings = (spec.scale, self.causal, spec.sliding_window, spec.softcap, slopes, *bounds, of_heads)
        self.out = torch.empty((*self.q.shape[:3], spec.width), dtype=self.q.dtype, device=device)
        self.lse = torch.empty((shape.batch, spec.n_heads, shape.seq_len), device=device)
        self.delta = torch.empty_like(self.lse)
        if device != "meta":
            self.out, self.lse = self._call({}).forward()
            self._call({}).dq(self.out, self.lse, self.up, None, self.delta)

    def _call(self, launches: dict[Any, Launch]) -> Call:
        return Call(self.q, self.k, self.v, *self.settings, launches=launches, platform=self.where)

    def runner(self, part: str, launch: dict[str, Any] | None) -> Any:
        if part.startswith("float8_"):
            return self._float8(part.removeprefix("float8_"), launch)
        if part != "dscores":
            return super().runner(part, launch)
        # Not tuned: a row says from which length on it takes the place of dq and dkdv.
        stored, call = StoredLaunch(**(launch or {})), self._call({})
        return lambda: stored_dscores.backward(call, stored, self.out, self.lse, self.up, None)

    def _float8(self, kernel: str, launch: dict[str, Any] | None) -> Any:
        """A kernel of float8_call.py, with what makes its operands. Not tuned."""
        scale, _, window, _, *rest = self.settings[:-1]
        launches = {} if launch is None else {kernel: Launch(**launch)}
        call = Float8Call(self.q, self.k, self.v, scale, window, *rest, launches=launches, platform=self.where)
        if kernel == "forward":
            return call.forward
        stats = (self.lse.new_empty((*self.lse.shape[:2], call.padded)) for _ in range(2))
        return lambda: getattr(call, kernel)(call.gradients(self.out, *stats, self.up))

    def run(self, part: str, launch: Launch | None) -> Sequence[Tensor]:
        call = self._call({} if launch is None else {part: launch})
        if part == "forward":
            return (call.forward()[0],)
        if part == "dq":
            return (call.dq(self.out, self.lse, self.up, None, self.delta),)
        n_kv = self.spec.n_kv_heads
        return [t.unflatten(2, (n_kv, -1)).sum(3) for t in call.dkdv(self.lse, self.up, self.delta)]

    def in_float64(self) -> dict[str, Sequence[Tensor]]:
        out, dq, *dkdv = self.operation.exact(self.shape, self.tensors, self.up)
        return {"forward": (out,), "dq": (dq,), "dkdv": dkdv}

    def work(self, part: str) -> float:
        return _SHARES[part] * self.operation.work(self.shape)[0].flops

    def launches(self, part: str, quick: bool) -> Iterator[Launch]:
        head_dim, dtype, arch = self.spec.head_dim, self.spec.dtype, self.where.arch
        hopper = self.where.vendor == "nvidia" and arch.startswith("sm9")
        single = dtype == "float32"
        kernel: Any = part
        grouped = self.spec.n_kv_heads < self.spec.n_heads
        yield choose(kernel, head_dim, dtype, self.where, self.shape.seq_len, self.shape.variant, grouped)
        queries: tuple[int, ...] = (64, 128) if part != "dkdv" else (32, 64, *([128] if head_dim <= 64 else []))
        keys: tuple[int, ...] = (32, 64, 128) if part != "dkdv" else (64, 128)
        if single or not hopper:
            queries = (16, *queries)
        if single:
            queries, keys = (16, 32, 64), (16, 32, 64)
        num_stages = (1, 2) if self.where.vendor == "amd" or single else (2, 3)
        for m, n, num_warps, depth in itertools.product(queries, keys, (4, 8), num_stages):
            numbers = m * n // (32 * num_warps)  # scores of a thread
            if not 4 <= numbers <= 128 or (head_dim > 128 and m * n > 64 * 128) or (quick and depth > 2):
                continue
            # Four warps multiply 64 rows at a time: of eight, half would compute again what the others do.
            rows = n if part == "dkdv" else m
            if hopper and not single and num_warps * 16 != rows and (head_dim > 64 or num_warps * 16 > rows):
                continue
            for width in _parts(head_dim) if hopper and not single else [None]:
                whole = width is not None or head_dim & (head_dim - 1) == 0
                launch = Launch(m, n, num_warps, depth, hopper and not single and whole, part=width)
                yield launch
                if not single and depth == 2:
                    yield from (replace(launch, **form) for form in _forms(part, launch, head_dim))
