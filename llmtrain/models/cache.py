"""What a HybridLM remembers of the tokens it has read, so that the next one costs the work of one.

The rows of a batch end together: shorter ones are padded on the left, and `first` says where each begins. The next
free slot is kept in device memory, so reading one token is the same sequence of kernels every time, which a CUDA
graph can replay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.kernels import registry
from llmtrain.kernels.attention.masked import MaskedAttention
from llmtrain.models.blocks import BlockContext

if TYPE_CHECKING:
    from llmtrain.models.hybrid import HybridLM
    from llmtrain.models.mixers.attention import Attention
    from llmtrain.models.mixers.mamba2 import Mamba2

T_ = TypeVar("T_")


@dataclass
class Span:
    """The tokens being read: what their layers share.

    slots: [T], where they go in the cache. first: [batch], each row's first slot that is not padding.
    start: tokens read before. padded: whether some of the tokens are padding, which only the first span has.
    """

    slots: Tensor
    first: Tensor
    start: int
    padded: bool
    _made: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], T_]) -> T_:
        """make(), or what it made for an earlier layer."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def positions(self) -> Tensor:
        """[batch, T]: place in the row's own text; negative on padding."""
        return self.once("positions", lambda: self.slots - self.first[:, None])

    def without_padding(self, x: Tensor) -> Tensor:
        """Zeros where there is padding. x: [batch, T, ...]."""
        if not self.padded:
            return x
        return x.masked_fill((self.positions < 0).view(*x.shape[:2], *[1] * (x.dim() - 2)), 0)

    def to_front(self, x: Tensor) -> Tensor:
        """Moves each row's padding behind its tokens, where causal attention does not see it. x: [batch, T, ...]."""
        return self._rolled(x, self.slots + self.first[:, None])

    def to_back(self, x: Tensor) -> Tensor:
        """Undoes to_front."""
        return self._rolled(x, self.slots - self.first[:, None])

    def _rolled(self, x: Tensor, source: Tensor) -> Tensor:
        if not self.padded:
            return x
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        return x[rows, source % x.shape[1]]


@dataclass
class AttentionCache:
    """Keys and values of one attention layer, or of one use of a shared one: [batch, n_kv_heads, capacity, head_dim]."""

    mixer: Attention
    k: Tensor
    v: Tensor
    step: Any
    masked: MaskedAttention

    @classmethod
    def empty(cls, mixer: Attention, batch: int, capacity: int, device: torch.device) -> AttentionCache:
        spec, platform = mixer.spec, mixer.platform
        shape = (batch, spec.n_kv_heads, capacity, spec.head_dim)
        k, v = (torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device) for _ in "kv")
        step = registry.resolve("attention_step", "auto", spec, platform).build(spec, platform)
        return cls(mixer, k, v, step, MaskedAttention(spec, platform))

    def rows(self, rows: slice) -> AttentionCache:
        return replace(self, k=self.k[rows], v=self.v[rows])

    def taken(self, rows: Tensor, capacity: int) -> AttentionCache:
        k, v = (F.pad(t[rows], (0, 0, 0, capacity - t.shape[2])) for t in (self.k, self.v))
        return replace(self, k=k, v=v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
        """q: [batch, T, n_heads, head_dim]; k, v: [batch, T, n_kv_heads, head_dim] -> like q."""
        self.k.index_copy_(2, span.slots, k.transpose(1, 2))
        self.v.index_copy_(2, span.slots, v.transpose(1, 2))
        seq_len = q.shape[1]
        if seq_len == 1:
            return self.step(q[:, 0], self.k, self.v, span.slots, span.first)[:, None]
        spec = self.mixer.spec
        if span.start == 0:
            q, k, v = (span.to_front(t) for t in (q, k, v))
            if spec.plain:
                kernel = self.mixer.kernel
                context = span.once(self.mixer.context_key, lambda: kernel.prepare(seq_len, q.device))
                return span.to_back(kernel(q, k, v, context))
            # Not the training kernel: FlexAttention would be compiled anew for every length of prompt.
            bias = span.once(spec, lambda: self.masked.bias(span.slots, span.slots))
            return span.to_back(self.masked(q, k, v, bias))
        end = span.start + seq_len
        keys, values = self.k[:, :, :end].transpose(1, 2), self.v[:, :, :end].transpose(1, 2)
        slots = torch.arange(end, device=q.device)
        bias = span.once(spec, lambda: self.masked.bias(span.slots, slots, span.first))
        return self.masked(q, keys, values, bias)


@dataclass
class Mamba2Cache:
    """The convolution's last inputs [batch, channels, d_conv - 1] and the state [batch, heads, head_dim, d_state]."""

    mixer: Mamba2
    window: Tensor
    state: Tensor
    conv_step: Any
    ssd_step: Any

    @classmethod
    def empty(cls, mixer: Mamba2, batch: int, device: torch.device) -> Mamba2Cache:
        spec, conv, platform = mixer.spec, mixer.conv.spec, mixer.platform
        dtype = getattr(torch, spec.dtype)
        state = torch.promote_types(dtype, torch.float32)
        return cls(
            mixer,
            # Channels side by side in memory, as the step kernel likes them.
            torch.zeros(batch, conv.width - 1, conv.channels, dtype=dtype, device=device).transpose(1, 2),
            torch.zeros(batch, spec.n_heads, spec.head_dim, spec.d_state, dtype=state, device=device),
            registry.resolve("conv1d_step", "auto", conv, platform).build(conv, platform),
            registry.resolve("ssd_step", "auto", spec, platform).build(spec, platform),
        )

    def rows(self, rows: slice) -> Mamba2Cache:
        return replace(self, window=self.window[rows], state=self.state[rows])

    def taken(self, rows: Tensor, capacity: int) -> Mamba2Cache:
        return replace(self, window=self.window[rows], state=self.state[rows])

    def convolve(self, x: Tensor, span: Span) -> Tensor:
        """x: [batch, T, channels] -> like x."""
        conv = self.mixer.conv
        if x.shape[1] == 1:
            return self.conv_step(x[:, 0], self.window, conv.weight, conv.bias)[:, None]
        before = self.window.shape[2]
        x = torch.cat((self.window.transpose(1, 2), span.without_padding(x)), dim=1)
        if before:
            self.window.copy_(x[:, -before:].transpose(1, 2))
        return conv(x)[:, before:]

    def scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, span: Span) -> Tensor:
        """As the ssd kernel; x: [batch, T, heads, head_dim] -> like x."""
        ssm = self.mixer.ssm
        if x.shape[1] == 1:
            y = self.ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], ssm.D, ssm.dt_bias, self.state)
            return y[:, None]
        # Zeros add nothing to a state of zeros, whatever their time step: padding leaves no trace.
        y, final = self.mixer.kernel(span.without_padding(x), dt, A, B, C, ssm.D, ssm.dt_bias, self.state)
        self.state.copy_(final)
        return y


@dataclass
class CachedMamba2:
    """A Mamba-2 layer's context when it reads on from a cache."""

    cache: Mamba2Cache
    span: Span

    def convolve(self, x: Tensor) -> Tensor:
        return self.cache.convolve(x, self.span)

    def scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return self.cache.scan(x, dt, A, B, C, self.span)


class Cache:
    """The memory of every layer for `batch` rows of up to `capacity` tokens, padding included.

    Raises UserError when the model's learned positions end before that.
    """

    def __init__(self, model: HybridLM, batch: int, capacity: int):
        if model.positions is not None and capacity > model.config.max_seq_len:
            raise UserError(
                f"{capacity} tokens asked for, but the model has learned positions for model.max_seq_len = "
                f"{model.config.max_seq_len}; shorten the prompt or ask for fewer new tokens"
            )
        device = model.embed.weight.device
        self.capacity, self.length = capacity, 0
        self.next = torch.zeros(1, dtype=torch.int64, device=device)
        self.first = torch.zeros(batch, dtype=torch.int32, device=device)
        blocks: list[Any] = list(model.blocks)
        self.layers = [
            Mamba2Cache.empty(block.mixer, batch, device)
            if hasattr(block.mixer, "ssm")
            else AttentionCache.empty(block.mixer, batch, capacity, device)
            for block in blocks
        ]
        self.shared = [
            AttentionCache.empty(block.shared_input.shared.mixer, batch, capacity, device)
            if block.shared_input is not None
            else None
            for block in blocks
        ]

    def rows(self, rows: slice) -> Cache:
        """A view of some rows' memory. What is read through it does not advance this cache: see `advance`."""
        view = copy.copy(self)
        view.next, view.first = self.next.clone(), self.first[rows]
        view.layers = [layer.rows(rows) for layer in self.layers]
        view.shared = [shared and shared.rows(rows) for shared in self.shared]
        return view

    def take(self, rows: Tensor, capacity: int) -> Cache:
        """A copy of some rows, which may repeat, with room for more tokens: one prefix, several ways to go on."""
        copied = copy.copy(self)
        copied.capacity = capacity
        copied.next, copied.first = self.next.clone(), self.first[rows]
        copied.layers = [layer.taken(rows, capacity) for layer in self.layers]
        copied.shared = [shared and shared.taken(rows, capacity) for shared in self.shared]
        return copied

    def begin(self, seq_len: int, padding: Tensor | None) -> Span:
        """The next seq_len tokens. padding: [batch], of the first span only. Raises UserError when they do not fit."""
        if self.length + seq_len > self.capacity:
            raise UserError(f"the cache holds {self.capacity} tokens; {self.length} + {seq_len} do not fit")
        if padding is not None:
            assert self.length == 0, "only the first tokens can be padded"
            self.first.copy_(padding)
        slots = self.next + torch.arange(seq_len, device=self.next.device)
        return Span(slots, self.first, self.length, padding is not None)

    def advance(self, tokens: int) -> None:
        """Every row has read this many tokens."""
        self.next += tokens
        self.length += tokens

    def contexts(self, span: Span) -> list[BlockContext]:
        """One per layer."""
        return [
            BlockContext(_context(layer, span), shared and _context(shared, span))
            for layer, shared in zip(self.layers, self.shared, strict=True)
        ]


def _context(cache: AttentionCache | Mamba2Cache, span: Span) -> Any:
    if isinstance(cache, Mamba2Cache):
        return CachedMamba2(cache, span)
    return cache.mixer.cached_context(span.once, span.positions, lambda q, k, v: cache.attend(q, k, v, span))
