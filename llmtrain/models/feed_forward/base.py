"""The FeedForward contract: what a block computes of each token behind its mixer, between a norm and the residual.

What must be known without importing torch is asked of the section in the config: models/sections/feed_forward.py.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from llmtrain.kernels.platform import Platform
from llmtrain.models.context import BlockContext
from llmtrain.models.layer_part import LayerPart
from llmtrain.models.sections.feed_forward import Carried, FeedForwardSection


class FeedForward(LayerPart):
    """x: [batch, T, d_model] -> [batch, T, d_model], each token by itself."""

    tokens_at_once: int | None = None
    """Tokens of a sequence to read at a time (train.activation_checkpointing.mlp_tokens), where the section is `chunkable`."""

    def __init__(self, section: FeedForwardSection, d_model: int, platform: Platform | None, dtype: torch.dtype):
        """dtype: of activations in the kernels. platform: as HybridLM's; None: in plain PyTorch."""
        super().__init__()
        self.kept_products = tuple(section.kept_products(d_model))
        self.carries: Carried = section.carries

    @abstractmethod
    def forward(self, x: Tensor, context: BlockContext, *carried: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """context: of the layer. carried: where `carries` says that the layer reads one, what the last layer that hands on a value
        handed on, [batch, T, channels]. Returns the output; where it hands on a value, (output, value), in the dtype of x."""
