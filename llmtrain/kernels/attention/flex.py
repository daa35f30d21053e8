"""PyTorch's FlexAttention (arXiv:2412.05496): masked tiles are skipped, changes of score are fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, flex_attention

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.step import Slopes
from llmtrain.kernels.attention.suffix import with_sinks
from llmtrain.kernels.platform import Platform


def build(spec: AttentionSpec, platform: Platform, variant: str) -> FlexAttention:
    return FlexAttention(spec)


@dataclass
class FlexContext:
    mask: BlockMask
    slopes: Tensor | None
    """ALiBi slopes [n_heads] in fp32; None without ALiBi."""


class FlexAttention:
    """Causal attention by a generated Triton kernel. Compiled by itself when the block around it is not."""

    def __init__(self, spec: AttentionSpec):
        self.spec, self.slopes = spec, Slopes(spec)
        self.kernel = torch.compile(flex_attention, dynamic=False)
        # A Python bool made here: comparing sizes while tracing may give a symbolic one, which flex refuses.
        self.grouped = spec.n_heads != spec.n_kv_heads

    def prepare(
        self, seq_len: int, device: torch.device, ids: Tensor | None = None, queries: int | None = None
    ) -> FlexContext:
        """ids: [batch, T], integers; tokens see those with their own id. None: one document per sequence.
        queries: Q, if the queries are the last Q tokens alone; None: all T.

        With ids a mask of [batch, Q, T] bytes exists while this runs.
        """
        window, queries = self.spec.sliding_window or seq_len, queries or seq_len
        before = seq_len - queries

        def visible(batch: Tensor, head: Tensor, query: Tensor, j: Tensor) -> Tensor:
            i = query + before if before else query
            in_range = (i >= j) & (i - j < window)
            return in_range if ids is None else in_range & (ids[batch, i] == ids[batch, j])

        batch = None if ids is None else ids.shape[0]
        mask = create_block_mask(visible, batch, None, queries, seq_len, device=str(device))
        return FlexContext(mask, self.slopes.on(device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: FlexContext, sinks: Tensor | None = None) -> Tensor:
        """q: [batch, Q, n_heads, head_dim]; k: [batch, T, n_kv_heads, head_dim]; v: [batch, T, n_kv_heads, width]; sinks: [n_heads]
        -> [batch, Q, n_heads, width]."""
        spec, slopes = self.spec, context.slopes
        before = k.shape[1] - q.shape[1]

        def change(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, j: Tensor) -> Tensor:
            if spec.softcap is not None:
                score = spec.softcap * torch.tanh(score / spec.softcap)
            if slopes is not None:
                i = query + before if before else query
                score = score - slopes[head] * (i - j)
            return score

        out = self.kernel(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=None if spec.softcap is None and slopes is None else change,
            block_mask=context.mask,
            scale=spec.scale,
            enable_gqa=self.grouped,
            **({} if sinks is None else {"return_aux": AuxRequest(lse=True)}),
        )
        if sinks is not None:
            out, beside = out
            assert isinstance(beside, AuxOutput) and beside.lse is not None
            return with_sinks(out.transpose(1, 2), beside.lse, sinks)[0].to(q.dtype)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)
