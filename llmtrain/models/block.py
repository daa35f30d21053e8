"""The residual wiring of one layer."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.context import BlockContext
from llmtrain.models.costs import Flops
from llmtrain.models.feed_forward.base import FeedForward
from llmtrain.models.layer_part import Product
from llmtrain.models.layers import Affine, Norm, multiplied
from llmtrain.models.mixers.base import Mixer
from llmtrain.models.mixers.shared_attention import SharedInput
from llmtrain.models.sections.block import BlockSection
from llmtrain.models.sections.feed_forward import Carried
from llmtrain.models.tensor_parallel import TensorRanks


class Block(nn.Module):
    """x + mixer(norm(x + shared_input(x, embedding))), then x + mlp(mlp_norm(x)); either extra part may be absent.

    With norm.place: after, x + norm(mixer(x)) and x + mlp_norm(mlp(x)); with both, x + post_norm(mixer(norm(x))) and so on.
    With parallel, x + mixer(norm(x)) + mlp(mlp_norm(x)). residual_multiplier scales each summand beside x, input_multiplier
    what the mixer reads. With residual_scaling, either summand of a sum has a learned bias and factor.

    x, embedding: [batch, T, d_model] -> like x, or [batch, n, d_model] for the n tokens that `only` names, if it does. The
    shared block's output steers the mixer but does not enter the residual stream itself. carried, and a second result: what goes
    from one layer's MLP to a later one's (FeedForward.forward), where `carries` says so.
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
        self.carries = Carried() if self.mlp is None else self.mlp.carries
        self.mixer_scaling = ResidualScaling(config.d_model) if block.residual_scaling else None
        self.mlp_scaling = ResidualScaling(config.d_model) if block.residual_scaling and block.mlp else None

    def split(self, ranks: TensorRanks) -> None:
        """Divide mixer and MLP between tensor-parallel ranks, before the shared block is; the norms read this rank's tokens."""
        self.mixer.split(ranks)
        for part in (self.mlp, self.shared_input):
            if part is not None:
                part.split(ranks)

    def forward(
        self, x: Tensor, embedding: Tensor, context: BlockContext, only: Tensor | None = None, *carried: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        steering = None if self.shared_input is None else self.shared_input(x, embedding, context.shared)
        if self.norm_first:
            _, u = self.norm.add_and_norm(x, steering)
        else:
            u = x if steering is None else x + steering
        u = multiplied(u, self.input_scale)
        mixed = self.mixer(u, context.mixer) if context.replay is None else context.replay(self.mixer, u)
        mixed = self._branch(mixed, self.post_norm if self.norm_first else self.norm)
        if only is not None:
            x, mixed, carried = x[:, only], mixed[:, only], tuple(one[:, only] for one in carried)
        if self.mixer_scaling is not None:
            x, mixed = self.mixer_scaling(x, mixed)
        if self.mlp is None or self.mlp_norm is None:
            return x + mixed
        if self.norm_first and not self.parallel:
            x, u = self.mlp_norm.add_and_norm(x, mixed)  # the sum and its norm in one kernel
        else:
            u = x if self.parallel else x + mixed
            x, u = x + mixed, self.mlp_norm(u) if self.norm_first else u
        out = self.mlp(u, context, *carried)
        out, handed_on = out if isinstance(out, tuple) else (out, None)
        out = self._branch(out, self.mlp_post_norm if self.norm_first else self.mlp_norm)
        if self.mlp_scaling is not None:
            x, out = self.mlp_scaling(x, out)
        return x + out if handed_on is None else (x + out, handed_on)

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

    def products(self) -> list[Product]:
        """The products of the layer's forward pass, in order. What a norm follows is needed, what is only summed is not."""
        summed = self.norm_first and self.post_norm is None
        mixer_needed = not (summed and (self.mlp is None or self.parallel))
        found = [] if self.shared_input is None else self.shared_input.products()
        for part, needed in ((self.mixer, mixer_needed), (self.mlp, not summed)):
            found += [] if part is None else [one._replace(needed=one.needed or needed) for one in part.products()]
        return found

    def recomputed(self, seq_len: int, kind: str, compiled: bool, chunk: float = 1.0) -> int:
        """FLOPs of the forward pass that the backward pass of one sequence computes again, attention's half of a square.

        kind: of activation checkpointing, "none" where this layer has none. chunk: share of the tokens that the last of an MLP's
        parts reads (mlp_tokens), 1 for all at once. The compiler computes what gradients need; without it a layer is computed
        up to the last tensor that was saved.
        """
        shared = None if self.shared_input is None else self.shared_input.shared.mlp
        in_parts = 0
        if chunk < 1 and not (
            compiled and kind != "none"
        ):  # compiled, parts of a recomputed layer are no further recomputation
            for mlp in (part for part in (self.mlp, shared) if part is not None):
                in_parts += mlp.flops(seq_len).forward.total - _total(
                    (p for p in mlp.products() if not p.needed), seq_len
                )
            if shared is not None and self.shared_input is not None and (adapter := self.shared_input.mlp_adapter):
                in_parts += adapter.flops(seq_len).forward.total
        if kind == "none":
            return in_parts
        products = self.products()
        dropped = [i for i, product in enumerate(products) if not product.needed]
        if not compiled:
            last = max((i for i, product in enumerate(products) if product.needed), default=-1)
            dropped = [i for i in dropped if i > last and not self.dropout]
        if kind == "selective":
            dropped = sorted({*dropped, *(i for i, product in enumerate(products) if product.kept)})
        spared = _total((products[i] for i in dropped), seq_len)
        if kind in ("kernels", "selective"):
            parts = [part for part in (self.mixer, self.shared_mixer, self.mlp) if part is not None]
            spared += sum(part.saved_flops(seq_len, causal=True).total for part in parts)
        if in_parts and self.mlp is not None and len(products) - 1 in dropped:
            # The last part's inputs are the last tensors that were saved.
            spared += round(chunk * self.mlp.flops(seq_len).forward.total) - products[-1].linear.product(seq_len).total
        return in_parts + self.flops(seq_len, causal=True).forward.total - spared


class ResidualScaling(nn.Module):
    """The summands of a residual sum as they are added: (x, branch), [batch, T, d_model] each -> the same, biased and scaled."""

    def __init__(self, d_model: int):
        super().__init__()
        self.stream, self.branch = Affine(d_model), Affine(d_model)

    def forward(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        return self.stream(x), self.branch(branch)


def _total(products: Iterable[Product], seq_len: int) -> int:
    return sum(product.linear.product(seq_len).total for product in products)
