"""Tuning of the attention kernels: forward, dq and dkdv, each on its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.tune.operations import TOLERANCE, Attempt, Winner, relative_error
from llmtrain.errors import UserError
from llmtrain.kernels.attention import stored_dscores
from llmtrain.kernels.attention.documents import documents
from llmtrain.kernels.attention.reference import ReferenceAttention, score_bias
from llmtrain.kernels.attention.spec import AttentionSpec, alibi_slopes, refuse_triton_sequence
from llmtrain.kernels.attention.triton_call import Call
from llmtrain.kernels.attention.triton_launch import KERNELS, Launch, StoredLaunch
from llmtrain.kernels.attention.triton_select import choose
from llmtrain.kernels.platform import Platform

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi_max_bias": 8.0},
    "documents": {},
    "softcap": {"softcap": 30.0},
    "window": {"sliding_window": 1024},
    "documents+window": {"sliding_window": 1024},
    "softcap+window": {"softcap": 50.0, "sliding_window": 1024},
    # All at once.
    "mixed": {"alibi_max_bias": 8.0, "sliding_window": 512, "softcap": 30.0},
    "mixed, full": {"alibi_max_bias": 8.0, "sliding_window": 512, "softcap": 30.0},
    # The keys before those of a part of the queries (suffix.py).
    "plain, full": {},
}


@dataclass(frozen=True)
class Case:
    """tokens: in all sequences together. heads: None: as many as make up about 2048 channels."""

    head_dim: int = 128
    seq_len: int = 4096
    variant: str = "plain"
    dtype: str = "bfloat16"
    tokens: int = 16384
    heads: int | None = None
    kv_heads: int | None = None
    document: int = 700
    """Tokens of one."""

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            causal = [name for name in VARIANTS if not name.endswith("full")]
            raise UserError(f"no attention variant '{self.variant}'; there is {', '.join(causal)}")

    def refusal(self) -> str | None:
        """Reason why no search can serve the case on any GPU, or None."""
        spec = self.spec
        if spec.n_heads % spec.n_kv_heads:
            return f"heads must be a multiple of kv_heads, and {spec.n_heads} is no multiple of {spec.n_kv_heads}"
        if not self.causal:
            return "only causal attention is checked, so only that is tuned"
        return refuse_triton_sequence(spec, None)

    @property
    def spec(self) -> AttentionSpec:
        heads = self.heads or (16 if self.head_dim >= 128 else max(1, 2048 // self.head_dim))
        kv_heads = self.kv_heads or heads
        return AttentionSpec(
            heads, kv_heads, self.head_dim, self.head_dim**-0.5, dtype=self.dtype, **VARIANTS[self.variant]
        )

    @property
    def packed(self) -> bool:
        return self.variant.startswith(("documents", "mixed"))

    @property
    def causal(self) -> bool:
        return not self.variant.endswith("full")

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.seq_len)

    def ids(self, device: str | torch.device) -> Tensor | None:
        if not self.packed:
            return None
        return (torch.arange(self.seq_len, device=device) // self.document).expand(self.batch, -1)

    def flops(self) -> float:
        """FLOP of the forward pass: 4 head_dim per visible pair."""
        spec, pairs = self.spec, self.spec.pairs(self.seq_len, self.causal)
        if self.packed:
            whole, rest = divmod(self.seq_len, self.document)
            pairs = whole * spec.pairs(self.document, self.causal) + spec.pairs(rest, self.causal)
        return 4.0 * pairs * spec.n_heads * spec.head_dim * self.batch

    def tensors(self, device: str, seed: int = 0) -> tuple[list[Tensor], Tensor]:
        """q, k, v as slices of one projection, and the gradient of the output."""
        spec, dtype = self.spec, getattr(torch, self.dtype)
        heads = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
        g = None if device == "meta" else torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, device=device).to(dtype)

        fused = random(self.batch, self.seq_len, sum(heads) * spec.head_dim)
        slices = fused.split([h * spec.head_dim for h in heads], dim=-1)
        qkv = [t.unflatten(-1, (h, spec.head_dim)) for t, h in zip(slices, heads, strict=True)]
        return qkv, random(self.batch, self.seq_len, spec.n_heads, spec.head_dim)

    def first_group(self, t: Tensor) -> Tensor:
        """Slice of [batch, T, heads, head_dim]: the last sequence's first key head, or the query heads that share it."""
        return t[-1:, :, : t.shape[2] // self.spec.n_kv_heads]

    def exact(self, qkv: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
        """`first_group` of the output and of the gradients of q, k and v, in float64."""
        if not self.causal:
            variant = self.variant.partition(",")[0]
            raise UserError(f"attention is checked with causality alone: tune `{variant}`")
        spec, group, ids = self.spec, self.spec.n_heads // self.spec.n_kv_heads, self.ids(dout.device)
        bias = score_bias(spec, self.seq_len, dout.device)[:group]
        if ids is not None:
            bias = bias.masked_fill(ids[-1][:, None] != ids[-1][None, :], float("-inf"))
        one = AttentionSpec(group, 1, spec.head_dim, spec.scale, softcap=spec.softcap, dtype="float64")
        leaves = [self.first_group(t.detach()).double().requires_grad_() for t in qkv]
        q, k, v = leaves
        out = ReferenceAttention(one)(q, k, v, bias)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.first_group(dout).double())]


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


class Problem:
    """See operations.Problem."""

    parts = KERNELS

    def __init__(self, case: Case, device: str, where: Platform):
        self.case, self.where, self.spec = case, where, case.spec
        self.tolerance = TOLERANCE[case.dtype]
        (self.q, self.k, self.v), self.dout = case.tensors(device)
        ids, slopes, bounds = case.ids(device), None, (None, None)
        if ids is not None:
            packed = documents(ids) if device != "meta" else None
            empty = torch.empty(ids.shape, dtype=torch.int32, device=device)
            bounds = (packed.starts, packed.ends) if packed else (empty, empty)
        if self.spec.alibi_max_bias is not None:
            slopes = torch.tensor(alibi_slopes(self.spec.n_heads, self.spec.alibi_max_bias), device=device)
        self.settings = (self.spec.scale, case.causal, self.spec.sliding_window, self.spec.softcap, slopes, *bounds)
        self.out = torch.empty(self.q.shape, dtype=self.q.dtype, device=device)
        self.lse = torch.empty((case.batch, self.spec.n_heads, case.seq_len), device=device)
        self.delta = torch.empty_like(self.lse)
        self._exact: dict[str, Tensor] = {}
        if device != "meta":
            self.out, self.lse = self._call({}).forward()
            self._call({}).dq(self.out, self.lse, self.dout, None, self.delta)

    def _call(self, launches: dict[Any, Launch]) -> Call:
        return Call(self.q, self.k, self.v, *self.settings, launches=launches, platform=self.where)

    def runner(self, part: str, launch: dict[str, Any] | None) -> Callable[[], dict[str, Tensor]]:
        if part == "dscores":  # not tuned: a row says from which length on it takes the place of dq and dkdv
            stored = StoredLaunch(**(launch or {}))
            call = self._call({})
            return lambda: dict(
                zip(
                    ("dq", "dk", "dv"),
                    stored_dscores.backward(call, stored, self.out, self.lse, self.dout, None),
                    strict=True,
                )
            )
        call = self._call({} if launch is None else {part: Launch(**launch)})

        def run() -> dict[str, Tensor]:
            if part == "forward":
                return {"out": call.forward()[0]}
            if part == "dq":
                return {"dq": call.dq(self.out, self.lse, self.dout, None, self.delta)}
            return dict(zip(("dk", "dv"), call.dkdv(self.lse, self.dout, self.delta), strict=True))

        return run

    def candidates(self, part: str, quick: bool) -> list[dict[str, Any]]:
        head_dim, hopper = self.case.head_dim, self.where.vendor == "nvidia" and self.where.arch.startswith("sm9")
        single = self.case.dtype == "float32"
        seq_len, variant = self.case.seq_len, self.case.variant
        kernel: Any = part
        grouped = self.spec.n_kv_heads < self.spec.n_heads
        found = [choose(kernel, head_dim, self.case.dtype, self.where, seq_len, variant, grouped)]
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
                found.append(launch)
                if not single and depth == 2:
                    found += [replace(launch, **form) for form in _forms(part, launch, head_dim)]
        return [asdict(launch) for launch in dict.fromkeys(found)]

    def error(self, part: str, launch: dict[str, Any]) -> float:
        if not self._exact:
            exact = self.case.exact((self.q, self.k, self.v), self.dout)
            self._exact = dict(zip(("out", "dq", "dk", "dv"), exact, strict=True))
        found = self.runner(part, launch)()
        return max(relative_error(self.case.first_group(t), self._exact[name]) for name, t in found.items())

    def winners(self, best: dict[str, list[Attempt]], measurer: Callable[[str, dict[str, Any]], Any]) -> list[Winner]:
        # Backward is 2.5 x forward, of which dq makes three products of seven, dkdv four.
        shares = {"forward": 1.0, "dq": 2.5 * 3 / 7, "dkdv": 2.5 * 4 / 7}
        flops, fastest = self.case.flops(), [(part, attempts[0]) for part, attempts in best.items() if attempts]
        return [
            Winner(f"attention.{part}", Launch(**one.launch), one.ms, one.shared, shares[part] * flops, "tflops")
            for part, one in fastest
        ]
