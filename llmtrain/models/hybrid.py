"""HybridLM: embedding -> blocks -> norm -> head."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.errors import UserError
from llmtrain.kernels.attention.documents import documents as documents_of
from llmtrain.kernels.attention.prefix_tree import PrefixTree
from llmtrain.kernels.platform import Platform, detect
from llmtrain.models.blocks import Block, BlockContext, ContextCache
from llmtrain.models.cache import Cache
from llmtrain.models.config import LossConfig, ModelConfig, SharedAttentionBlock
from llmtrain.models.flops import Flops
from llmtrain.models.init import InitScale, init_weights
from llmtrain.models.layers import Embedding, LearnedPositions, Linear, Norm
from llmtrain.models.loss import LossOutput, TokenScores, build_loss, score_hidden, score_tokens, soft_cap
from llmtrain.models.mixers.mamba2 import SSMParameters
from llmtrain.models.mixers.shared_attention import SharedAttention, SharedInput


class HybridLM(nn.Module):
    """A causal language model whose layers are any interleaving of named blocks.

    platform: where it will run, which picks the kernels; default: this process's GPU, or its CPU.
    dtype: of activations in the kernels; default: bf16 on a GPU, fp32 on a CPU.
    documents: batches may come with document_ids, which not every kernel takes.
    Raises UserError when a named backend cannot serve its block here. Memory is allocated, not initialised.
    """

    def __init__(
        self,
        config: ModelConfig,
        loss: LossConfig = LossConfig(),  # noqa: B008 (frozen)
        platform: Platform | None = None,
        dtype: torch.dtype | None = None,
        documents: bool = False,
    ):
        super().__init__()
        self.config, self.documents = config, documents
        platform = platform or detect()
        dtype = dtype or (torch.float32 if platform.vendor == "cpu" else torch.bfloat16)

        self.embed = Embedding(config.vocab_size, config.d_model)
        self.positions = LearnedPositions(config.max_seq_len, config.d_model) if config.positions == "learned" else None
        shared = {
            name: [SharedAttention(block, config, platform, dtype, documents) for _ in range(block.n_shared)]
            for name, block in config.blocks.items()
            if isinstance(block, SharedAttentionBlock)
        }
        self.shared = nn.ModuleDict({name: nn.ModuleList(copies) for name, copies in shared.items()})
        self.blocks = nn.ModuleList()
        in_turn = {name: itertools.cycle(copies) for name, copies in shared.items()}
        for layer in config.layer_list():
            shared_input = SharedInput(next(in_turn[layer.shared]), config) if layer.shared else None
            block = config.blocks[layer.block]
            self.blocks.append(Block(block, config, platform, dtype, shared_input, documents))
        self.norm = Norm(config.d_model, config.norm, platform, dtype)
        self.head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size)
        self.loss = build_loss(loss, config.logit_softcap, platform)
        self._contexts = ContextCache()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cache: Cache | None = None,
        padding: Tensor | None = None,
        document_ids: Tensor | None = None,
        tree: PrefixTree | None = None,
        scored: Tensor | None = None,
    ) -> Tensor | LossOutput | TokenScores:
        """input_ids: [batch, T]; labels: [batch, T], already shifted, -100 where there is none.

        Without a cache: logits [batch, T, vocab_size], or with labels the loss, averaged over them.
        document_ids: [batch, T], integers that never fall: tokens see those of their own document only. Without a cache.
        cache: the tokens are read on from what it holds, into it. Then: the logits after the last, [batch, vocab_size],
            or with labels the score of each. padding: [batch], tokens at the left of each row to pass over (first call only).
        tree: the tokens [1, T] are texts that begin alike (see `no_trees`). Then: the scores of `labels` [n], each of which
            follows a token that `scored` [n] says.

        Raises UserError for a sequence longer than the learned positions or the cache.
        """
        assert document_ids is None or (self.documents and cache is None)
        if cache is not None:
            x = self._read(input_ids, cache, padding)
            if labels is None:
                return self.logits(x[:, -1])
            return score_tokens(x, self.head_weight, labels, self.config.logit_softcap)
        if tree is not None:
            assert scored is not None and labels is not None
            x = self._read_tree(input_ids, tree, scored)
            return score_hidden(x[0], self.head_weight, labels, self.config.logit_softcap)
        seq_len = input_ids.shape[1]
        x = self.embed(input_ids)
        if self.positions is not None:
            if seq_len > self.config.max_seq_len:
                raise UserError(f"sequence of {seq_len} tokens, but model.max_seq_len is {self.config.max_seq_len}")
            x = x + self.positions(seq_len if document_ids is None else _places(document_ids))
        x = F.dropout(x, self.config.dropout, self.training)
        x = self._layers(x, self._contexts(self.blocks, seq_len, x.device, document_ids))
        return self.logits(x) if labels is None else self.loss(x, self.head_weight, labels)

    def _read(self, input_ids: Tensor, cache: Cache, padding: Tensor | None) -> Tensor:
        span = cache.begin(input_ids.shape[1], padding)
        x = self.embed(input_ids)
        if self.positions is not None:
            x = x + self.positions(span.positions.clamp(min=0))
        x = self._layers(x, cache.contexts(span))
        cache.advance(input_ids.shape[1])
        return x

    def _read_tree(self, input_ids: Tensor, tree: PrefixTree, scored: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.positions is not None:
            x = x + self.positions(tree.positions)
        contexts = [
            BlockContext(
                block.mixer.tree_context(tree),
                block.shared_input and block.shared_input.shared.mixer.tree_context(tree),
            )
            for block in cast("Iterable[Any]", self.blocks)
        ]
        return self._layers(x, contexts, scored)

    def no_trees(self) -> str | None:
        """Why it cannot read packed texts that begin alike (`tree`), or None."""
        mixers = [block.mixer for block in cast("Iterable[Any]", self.blocks)]
        mixers += [shared.mixer for shared in self.shared_uses()]
        return next((reason for mixer in mixers if (reason := mixer.no_trees())), None)

    def _layers(self, x: Tensor, contexts: list[BlockContext], only: Tensor | None = None) -> Tensor:
        """only: [n], the tokens that matter after the last layer."""
        embedding, last = x, len(contexts) - 1
        for layer, (block, context) in enumerate(zip(self.blocks, contexts, strict=True)):
            x = block(x, embedding, context, only if layer == last else None)
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """x: [..., d_model], after the final norm -> [..., vocab_size]."""
        return soft_cap(F.linear(x, self.head_weight), self.config.logit_softcap)

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, d_model]; the embedding's when tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def init_weights(self, seed: int) -> None:
        """Fills all parameters; the same values for any sharding and device (see models/init.py)."""
        init = self.config.init
        depth = 2 * len(self.blocks) if init.scale_residual else 1
        init_weights(self, InitScale(init.std, init.std * depth**-0.5), seed)

    def cast(self, dtype: torch.dtype) -> HybridLM:
        """All parameters to `dtype`, for inference, except those of the recurrences: these keep fp32 (see SSMParameters)."""
        for module in self.modules():
            if not isinstance(module, SSMParameters):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype)
        return self

    def shared_uses(self) -> list[SharedAttention]:
        """The shared block of each use, in order."""
        blocks = cast("Iterable[Any]", self.blocks)
        return [block.shared_input.shared for block in blocks if block.shared_input is not None]

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        """Forward FLOP of one sequence. See flops/count.py for what `causal` means."""
        head = Flops(head=2 * seq_len * self.config.d_model * self.config.vocab_size)
        return sum((block.flops(seq_len, causal) for block in cast("Iterable[Any]", self.blocks)), head)


def _places(document_ids: Tensor) -> Tensor:
    """Of every token, its place in its document, from 0. [batch, T] -> like it."""
    return torch.arange(document_ids.shape[1], device=document_ids.device) - documents_of(document_ids).starts
