"""The Mixer contract: all that the rest of the program asks of what a block does between its norm and the residual.

What must be known without importing torch (backends to check, the line in `describe`, the memory estimate) is asked of the
block's section in the config instead: models/sections/block.py.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.errors import UserError
from llmtrain.kernels.attention.prefix_tree import PrefixTree
from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.layer_part import LayerPart
from llmtrain.models.mixers.span import Span
from llmtrain.models.sections.block import BlockSection
from llmtrain.models.segments import ContextParallelRanks


class MixerCache(ABC):
    """State of one mixer after the tokens that a batch of rows has read: a dataclass, whose tensors begin with the row.

    slot_dims: name -> the dimension of a tensor along which each token has an entry of its own. The other tensors are states: of
    all tokens read, overwritten by the next.
    """

    slot_dims: ClassVar[Mapping[str, int]] = {}

    @abstractmethod
    def context(self, span: Span) -> Any:
        """The context by which `forward` reads the span's tokens on from this cache, into it."""

    def map(self, change: Callable[[Tensor, int | None], Tensor]) -> Self:
        """A cache of changed tensors. change: (tensor, its slot dimension or None) -> tensor."""
        changed = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(changed, name, change(value, self.slot_dims.get(name)))
        return changed

    def tensors(self) -> list[tuple[Tensor, int | None]]:
        """Every tensor with its slot dimension, or None of a state."""
        found: list[tuple[Tensor, int | None]] = []
        self.map(lambda tensor, dim: (found.append((tensor, dim)), tensor)[1])
        return found

    def take(self, rows: Tensor, capacity: int) -> Self:
        """A copy of some rows, which may repeat, with room for `capacity` tokens."""

        def copied(tensor: Tensor, dim: int | None) -> Tensor:
            found = tensor[rows]
            return (
                found
                if dim is None
                else F.pad(found, (*[0] * (2 * (tensor.dim() - 1 - dim)), 0, capacity - tensor.shape[dim]))
            )

        return self.map(copied)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return sum(tensor.nbytes for tensor, _ in self.tensors())


class MixerContext(ABC):
    """The way in which a recurrent mixer reads its tokens: as whole sequences, on from a cache, as segments that ranks share, as
    requests that share a prefix. `forward` asks for no kind: it convolves and applies its kernel by the context."""

    @abstractmethod
    def convolve(self, conv: Any, x: Tensor) -> Tensor:
        """Apply a CausalConv1d. x: [batch, T, channels] -> like x."""

    @abstractmethod
    def apply(self, kernel: Any, *tensors: Tensor) -> Tensor:
        """Apply a recurrence, given by the kernel for whole sequences and its tensors -> its output for each token."""

    def fused(self, mixer: Any, *tensors: Any) -> Tensor | None:
        """Apply the mixer's kernel for convolution and recurrence at once. None: it has none for this context."""
        return None


@dataclass(frozen=True)
class WholeSequences(MixerContext):
    """document_ids: [batch, T] of a packed batch, integers that never fall; None: one document per sequence."""

    document_ids: Tensor | None = None

    def convolve(self, conv: Any, x: Tensor) -> Tensor:
        return conv(x, self.document_ids)

    def apply(self, kernel: Any, *tensors: Tensor) -> Tensor:
        return kernel(*tensors, document_ids=self.document_ids)[0]

    def fused(self, mixer: Any, *tensors: Any) -> Tensor | None:
        return mixer.fused(*tensors, document_ids=self.document_ids)


class Mixer(LayerPart):
    """x: [batch, T, d_model] -> [batch, T, d_model], causal: a token depends on itself and those before it.

    Constructors allocate and do not initialise, so that a model builds on the meta device. `forward` traces under
    torch.compile as one graph, and is right for parameters and inputs in bf16.
    """

    @abstractmethod
    def __init__(
        self, block: BlockSection, config: ModelConfig, platform: Platform, dtype: torch.dtype, documents: bool = False
    ):
        """block: its section of the config. dtype: of activations in the kernels. platform, documents: as HybridLM's."""
        super().__init__()
        self.kept_products = tuple(block.kept_products(config.d_model))

    @abstractmethod
    def forward(self, x: Tensor, context: Any) -> Tensor:
        """context: of `prepare`, of `segment_context`, of a cache's `context`, or of `prefix_context`."""

    @property
    def context_key(self) -> Hashable:
        """Mixers with equal keys share one context of `prepare`."""
        return type(self)

    def prepare(self, seq_len: int, device: torch.device, document_ids: Tensor | None) -> Any:
        """The context of whole sequences: what depends on shape, device and documents alone (masks, rotary tables).

        Made outside the compiled graph. document_ids: [batch, T], integers that never fall; tokens with different ones do
        not see each other. None: one document per sequence. Default: a MixerContext.
        """
        return WholeSequences(document_ids)

    def enable_segments(self) -> None:
        """Choose what `segment_context` needs beyond the constructor's choice. Called before training, if ranks share sequences.

        Raises UserError where the block's `segments_refusal` says why.
        """
        raise UserError(f"a mixer of type {type(self).__name__} has no form for sequences that ranks share")

    def segment_context(
        self, segments: ContextParallelRanks, seq_len: int, device: torch.device, document_ids: Tensor | None
    ) -> Any:
        """The context of this rank's segments of sequences, by which `forward` reads [batch, seq_len / segments.size, d_model].

        seq_len, document_ids [batch, seq_len]: of whole sequences, as in `prepare`. Only after `enable_segments`.
        """
        raise NotImplementedError

    def empty_cache(self, batch: int, capacity: int, device: torch.device) -> MixerCache | None:
        """Cache for decoding `batch` rows of up to `capacity` tokens. None: without one, for each new token everything is read
        again (models/mixers/replay.py).
        """
        return None

    def prefix_refusal(self) -> str | None:
        """Reason why packed requests that share a prefix cannot be read here, or None when `prefix_context` serves them."""
        return f"a mixer of type {type(self).__name__} has no form for packed requests that share a prefix"

    def prefix_context(self, tree: PrefixTree) -> Any | None:
        """The context of packed requests [1, T] that share prefixes, without gradients; None where prefix_refusal says why."""
        return None


def mixers_of(model: nn.Module) -> Iterator[tuple[str, Mixer]]:
    """Every mixer of a model with its name, shared ones once."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Mixer))
