"""The contexts of a forward pass: what layers need besides activations, made outside the compiled graph."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.models.attached_loss import AttachedLosses
from llmtrain.models.loss import LossOutput
from llmtrain.models.mixers.base import Mixer
from llmtrain.models.mixers.replay import Replay
from llmtrain.models.segments import ContextParallelRanks

LayerMixers = tuple[Mixer, Mixer | None]
"""A layer's mixer, and that of the shared block which feeds the layer, if one does."""


@dataclass
class BlockContext:
    """One layer's: its mixer's context, and that of the shared block which feeds it.

    replay: in place of `mixer`, for one without a cache of its own that reads on from a cache. losses: those that layers attach,
    the same object for all; None: layers attach none and count nothing, or nothing is trained.
    """

    mixer: Any
    shared: Any
    replay: Replay | None = None
    losses: AttachedLosses | None = None


@dataclass(frozen=True)
class Context:
    """A forward pass's, for one of: whole sequences or this rank's segments of them (HybridLM.context), tokens read on from a
    cache (Cache.read), packed requests that share a prefix (HybridLM.prefix_context).

    blocks: one per layer. positions: for learned position embeddings (None where the model has none): the first n, or
    [T] or [batch, T]. only: [n], the tokens whose hidden states are wanted; None: all. losses: as the blocks'.
    """

    blocks: list[BlockContext]
    positions: int | Tensor | None
    only: Tensor | None = None
    losses: AttachedLosses | None = None

    def with_attached(self, output: LossOutput) -> LossOutput:
        """The loss of this pass, whose weight in the step then is that of the losses that layers attached."""
        return output if self.losses is None else replace(output, loss=self.losses.weigh(output.loss))


class ContextCache:
    """Contexts of sequences by (mixer's context key, sequence length, device, this rank's segments); the longest unused
    sequence length goes first.

    Those of packed batches are made for every batch.
    """

    def __init__(self, lengths: int = 4):
        self.lengths = lengths
        self._by_length: OrderedDict[tuple[int, torch.device, ContextParallelRanks | None], dict[Any, Any]] = (
            OrderedDict()
        )

    def __call__(
        self,
        layers: Iterable[LayerMixers],
        seq_len: int,
        device: torch.device,
        document_ids: Tensor | None = None,
        segments: ContextParallelRanks | None = None,
        losses: AttachedLosses | None = None,
    ) -> list[BlockContext]:
        """One context per layer; equal keys share one object. document_ids: [batch, T] of a packed batch."""
        contexts: dict[Any, Any] = {}
        if document_ids is None:
            contexts = self._by_length.setdefault((seq_len, device, segments), contexts)
            self._by_length.move_to_end((seq_len, device, segments))
            if len(self._by_length) > self.lengths:
                self._by_length.popitem(last=False)

        def context_of(mixer: Mixer) -> Any:
            key = (type(mixer), mixer.context_key)
            if key not in contexts:
                # A tensor made in inference mode could not take part in a later backward pass.
                with torch.inference_mode(False), torch.no_grad():
                    if segments is None:
                        contexts[key] = mixer.prepare(seq_len, device, document_ids)
                    else:
                        contexts[key] = mixer.segment_context(segments, seq_len, device, document_ids)
            return contexts[key]

        return [
            BlockContext(context_of(mixer), context_of(shared) if shared is not None else None, losses=losses)
            for mixer, shared in layers
        ]
