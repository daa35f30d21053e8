"""The residual wiring of one layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.context import BlockContext
from llmtrain.models.costs import Flops, Work
from llmtrain.models.feed_forward.base import FeedForward
from llmtrain.models.layers import Norm, multiplied
from llmtrain.models.mixers.base import Mixer
from llmtrain.models.mixers.shared_attention import SharedInput
from llmtrain.models.sections.block import BlockSection
from llmtrain.models.tensor_parallel import TensorRanks


class Block(nn.Module):
    """x + mixer(norm(x + shared_input(x, embedding))), then x + mlp(mlp_norm(x)); either extra part may be absent.

    With norm.place: after, x + norm(mixer(x)) and x + mlp_norm(mlp(x)); with both, x + post_norm(mixer(norm(x))) and so on.
    With parallel, x + mixer(norm(x)) + mlp(mlp_norm(x)). residual_multiplier scales each summand beside x, input_multiplier
    what the mixer reads.

    x, embedding: [batch, T, d_model] -> like x, or [batch, n, d_model] for the n tokens that `only` names, if it does. The
    shared block's output steers the mixer but does not enter the residual stream itself.
    """

    def __init__(
        self,
        block: BlockSection,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        shared_input: SharedInput | None = None,
        documents: bool = False,
    ):
        super().__init__()
        assert not block.shared_copies, "a shared block feeds a layer; it is none"
        norm = block.norm or config.norm
        self.dropout, self.scale, self.input_scale = config.dropout, block.residual_multiplier, block.input_multiplier
        self.parallel, self.norm_first = block.parallel, norm.place != "after"
        self.shared_input = shared_input
        self.norm = Norm(config.d_model, norm, platform, dtype)
        self.mixer: Mixer = block.load_implementation()(block, config, platform, dtype, documents)
        both = norm.place == "both"
        self.post_norm = Norm(config.d_model, norm, platform, dtype) if both else None
        self.mlp_norm = Norm(config.d_model, norm, platform, dtype) if block.mlp else None
        self.mlp: FeedForward | None = None
        if block.mlp is not None:
            self.mlp = block.mlp.load_implementation()(block.mlp, config.d_model, platform, dtype)
        self.mlp_post_norm = Norm(config.d_model, norm, platform, dtype) if block.mlp and both else None

    def split(self, ranks: TensorRanks) -> None:
        """Divide mixer and MLP between tensor-parallel ranks, before the shared block is; the norms read this rank's tokens."""
        self.mixer.split(ranks)
        for part in (self.mlp, self.shared_input):
            if part is not None:
                part.split(ranks)

    def forward(self, x: Tensor, embedding: Tensor, context: BlockContext, only: Tensor | None = None) -> Tensor:
        steering = None if self.shared_input is None else self.shared_input(x, embedding, context.shared)
        if self.norm_first:
            _, u = self.norm.add_and_norm(x, steering)
        else:
            u = x if steering is None else x + steering
        u = multiplied(u, self.input_scale)
        mixed = self.mixer(u, context.mixer) if context.replay is None else context.replay(self.mixer, u)
        mixed = self._branch(mixed, self.post_norm if self.norm_first else self.norm)
        if only is not None:
            x, mixed = x[:, only], mixed[:, only]
        if self.mlp is None or self.mlp_norm is None:
            return x + mixed
        if self.norm_first and not self.parallel:
            x, u = self.mlp_norm.add_and_norm(x, mixed)  # the sum and its norm in one kernel
            return x + self._branch(self.mlp(u, context), self.mlp_post_norm)
        total = x + mixed
        u = x if self.parallel else total
        if self.norm_first:
            return total + self._branch(self.mlp(self.mlp_norm(u), context), self.mlp_post_norm)
        return total + self._branch(self.mlp(u, context), self.mlp_norm)

    def _branch(self, out: Tensor, norm: Norm | None) -> Tensor:
        """The output of the mixer or the MLP as it joins the residual stream. norm: of that output, if there is one."""
        out = out if norm is None else norm(out)
        out = F.dropout(out, self.dropout, self.training)
        return multiplied(out, self.scale)

    @property
    def shared_mixer(self) -> Mixer | None:
        """The mixer of the shared block that feeds this layer, if one does."""
        return None if self.shared_input is None else self.shared_input.shared.mixer

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        total = self.mixer.flops(seq_len, causal)
        if self.shared_input is not None:
            total += self.shared_input.flops(seq_len, causal)
        return total if self.mlp is None else total + self.mlp.flops(seq_len)

    def saved_flops(self, seq_len: int, causal: bool = False) -> Work:
        """The part of the forward pass that the parts' saved operators spare the recomputation."""
        parts = [part for part in (self.mixer, self.shared_mixer, self.mlp) if part is not None]
        return sum((part.saved_flops(seq_len, causal) for part in parts), Work())
