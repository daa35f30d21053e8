"""The residual wiring of one layer, and the contexts that layers share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.kernels.platform import Platform
from llmtrain.models.config import Block as AnyBlock
from llmtrain.models.config import Mamba2Block, ModelConfig, SharedAttentionBlock
from llmtrain.models.flops import Flops
from llmtrain.models.layers import MLP, Norm
from llmtrain.models.mixers.attention import Attention
from llmtrain.models.mixers.mamba2 import Mamba2
from llmtrain.models.mixers.shared_attention import SharedInput


@dataclass
class BlockContext:
    """What a layer's kernels need besides activations."""

    mixer: Any
    shared: Any


class Block(nn.Module):
    """x + mixer(norm(x + shared_input(x, embedding))), then x + mlp(mlp_norm(x)); either extra part may be absent.

    x, embedding: [batch, T, d_model] -> like x, or [batch, n, d_model] for the n tokens that `only` names, if it does. The
    shared block's output steers the mixer but does not enter the residual stream itself.
    """

    def __init__(
        self,
        block: AnyBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        shared_input: SharedInput | None = None,
        documents: bool = False,
    ):
        super().__init__()
        assert not isinstance(block, SharedAttentionBlock), "a shared block feeds a layer; it is none"
        norm = block.norm or config.norm
        self.dropout = config.dropout
        self.shared_input = shared_input
        self.norm = Norm(config.d_model, norm, platform, dtype)
        if isinstance(block, Mamba2Block):
            self.mixer = Mamba2(block, config, platform, dtype, documents)
        else:
            self.mixer = Attention(block, config, platform, dtype, documents=documents)
        self.mlp_norm = Norm(config.d_model, norm, platform, dtype) if block.mlp else None
        self.mlp = MLP(config.d_model, block.mlp) if block.mlp else None

    def forward(self, x: Tensor, embedding: Tensor, context: BlockContext, only: Tensor | None = None) -> Tensor:
        steering = None if self.shared_input is None else self.shared_input(x, embedding, context.shared)
        _, u = self.norm.of_sum(x, steering)
        mixed = F.dropout(self.mixer(u, context.mixer), self.dropout, self.training)
        if only is not None:
            x, mixed = x[:, only], mixed[:, only]
        if self.mlp is None or self.mlp_norm is None:
            return x + mixed
        x, u = self.mlp_norm.of_sum(x, mixed)
        return x + F.dropout(self.mlp(u), self.dropout, self.training)

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        total = self.mixer.flops(seq_len, causal)
        if self.shared_input is not None:
            total += self.shared_input.flops(seq_len, causal)
        return total if self.mlp is None else total + self.mlp.flops(seq_len)


class ContextCache:
    """Contexts by (mixer's context key, sequence length, device); the longest unused sequence length goes first.

    Those of packed batches are made for every batch.
    """

    def __init__(self, lengths: int = 4):
        self.lengths = lengths
        self._by_length: OrderedDict[tuple[int, torch.device], dict[Any, Any]] = OrderedDict()

    def __call__(
        self, blocks: Iterable[Any], seq_len: int, device: torch.device, document_ids: Tensor | None = None
    ) -> list[BlockContext]:
        """One context per block; equal keys share one object. document_ids: [batch, T] of a packed batch."""
        contexts = {} if document_ids is not None else self._of_length(seq_len, device)

        def of(mixer: Attention | Mamba2) -> Any:
            if mixer.context_key not in contexts:
                # A tensor made in inference mode could not take part in a later backward pass.
                with torch.inference_mode(False), torch.no_grad():
                    contexts[mixer.context_key] = mixer.prepare(seq_len, device, document_ids)
            return contexts[mixer.context_key]

        return [
            BlockContext(of(b.mixer), of(b.shared_input.shared.mixer) if b.shared_input is not None else None)
            for b in blocks
        ]

    def _of_length(self, seq_len: int, device: torch.device) -> dict[Any, Any]:
        contexts = self._by_length.setdefault((seq_len, device), {})
        self._by_length.move_to_end((seq_len, device))
        while len(self._by_length) > self.lengths:
            self._by_length.popitem(last=False)
        return contexts
