"""Zamba2's shared transformer block (Glorioso et al., arXiv:2411.15242; wiring as in transformers' zamba2).

One SharedAttention serves many layers. What belongs to a single use (low-rank adapters and the linear layer
behind the block) is that layer's SharedInput.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Flops
from llmtrain.models.feed_forward.base import FeedForward
from llmtrain.models.feed_forward.dense import MLP
from llmtrain.models.layer_part import Product
from llmtrain.models.layers import Change, Linear, LowRank, Norm
from llmtrain.models.mixers.attention import Attention, AttentionContext
from llmtrain.models.mixers.base import Mixer
from llmtrain.models.sections.shared_attention import SharedAttentionBlock
from llmtrain.models.tensor_parallel import Part, TensorRanks


class QKVAdapter(nn.Module):
    """Low-rank additions to queries, keys and values, side by side as in the fused projection."""

    def __init__(self, d_in: int, rank: int, widths: list[int]):
        super().__init__()
        self.down = Linear(d_in, 3 * rank, parts=[rank] * 3)
        self.up_q, self.up_k, self.up_v = (Linear(rank, width) for width in widths)

    def split(self, ranks: TensorRanks, q: Part, kv: Part) -> None:
        """Compute this rank's heads."""
        for up, part in ((self.up_q, q), (self.up_k, kv), (self.up_v, kv)):
            up.split_output(ranks, [part])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.down(x).chunk(3, dim=-1)
        return torch.cat((self.up_q(q), self.up_k(k), self.up_v(v)), dim=-1)

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        ups = self.up_q.flops(seq_len) + self.up_k.flops(seq_len) + self.up_v.flops(seq_len)
        return self.down.flops(seq_len) + ups


class SharedAttention(nn.Module):
    """mlp(norm(attention(norm(concat(hidden, embedding))))), with no residual inside. [batch, T, d_model]."""

    def __init__(
        self,
        block: SharedAttentionBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool = False,
    ):
        super().__init__()
        self.block = block
        norm = block.norm or config.norm
        self.norm = Norm(block.input_width(config.d_model), norm, platform, dtype)
        self.mixer = Attention(block, config, platform, dtype, documents, residual=False)
        self.mlp_norm = Norm(config.d_model, norm, platform, dtype)
        self.mlp = MLP(block.mlp, config.d_model, platform, dtype, residual=False)

    def split(self, ranks: TensorRanks) -> None:
        """Compute with this rank's heads and channels; the norms read this rank's tokens."""
        self.mixer.split(ranks)
        self.mlp.split(ranks)

    def forward(
        self,
        x: Tensor,
        embedding: Tensor,
        context: AttentionContext,
        changes: Mapping[str, Mapping[str, Change]],
    ) -> Tensor:
        """changes: to the linear layers of `mixer` and of `mlp`, by name."""
        h = self.mixer(self.norm(torch.cat((x, embedding), dim=-1)), context, changes["mixer"])
        return self.mlp(self.mlp_norm(h), changes=changes["mlp"])

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return self.mixer.flops(seq_len, causal) + self.mlp.flops(seq_len)


class SharedInput(nn.Module):
    """One use of a shared block: its output through this use's linear layer, with this use's adapters."""

    def __init__(self, shared: SharedAttention, config: ModelConfig):
        super().__init__()
        # In a tuple, so that the shared weights are registered once, under the model's `shared`, not once per use.
        self._shared = (shared,)
        block, d_model = shared.block, config.d_model
        self.qkv_adapter = self.mlp_adapter = None
        if block.attn_adapter_rank is not None:
            self.qkv_adapter = QKVAdapter(2 * d_model, block.attn_adapter_rank, shared.mixer.widths)
        if block.adapter_rank is not None:
            self.mlp_adapter = LowRank(d_model, block.adapter_rank, shared.mlp.d_in, shared.mlp.parts)
        # What a converter adds to layers of `mixer` and `mlp`, by their names, for this use.
        self.lora = nn.ModuleDict()
        # Added to what this mixer's norm reads of the stream. Were it not as small at first as what mixers add to the stream, the
        # shared block would be most of what the mixer sees, and gradients at the start little but rounding (BENCHMARKS.md).
        self.linear = Linear(d_model, d_model, residual=True)

    @property
    def shared(self) -> SharedAttention:
        return self._shared[0]

    def products(self) -> list[Product]:
        """The linear layers of this use in the order of their products; gradients need the outputs of all."""

        def own(module: nn.Module | None) -> list[Product]:
            return [Product(one, False, True) for one in module.modules() if isinstance(one, Linear)] if module else []

        found = []
        for part, native in (("mixer", self.qkv_adapter), ("mlp", self.mlp_adapter)):
            module: Mixer | FeedForward = getattr(self.shared, part)
            names = {one: name for name, one in module.named_children()}
            for number, one in enumerate(module.products()):
                adapter = self._adapters(part).get(names[one.linear])
                found += [one, *own(adapter), *own(native if number == 0 else None)]
        return [one._replace(needed=True) for one in [*found, *own(self.linear)]]

    def split(self, ranks: TensorRanks) -> None:
        """Adapt this rank's heads and channels of the shared block, which is split afterwards. The linear layer behind it reads
        this rank's tokens."""
        if self.qkv_adapter is not None:
            self.qkv_adapter.split(ranks, *self.shared.mixer.head_parts())
        if self.mlp_adapter is not None:
            self.mlp_adapter.split(ranks)

    def forward(self, x: Tensor, embedding: Tensor, context: AttentionContext) -> Tensor:
        native = {"mixer": ("wqkv", self.qkv_adapter), "mlp": ("w_in", self.mlp_adapter)}
        changes = {part: self._changes(part, *of) for part, of in native.items()}
        return self.linear(self._shared[0](x, embedding, context, changes))

    def _adapters(self, part: str) -> dict[str, Any]:
        return dict(cast("nn.ModuleDict", self.lora[part]).items()) if part in self.lora else {}

    def _changes(self, part: str, adapted: str, native: nn.Module | None) -> dict[str, Change]:
        """Changes to the linear layers of `mixer` or `mlp`. native: adds to the output of the one named `adapted`."""
        changes: dict[str, Change] = dict(self._adapters(part))
        if native is not None:
            first = changes.get(adapted)
            changes[adapted] = lambda x, y: (y if first is None else first(x, y)) + native(x)
        return changes

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        own = [module for module in (self.qkv_adapter, self.mlp_adapter, self.linear) if module is not None]
        own += [adapter for part in self.lora for adapter in self._adapters(part).values()]
        return sum((module.flops(seq_len) for module in own), self.shared.flops(seq_len, causal))
