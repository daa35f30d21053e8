"""CausalLM: what is computed from a HybridLM's hidden states, each in one call of one module."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from llmtrain.kernels.attention.prefix_tree import PrefixTree
from llmtrain.models.cache import Cache
from llmtrain.models.config import LossConfig, ModelConfig
from llmtrain.models.context import Context
from llmtrain.models.hybrid import HybridLM, Stream
from llmtrain.models.loss import (
    LossOutput,
    TokenScores,
    all_logits,
    build_loss,
    label_likelihoods,
    score_hidden,
    score_tokens,
    soft_cap,
)
from llmtrain.models.mixers.replay import ReplayCache
from llmtrain.models.segments import ContextParallelRanks

Output = TypeVar("Output")


class CausalLM(nn.Module):
    """A HybridLM with loss, scores and logits.

    FSDP2 enters here: its hooks live in `__call__`, and the weights outside of layers (embedding, shared blocks, norm,
    head) are gathered from there until the result is computed. So every method is one call of this module. Parameters
    are stored in checkpoints by HybridLM's own names.
    """

    def __init__(self, hybrid: HybridLM, loss: LossConfig = LossConfig()):  # noqa: B008 (frozen)
        super().__init__()
        self.hybrid = hybrid
        self.loss_function = build_loss(loss, hybrid.config.logit_softcap, hybrid.platform)

    def forward(self, inputs: Stream, context: Context, output: Callable[[Tensor, Tensor], Output]) -> Output:
        """inputs: token ids [batch, T]. output: (hidden states of all tokens, the head's weight [vocab_size, d_model] or this
        rank's part) -> what to return."""
        return self.compute(self.hybrid(inputs, context), output)

    def compute(self, hidden: Tensor, output: Callable[[Tensor, Tensor], Output]) -> Output:
        """`output` of the last layer's hidden states, of this rank's tokens. Within `forward` alone."""
        ranks = self.hybrid.ranks
        hidden = hidden if ranks is None else ranks.enter(hidden)
        head = self.hybrid.head
        return output(hidden, self.hybrid.head_weight) if head is None else head(hidden, output)

    def logits(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """[batch, T] -> [batch, T, vocab_size]. document_ids: as HybridLM.context's."""
        context = self.hybrid.context(input_ids.shape[1], input_ids.device, document_ids)
        return self._read(input_ids, context, self._logits)

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        segments: ContextParallelRanks | None = None,
    ) -> LossOutput:
        """The loss averaged over labels. labels: [batch, T], already shifted, -100 where there is none.

        segments: input_ids and labels are this rank's part of sequences that ranks share, document_ids of whole ones; every
        rank of the group calls this, and gets the loss averaged over its own labels.
        """
        context = self.context(input_ids, document_ids, segments)
        output = self(input_ids, context, lambda hidden, head: self.cross_entropy(hidden, head, labels))
        return context.with_attached(output)

    def context(
        self, input_ids: Tensor, document_ids: Tensor | None = None, segments: ContextParallelRanks | None = None
    ) -> Context:
        """HybridLM.context of a batch. segments: as for `loss`."""
        seq_len = input_ids.shape[1] * (segments.size if segments else 1)
        return self.hybrid.context(seq_len, input_ids.device, document_ids, segments)

    def cross_entropy(self, hidden: Tensor, head: Tensor, labels: Tensor) -> LossOutput:
        """The loss of what `forward` gives `output`, averaged over labels [batch, T]."""
        return self.loss_function(hidden, head, labels, self.hybrid.ranks)

    def label_likelihoods(self, hidden: Tensor, head: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-likelihoods of `labels` [n] at some of the tokens of what `forward` gives `output`, hidden [n, d_model], -> [n], to
        differentiate. temperature: divisor of the logits. Logits exist for as many tokens at a time as train.loss says."""
        tokens, softcap = self.loss_function.config.chunk_tokens, self.config.logit_softcap
        if temperature != 1:  # cap tanh(x / cap) / t = (cap / t) tanh((x / t) / (cap / t))
            hidden, softcap = hidden / temperature, softcap and softcap / temperature
        wide = self.hybrid.platform.sums_products_in_fp32
        return label_likelihoods(hidden, head, labels, softcap, tokens, self.hybrid.ranks, wide)

    def empty_cache(self, batch: int, capacity: int, longest: int | None = None, pages: int | None = None) -> Cache:
        return Cache(self.hybrid, batch, capacity, longest, pages)

    def replays(self) -> bool:
        """True if a mixer has no cache of its own, and reads everything again for each token: nothing is gained by sharing."""
        with torch.no_grad():
            return any(isinstance(layer.mixer, ReplayCache) for layer in self.empty_cache(1, 1).layers)

    def fill(self, input_ids: Tensor, cache: Cache, padding: Tensor | None = None) -> None:
        """Reads tokens on into the cache and computes nothing else. padding: as Cache.read's."""
        self._read(input_ids, cache.read(input_ids.shape[1], padding), lambda hidden, head: None)

    def next_logits(self, input_ids: Tensor, cache: Cache, padding: Tensor | None = None) -> Tensor:
        """Reads tokens on into the cache -> the logits after the last, [batch, vocab_size]."""
        context = cache.read(input_ids.shape[1], padding)
        return self._read(input_ids, context, lambda hidden, head: self._logits(hidden[:, -1], head))

    def scores(self, input_ids: Tensor, labels: Tensor, cache: Cache) -> TokenScores:
        """Reads tokens on into the cache -> the score of each label, [batch, T]. labels: as for the loss."""
        context, softcap, ranks = cache.read(input_ids.shape[1]), self.config.logit_softcap, self.hybrid.ranks
        return self._read(
            input_ids, context, lambda hidden, head: score_tokens(hidden, head, labels, softcap, ranks=ranks)
        )

    def packed_scores(self, input_ids: Tensor, tree: PrefixTree, scored: Tensor, labels: Tensor) -> TokenScores:
        """The scores of `labels` [n], each of which follows the token of input_ids that `scored` [n] names.

        input_ids: [1, T], packed requests that share prefixes, where HybridLM.prefix_refusal has nothing against it.
        """
        context, softcap = self.hybrid.prefix_context(tree, scored), self.config.logit_softcap
        ranks = self.hybrid.ranks
        return self._read(
            input_ids, context, lambda hidden, head: score_hidden(hidden[0], head, labels, softcap, ranks=ranks)
        )

    def _read(self, input_ids: Tensor, context: Context, output: Callable[[Tensor, Tensor], Output]) -> Output:
        """`forward`, over any number of tokens: tensor-parallel ranks, which all call this, do not divide them."""
        ranks = self.hybrid.ranks
        with nullcontext() if ranks is None else ranks.whole_tokens():
            return self(input_ids, context, output)

    def _logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return soft_cap(all_logits(hidden, head, self.hybrid.ranks), self.config.logit_softcap)

    def least(self, number: int) -> int:
        """The least of a number of the ranks that read the same batches, which all call this."""
        ranks = self.hybrid.ranks
        return number if ranks is None else -int(ranks.largest(torch.tensor(-number, device=self.device)))

    @property
    def config(self) -> ModelConfig:
        return self.hybrid.config

    @property
    def device(self) -> torch.device:
        return next(self.hybrid.parameters()).device
