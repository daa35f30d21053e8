"""Launches of our attention kernels: for one attention, forward or backward, by the launch parameters of its shape."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels import platform as platforms
from llmtrain.kernels.attention import stored_dscores, suffix
from llmtrain.kernels.attention.sum_groups import sum_groups
from llmtrain.kernels.attention.triton_backward import attention_dkdv, attention_dq
from llmtrain.kernels.attention.triton_forward import attention_forward
from llmtrain.kernels.attention.triton_launch import Kernel, Launch, StoredLaunch
from llmtrain.kernels.attention.triton_select import (
    LOG2_E,
    MIXED,
    choose,
    choose_stored,
    pairs_in_flight,
    variant_name,
)
from llmtrain.kernels.attention.triton_tiles import parts_of
from llmtrain.kernels.launch import Descriptor, cdiv
from llmtrain.kernels.platform import DTYPES, Platform

PROGRAMS_PER_SM = 4
"""Of dkdv: fewer leave multiprocessors idle at the end, since early keys are seen by more queries than late ones."""
_DTYPES = {getattr(torch, name): name for name in DTYPES}


@functools.cache
def _platform_of(device: torch.device) -> Platform:
    return platforms.detect(device)


class Call:
    """The kernel launches of one attention, forward or backward.

    launches, platform: override the table's launch parameters and the tensors' platform, for tuning and for compiling without
    a GPU.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True, window: int | None = None,
        softcap: float | None = None, slopes: Tensor | None = None, starts: Tensor | None = None,
        ends: Tensor | None = None, sinks: Tensor | None = None, *,
        launches: dict[Kernel, Launch] | None = None, platform: Platform | None = None,
    ):  # fmt: skip
        self.q, self.k, self.v = q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
        self.strides = q.stride()[:3] + k.stride()[:3] + v.stride()[:3]
        self.batch, self.seq_len, self.n_heads, self.head_dim = q.shape
        self.n_kv, self.value_dim = v.shape[2:]
        assert k.shape == (self.batch, self.seq_len, self.n_kv, self.head_dim) and v.shape[:3] == k.shape[:3]
        assert self.n_heads % self.n_kv == 0 and all(n <= 256 and n % 8 == 0 for n in (self.head_dim, self.value_dim))
        assert q.dtype == k.dtype == v.dtype
        assert scale > 0 and (window is None or window > 0) and (softcap is None or softcap > 0)
        # Offsets inside a sequence are 32 bits wide.
        widest = self.n_heads * max(self.head_dim, self.value_dim)
        assert self.seq_len * max(*self.strides[1::3], widest) < 1 << 31
        self.scale, self.causal, self.softcap = scale, causal, softcap
        # A window as long as the sequence hides nothing.
        self.window = window if window is not None and window < self.seq_len else None
        self.slopes, self.starts, self.ends, self.sinks = slopes, starts, ends, sinks
        self.group = self.n_heads // self.n_kv
        self.values = None if self.value_dim == self.head_dim else self.value_dim
        self.platform = platform or _platform_of(q.device)
        dtype = _DTYPES[q.dtype]
        reach = self.seq_len if self.window is None else self.window
        self.selection = (self.head_dim, dtype, self.platform, reach)
        self.variant = variant_name(
            slopes is not None, starts is not None, softcap is not None, reach < self.seq_len, causal
        )
        self.fixed = launches or {}
        assert starts is None or (starts.shape == (self.batch, self.seq_len) and starts.is_contiguous())

    def row(self, kernel: Kernel) -> Launch:
        """Launch parameters of whole tiles of this shape and variant."""
        return self.fixed.get(kernel) or choose(kernel, *self.selection, self.variant, self.group > 1, self.values)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output [batch, T, n_heads, value_dim], and lse [batch, n_heads, T]."""
        q, k, v = self.q, self.k, self.v
        launch, use_tma = self._choose_launch("forward", k, v)
        if launch.cudnn and self.variant == "plain" and q.is_cuda and self._all_plain:
            return self._cudnn_forward()
        out = q.new_empty((*q.shape[:-1], self.value_dim))
        lse = q.new_empty((self.batch, self.n_heads, self.seq_len), dtype=torch.float32)
        if use_tma:
            k, v = (self._descriptor(t, launch.block_n, launch) for t in (k, v))
        grid, sizes, fixed = self._launch(
            launch, launch.block_m, launch.block_n, use_tma, masked=use_tma and self.causal
        )
        attention_forward[grid](
            q, k, v, out, lse, self.slopes, self.sinks, self.starts, self.ends, *self.strides, *sizes, **fixed,
        )  # fmt: skip
        return out, lse

    def _cudnn_forward(self) -> tuple[Tensor, Tensor]:
        how = suffix.AttentionScale(self.scale, None)
        out, lse = suffix.KERNELS["cudnn"].forward(self.q, self.k, self.v, how, self.causal)
        return out.contiguous(), lse.contiguous()

    def backward(
        self, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv like q, k, v, contiguous, and the gradient of the sinks, without which it is empty."""
        if (launch := self._stored(dout)) is not None:
            return *stored_dscores.backward(self, launch, out, lse, dout, dlse), lse.new_empty(0)
        delta = torch.empty_like(lse)
        dq = self.dq(out, lse, dout, dlse, delta)
        dk, dv = self.dkdv(lse, dout, delta)
        if dk.shape[2] > self.n_kv:
            dk, dv = sum_groups(dk, dv, self.n_kv, self.k.dtype)
        return dq, dk, dv, suffix.sinks_gradient(self.sinks, lse, delta)

    @property
    def _all_plain(self) -> bool:
        """No sinks, and values as wide as keys."""
        return self.sinks is None and self.values is None

    def _stored(self, dout: Tensor) -> StoredLaunch | None:
        """Launch parameters of the backward pass by stored gradients of scores, which takes whole tiles; None: dq and dkdv."""
        if self.fixed or self.variant == MIXED or self.window is not None or self.starts is not None:
            return None
        if self.sinks is not None:
            return None
        launch = choose_stored(*self.selection, self.variant, self.group > 1, self.values)
        if launch is None or self.seq_len % launch.tile or dout.stride(-1) != 1:
            return None
        sizes = (self.n_heads, self.group, self.seq_len, self.causal)
        return launch if stored_dscores.fills(launch, *sizes, self.platform.num_sms) else None

    def dq(self, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> Tensor:
        """dq; also fills delta, which dkdv reads."""
        dout = _rows_contiguous(dout)
        assert out.is_contiguous() and lse.is_contiguous() and delta.is_contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        q, k, v = self.q, self.k, self.v
        dq = q.new_empty(q.shape)
        launch, use_tma = self._choose_launch("dq", k, v)
        if use_tma:
            k, v = (self._descriptor(t, launch.block_n, launch) for t in (k, v))
        grid, sizes, fixed = self._launch(
            launch, launch.block_m, launch.block_n, use_tma, masked=use_tma and self.causal
        )
        attention_dq[grid](
            q, k, v, out, dout, lse, dlse, delta, dq, self.slopes, self.starts, self.ends,
            *self.strides, *dout.stride()[:3], *sizes, self.scale, **fixed,
        )  # fmt: skip
        return dq

    def dkdv(self, lse: Tensor, dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv; or, in fp32, the parts of both that sum_groups adds, [batch, T, n_kv * parts, width]."""
        dout = _rows_contiguous(dout)
        do_strides = dout.stride()[:3]
        q, k, v = self.q, self.k, self.v
        launch, use_tma = self._choose_launch("dkdv", q, dout)
        heads = self._heads_of_a_program(launch)
        # Where not all heads that share keys are in one program, in fp32 until they are summed.
        shape, dtype = (
            (self.batch, self.seq_len, self.n_heads // heads),
            q.dtype if heads == self.group else torch.float32,
        )
        dk, dv = (q.new_empty((*shape, width), dtype=dtype) for width in (self.head_dim, self.value_dim))
        for one, results in _passes(launch):
            q_rows, dout_rows = (self._descriptor(t, one.block_m, one) if use_tma else t for t in (q, dout))
            grid, sizes, fixed = self._launch(one, one.block_n, one.block_m, use_tma, heads)
            attention_dkdv[grid](
                q_rows, k, v, dout_rows, lse, delta, dk, dv, self.slopes, self.starts, self.ends,
                *self.strides, *do_strides, *sizes, self.scale, **fixed,
                HEADS=heads, DV_FIRST=one.dv_first, SINGLE_LOOP=one.single_loop or one.one_loop, **results,
            )  # fmt: skip
        return dk, dv

    def _heads_of_a_program(self, launch: Launch) -> int:
        """Query heads that share keys which one program of dkdv sums over: as many as leave programs enough for the device."""
        programs = self.batch * self.n_kv * cdiv(self.seq_len, launch.block_n)
        wanted = cdiv(PROGRAMS_PER_SM * self.platform.num_sms, programs)  # per key head
        return next(
            heads
            for heads in range(self.group, 0, -1)
            if self.group % heads == 0 and (heads == 1 or self.group // heads >= wanted)
        )

    def _launch(
        self, launch: Launch, rows: int, steps: int, use_tma: bool, heads: int = 1, masked: bool = False
    ) -> tuple[tuple[int], tuple, dict[str, Any]]:
        """Grid, sizes and constants. rows: of a program's tile; steps: rows of the tiles in its loop; heads: that it loops over.
        masked: of what lies beyond the sequence nothing is read by pointers, and causality hides it.
        """
        pairs = self.batch * self.n_heads // heads
        reads = self.seq_len * (self.head_dim + self.value_dim) * self.q.element_size() * heads
        tiles = cdiv(self.seq_len, rows)
        in_flight = pairs_in_flight(self.platform, reads, tiles, pairs, self.group // heads)
        softcap = None if self.softcap is None else self.softcap * LOG2_E
        sizes = (self.seq_len, pairs, in_flight, self.scale * LOG2_E, softcap)
        fixed = {
            "CAUSAL": self.causal,
            "WINDOW": self.window,
            "RAGGED": self.seq_len % steps != 0 and not masked,
            "N_HEADS": self.n_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "PARTS": parts_of(self.head_dim, launch.part),
            "VALUE_DIM": self.value_dim,
            "VALUE_PARTS": parts_of(self.value_dim, launch.part),
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "NUM_STAGES": launch.num_stages,
            "USE_TMA": use_tma,
            "ONE_LOOP": launch.one_loop,
            "IN_REGISTERS": launch.in_registers,
            # Both have the accuracy of fp32.
            "PRECISION": "tf32x3" if self.platform.vendor == "nvidia" else "ieee",
        }
        return (tiles * pairs,), sizes, {**fixed, **launch.options(self.platform)}

    def _choose_launch(self, kernel: Kernel, *tensors: Tensor) -> tuple[Launch, bool]:
        """Launch parameters of `kernel`, and True if TMA loads the tiles of `tensors`, which the kernel loops over.

        A row for a variant is for tiles loaded with or without TMA as it says, and without it for whole tiles: anything else takes
        registers that the row uses for larger tiles. Other calls take the row without a variant, or `mixed`.
        """
        launch = self.row(kernel)
        fits = self._fits_tma(launch, *tensors)
        whole = fits or not self.seq_len % _loop_rows(kernel, launch)
        if kernel not in self.fixed and (not whole or fits != launch.use_tma):
            launch = choose(kernel, *self.selection, MIXED if self.variant == MIXED or "+" in self.variant else None)
            fits = self._fits_tma(launch, *tensors)
        return launch, fits

    def _fits_tma(self, launch: Launch, *tensors: Tensor) -> bool:
        """True if TMA can load tiles of these tensors: in parts of one width, aligned to 16 bytes, with sequences, and where no
        part is padded heads too, that follow each other without gaps. Rows of a tile beyond the end of its sequence, whose scores
        are masked, are the next one's, or zeros.
        """
        if not launch.use_tma or self.platform.vendor == "amd":
            return False
        for t in tensors:
            (batch, token, head, _), width = t.stride(), t.shape[-1]
            size, parts = t.element_size(), parts_of(width, launch.part)
            if (
                len(set(parts)) > 1
                or token * size % 16
                or head * size % 16
                or not (head == width or t.shape[2] == 1 or sum(parts) > width)
                or not (batch == self.seq_len * token or self.batch == 1)
                or t.data_ptr() % 16
            ):
                return False
        return True

    def _descriptor(self, t: Tensor, rows: int, launch: Launch) -> Descriptor:
        """Tensor descriptor of t in blocks of `rows` rows of a part of a head; see load_rows."""
        batch, seq_len, heads, head_dim = t.shape
        parts, rows_all, token = parts_of(head_dim, launch.part), batch * seq_len, t.stride(1)
        if sum(parts) == head_dim:
            return Descriptor(t, [rows_all, heads * head_dim], [token, 1], [rows, parts[0]])
        return Descriptor(t, [heads, rows_all, head_dim], [t.stride(2), token, 1], [1, rows, parts[0]])


def _loop_rows(kernel: Kernel, launch: Launch) -> int:
    """Rows of the tiles that a program loops over."""
    return max(launch.block_m, launch.dv_block_m or 0) if kernel == "dkdv" else launch.block_n


def _passes(launch: Launch) -> list[tuple[Launch, dict[str, bool]]]:
    """The launches of dkdv, and what each computes."""
    if not launch.split:
        return [(launch, {"DK": True, "DV": True})]
    dv = replace(launch, block_m=launch.dv_block_m or launch.block_m)
    return [(dv, {"DK": False, "DV": True}), (launch, {"DK": True, "DV": False})]


def _rows_contiguous(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()
