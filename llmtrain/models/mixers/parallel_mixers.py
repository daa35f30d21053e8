"""Several mixers side by side in one layer: the sum of what each makes of the same input (Falcon-H1, arXiv:2507.22448)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from llmtrain.kernels.attention.prefix_tree import PrefixTree
from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Flops, Work
from llmtrain.models.layers import multiplied
from llmtrain.models.mixers.base import Mixer, MixerCache
from llmtrain.models.mixers.span import Span
from llmtrain.models.sections.parallel_mixers import ParallelMixersBlock
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.tensor_parallel import TensorRanks


class ParallelMixers(Mixer):
    """x: [batch, T, d_model] -> [batch, T, d_model]. A context is the list of the mixers' contexts."""

    def __init__(
        self,
        block: ParallelMixersBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool = False,
    ):
        super().__init__(block, config, platform, dtype, documents)
        parts = block.named()
        self.mixers = nn.ModuleDict(
            {name: part.load_implementation()(part, config, platform, dtype, documents) for name, part in parts.items()}
        )
        named = zip(self.mixers, self.parts, strict=True)
        self.outputs = [f"mixers.{name}.{linear}" for name, mixer in named for linear in mixer.outputs]
        self.scales = [(part.input_multiplier, part.residual_multiplier) for part in parts.values()]

    @property
    def parts(self) -> list[Mixer]:
        return [cast("Mixer", mixer) for mixer in self.mixers.values()]

    @property
    def context_key(self) -> Hashable:
        return tuple((type(mixer), mixer.context_key) for mixer in self.parts)

    def prepare(self, seq_len: int, device: torch.device, document_ids: Tensor | None) -> list[Any]:
        return [mixer.prepare(seq_len, device, document_ids) for mixer in self.parts]

    def split(self, ranks: TensorRanks) -> None:
        for mixer in self.parts:
            mixer.split(ranks)

    def enable_segments(self) -> None:
        """Nothing of its own: each mixer is asked."""

    def segment_context(
        self, segments: ContextParallelRanks, seq_len: int, device: torch.device, document_ids: Tensor | None
    ) -> list[Any]:
        return [mixer.segment_context(segments, seq_len, device, document_ids) for mixer in self.parts]

    def forward(self, x: Tensor, context: list[Any]) -> Tensor:
        outputs = [
            multiplied(mixer(multiplied(x, reads), own), adds)
            for mixer, (reads, adds), own in zip(self.parts, self.scales, context, strict=True)
        ]
        return sum(outputs[1:], outputs[0])

    def empty_cache(self, batch: int, capacity: int, device: torch.device) -> ParallelMixersCache | None:
        caches = [mixer.empty_cache(batch, capacity, device) for mixer in self.parts]
        found = [cache for cache in caches if cache is not None]
        return ParallelMixersCache(found) if len(found) == len(caches) else None

    def prefix_refusal(self) -> str | None:
        return next((reason for mixer in self.parts if (reason := mixer.prefix_refusal())), None)

    def prefix_context(self, tree: PrefixTree) -> list[Any]:
        return [mixer.prefix_context(tree) for mixer in self.parts]

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return sum((mixer.flops(seq_len, causal) for mixer in self.parts), Flops())

    def saved_ops(self) -> set[str]:
        return set().union(*(mixer.saved_ops() for mixer in self.parts))

    def saved_flops(self, seq_len: int, causal: bool = False) -> Work:
        return sum((mixer.saved_flops(seq_len, causal) for mixer in self.parts), Work())


@dataclass
class ParallelMixersCache(MixerCache):
    """The caches of the mixers, in order."""

    parts: list[MixerCache]

    def map(self, change: Callable[[Tensor, int | None], Tensor]) -> ParallelMixersCache:
        return ParallelMixersCache([part.map(change) for part in self.parts])

    def context(self, span: Span) -> list[Any]:
        return [part.context(span) for part in self.parts]
