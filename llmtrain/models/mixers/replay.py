"""A cache for mixers that have none: it keeps their inputs, and has them read everything again for each new token."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.kernels.attention.step import side_by_side
from llmtrain.models.mixers.base import Mixer, MixerCache
from llmtrain.models.mixers.span import Span


@dataclass
class ReplayCache(MixerCache):
    """inputs: [batch, capacity, d_model], what the mixer has read."""

    slot_dims = {"inputs": 1}

    inputs: Tensor

    def context(self, span: Span) -> Replay:
        return Replay(self, span)


@dataclass
class Replay:
    """A call of a mixer that has no cache of its own."""

    cache: ReplayCache
    span: Span

    def __call__(self, mixer: Mixer, x: Tensor) -> Tensor:
        """x: [batch, T, d_model], the span's tokens -> like x.

        The whole capacity is read, tokens to come being zeros: shapes stay the same from token to token, as a CUDA graph
        needs them, and `prepare` gives the same context.
        """
        span, inputs = self.span, self.cache.inputs
        if span.start:
            _warn(type(mixer).__name__)
        span.keep(inputs, 1, x)
        if span.pages is not None:
            inputs = side_by_side(inputs, span.pages, 1)
        batch, capacity = inputs.shape[:2]
        key = (type(mixer), mixer.context_key)
        context = span.memoize(key, lambda: mixer.prepare(capacity, x.device, None))
        # Each row's padding goes behind its tokens, where a causal mixer does not see it.
        rows = torch.arange(batch, device=x.device)[:, None]
        source = torch.arange(capacity, device=x.device) + span.first[:, None]
        y = mixer(inputs[rows, source % capacity], context)
        return y[rows, span.positions % capacity]


@functools.cache
def _warn(mixer: str) -> None:
    """Once per process and type of mixer."""
    logging.getLogger(__name__).warning(
        "%s has no cache for decoding: for each new token it reads the whole text again", mixer
    )
