"""Launches of attention in float8: for one attention, forward or backward."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels import platform as platforms
from llmtrain.kernels import tuning
from llmtrain.kernels.attention.float8_kernels import float8_dkdv, float8_dq, float8_forward
from llmtrain.kernels.attention.float8_quantise import BLOCK, quantise_gradients, quantise_inputs
from llmtrain.kernels.attention.sum_groups import sum_groups
from llmtrain.kernels.attention.triton_launch import Launch
from llmtrain.kernels.attention.triton_select import INTERPRETED, LOG2_E, pairs_in_flight
from llmtrain.kernels.launch import Descriptor, cdiv, next_power_of_2
from llmtrain.kernels.platform import Platform, float8_format

_PROGRAMS_PER_SM = 4
_QUANTISE_WARPS = 8
_platform_of = functools.cache(platforms.detect)


class Float8Call:
    """The kernel launches of one attention, causal. q: [batch, T, n_heads, head_dim], k, v: with n_kv_heads; starts, ends: of
    documents, [batch, T], or None. launches, platform: as of triton_call.Call.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, slopes: Tensor | None = None,
        starts: Tensor | None = None, ends: Tensor | None = None, *,
        launches: Mapping[str, Launch] | None = None, platform: Platform | None = None,
    ):  # fmt: skip
        self.q, self.k, self.v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        self.batch, self.seq_len, self.n_heads, self.head_dim = q.shape
        self.n_kv, self.group = k.shape[2], q.shape[2] // k.shape[2]
        self.padded = cdiv(self.seq_len, BLOCK) * BLOCK
        assert k.shape == v.shape == (self.batch, self.seq_len, self.n_kv, self.head_dim) and self.head_dim in (64, 128)
        assert self.batch * self.n_heads * self.padded < 1 << 31
        self.scale, self.slopes, self.starts, self.ends = scale, slopes, starts, ends
        self.window = window if window is not None and window < self.seq_len else None
        self.platform, self.fixed = platform or _platform_of(q.device), launches or {}
        self.format = getattr(torch, float8_format(self.platform))
        self.own = {
            "BLOCK": BLOCK,
            "REORDERED": self.platform.vendor != "amd",
            "LARGEST": float(torch.finfo(self.format).max),
        }

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """out [batch, T, n_heads, head_dim], and row_max and row_inverse, of float8_forward."""
        launch = self.launch("forward")
        q, _, q_scales, _ = self._operands(self.q, rows=True)
        k, _, k_scales, _ = self._operands(self.k, rows=True)
        _, v, _, v_scales = self._operands(self.v, columns=True, by_norm=True)
        out = self.q.new_empty(self.q.shape)
        row_max, row_inverse = (self._stats(self.padded > self.seq_len) for _ in range(2))
        grid, sizes, fixed = self._launch(launch, launch.block_m)
        operands = self._rows(q, launch.block_m), self._rows(k, launch.block_n), self._columns(v, launch.block_n)
        float8_forward[grid](
            *operands, out, row_max, row_inverse, q_scales, k_scales, v_scales, self.slopes, self.starts, self.ends,
            *sizes, **fixed,
        )  # fmt: skip
        return out, row_max, row_inverse

    def backward(
        self, out: Tensor, row_max: Tensor, row_inverse: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv like q, k, v, contiguous."""
        operands = self.gradients(out, row_max, row_inverse, dout)
        dq = self.dq(operands)
        dk, dv = self.dkdv(operands)
        if dk.shape[2] > self.n_kv:
            dk, dv = sum_groups(dk, dv, self.n_kv, self.k.dtype)
        return dq, dk, dv

    def gradients(self, out: Tensor, row_max: Tensor, row_inverse: Tensor, dout: Tensor) -> dict[str, Tensor]:
        """The operands of dq and dkdv, by the names of quantise_gradients and of `_operands`."""
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        found = {"row_max": row_max}
        found["k"], found["k_columns"], found["k_scales"], found["k_column_scales"] = self._operands(
            self.k, rows=True, columns=True
        )
        found["v"], _, found["v_scales"], _ = self._operands(self.v, rows=True, by_norm=True)
        shape = (self.batch, self.n_heads, self.padded, self.head_dim)
        for name in ("q", "q_columns", "dout", "dout_columns"):
            found[name] = self.q.new_empty(shape, dtype=self.format)
        found |= {name: self._stats() for name in ("delta", "factor")}
        found |= {name: self._scales(self.n_heads) for name in ("q_scales", "q_column_scales", "do_column_scales")}
        names = (
            "q", "q_columns", "dout", "dout_columns", "delta", "factor", "q_scales", "q_column_scales", "do_column_scales",
        )  # fmt: skip
        quantise_gradients[self.padded // BLOCK, self.batch * self.n_heads](
            self.q, out, dout, row_max, row_inverse, *(found[name] for name in names),
            *self.q.stride()[:3], *dout.stride()[:3], self.seq_len, self.padded,
            HEADS=self.n_heads, HEAD_DIM=self.head_dim, **self.own, num_warps=_QUANTISE_WARPS,
        )  # fmt: skip
        return found

    def dq(self, of: Mapping[str, Tensor]) -> Tensor:
        launch, dq = self.launch("dq"), self.q.new_empty(self.q.shape)
        m, n = launch.block_m, launch.block_n
        grid, sizes, fixed = self._launch(launch, m)
        tiles = (
            self._rows(of["q"], m), self._rows(of["dout"], m), self._rows(of["k"], n), self._columns(of["k_columns"], n),
            self._rows(of["v"], n),
        )  # fmt: skip
        scales = (of[name] for name in ("q_scales", "k_scales", "k_column_scales", "v_scales"))
        float8_dq[grid](
            *tiles, of["row_max"], of["delta"], of["factor"], dq, *scales, self.slopes, self.starts, self.ends,
            *sizes, self.scale, **fixed, SCALES=next_power_of_2(self.padded // BLOCK),
        )  # fmt: skip
        return dq

    def dkdv(self, of: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """dk and dv; or, in fp32, the parts of both that sum_groups adds, [batch, T, n_heads, head_dim]."""
        launch = self.launch("dkdv")
        m, n = launch.block_m, launch.block_n
        # Heads that share keys in one program, where programs enough are left for the device.
        whole = self.batch * self.n_kv * cdiv(self.seq_len, n) >= _PROGRAMS_PER_SM * self.platform.num_sms
        heads = self.group if whole else 1
        dtype = self.q.dtype if heads == self.group else torch.float32
        shape = (self.batch, self.seq_len, self.n_heads // heads, self.head_dim)
        dk, dv = (self.q.new_empty(shape, dtype=dtype) for _ in range(2))
        grid, sizes, fixed = self._launch(launch, n, heads)
        tiles = (
            self._rows(of["q"], m), self._columns(of["q_columns"], m), self._rows(of["dout"], m),
            self._columns(of["dout_columns"], m), self._rows(of["k"], n), self._rows(of["v"], n),
        )  # fmt: skip
        scales = (of[name] for name in ("q_scales", "q_column_scales", "do_column_scales", "k_scales", "v_scales"))
        float8_dkdv[grid](
            *tiles, of["row_max"], of["delta"], dk, dv, *scales, self.slopes, self.starts, self.ends, *sizes, self.scale,
            **fixed, SCALES=next_power_of_2(self.padded // BLOCK * heads), HEADS=heads,
            DV_FIRST=launch.dv_first,
        )  # fmt: skip
        return dk, dv

    def launch(self, kernel: str) -> Launch:
        if kernel in self.fixed or self.platform.vendor == "cpu":
            return self.fixed.get(kernel, INTERPRETED)
        dtype, sizes = str(self.q.dtype).removeprefix("torch."), {"head_dim": self.head_dim}
        return tuning.select(f"attention.float8_{kernel}", dtype, sizes, self.platform).launch

    def _operands(
        self, x: Tensor, rows: bool = False, columns: bool = False, by_norm: bool = False
    ) -> tuple[Any, Any, Any, Any]:
        """Rows, columns and the scales of each, of quantise_inputs; None for those that are not asked for."""
        heads, asked = x.shape[2], (rows, columns)
        made = [
            x.new_empty(self.batch * heads * self.padded * self.head_dim, dtype=self.format) if a else None
            for a in asked
        ]
        scales = [self._scales(heads) if a else None for a in asked]
        quantise_inputs[self.padded // BLOCK, self.batch * heads](
            x, *made, *scales, *x.stride()[:3], self.seq_len, self.padded,
            HEADS=heads, HEAD_DIM=self.head_dim, **self.own, BY_NORM=by_norm, num_warps=_QUANTISE_WARPS,
        )  # fmt: skip
        return *made, *scales

    def _scales(self, heads: int) -> Tensor:
        return self.q.new_empty((self.batch, heads, self.padded // BLOCK), dtype=torch.float32)

    def _stats(self, zeros: bool = False) -> Tensor:
        """Statistics of queries. zeros: the backward pass reads places that no tile of the forward pass has."""
        shape = (self.batch, self.n_heads, self.padded)
        return (self.q.new_zeros if zeros else self.q.new_empty)(shape, dtype=torch.float32)

    @property
    def _use_tma(self) -> bool:
        return self.platform.vendor == "nvidia" and self.platform.arch.startswith("sm9")

    def _rows(self, t: Tensor, block: int) -> Any:
        """Rows as a kernel reads them, `block` tokens at a time."""
        if not self._use_tma:
            return t
        return Descriptor(t, [t.numel() // self.head_dim, self.head_dim], [self.head_dim, 1], [block, self.head_dim])

    def _columns(self, t: Tensor, block: int) -> Any:
        if not self._use_tma:
            return t
        return Descriptor(t, [t.numel() // self.padded, self.padded], [self.padded, 1], [self.head_dim, block])

    def _launch(self, launch: Launch, rows: int, heads: int = 1) -> tuple[tuple[int], tuple, dict[str, Any]]:
        """Grid, sizes and constants. rows: of a program's tile; heads: that it loops over."""
        assert BLOCK % launch.block_m == 0 and BLOCK % launch.block_n == 0
        pairs, tiles = self.batch * self.n_heads // heads, cdiv(self.seq_len, rows)
        reads = self.seq_len * 2 * self.head_dim * heads
        in_flight = pairs_in_flight(self.platform, reads, tiles, pairs, self.group // heads)
        fixed = {
            "WINDOW": self.window,
            "N_HEADS": self.n_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "NUM_STAGES": launch.num_stages,
            "USE_TMA": self._use_tma,
            **self.own,
        }
        sizes = (self.seq_len, self.padded, pairs, in_flight, self.scale * LOG2_E)
        return (tiles * pairs,), sizes, {**fixed, **launch.options(self.platform)}
