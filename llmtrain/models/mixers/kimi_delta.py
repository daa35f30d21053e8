"""The Kimi Delta Attention mixer (arXiv:2510.26692): as Gated DeltaNet, with a decay for each channel of the keys, and low-rank
projections for the decays and for the output's gate, a sigmoid."""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.layers import Linear
from llmtrain.models.mixers.base import MixerContext
from llmtrain.models.mixers.convolution import CausalConv1d
from llmtrain.models.mixers.gated_deltanet import DecayParameters, DeltaRule, HeadGatedRMSNorm
from llmtrain.models.sections.kimi_delta import KimiDeltaBlock
from llmtrain.models.tensor_parallel import Part, TensorRanks


class KimiDelta(DeltaRule):
    """x: [batch, T, d_model] -> [batch, T, d_model]."""

    def __init__(
        self,
        block: KimiDeltaBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool = False,
    ):
        super().__init__(block, config, platform, dtype, documents)
        (keys, values), rank = block.widths(), block.rank
        self.lower_bound = block.lower_bound
        parts = [*self.conv_widths, block.n_heads, rank, rank]
        self.widths = [self.conv_spec.channels, block.n_heads, rank, rank]
        self.in_proj = Linear(config.d_model, sum(parts), parts=parts, names=("q", "k", "v", "b", "a", "z"))
        self.conv = CausalConv1d(self.conv_spec, bias=False, platform=platform)
        self.decay_proj = Linear(rank, keys)
        self.decay = DecayParameters(block, block.key_head_dim)
        self.gate_proj = Linear(rank, values)
        self.norm = HeadGatedRMSNorm(block.gated_norm(config.norm, self.spec.dtype), platform)
        self.out_proj = Linear(values, config.d_model, residual=True)

    def split(self, ranks: TensorRanks) -> None:
        """Every rank has the low-rank projections of all heads, and makes of them the decays and gates of its own."""
        spec, (*_, rank) = self.spec, self.widths
        keys, values = Part(spec.n_heads, spec.key_head_dim), Part(spec.n_heads, spec.value_head_dim)
        self.in_proj.split_output(ranks, [keys, keys, values, Part(spec.n_heads), Part(1, rank), Part(1, rank)])
        self.decay_proj.split_output(ranks, [keys])
        self.gate_proj.split_output(ranks, [values])
        super().split(ranks)
        self.widths = [sum(self.conv_widths), self.spec.n_heads, rank, rank]

    def forward(self, x: Tensor, context: MixerContext) -> Tensor:
        x = x if self.ranks is None else self.ranks.enter(x)
        qkv, b, a, z = self.in_proj(x).split(self.widths, dim=-1)
        q, k, v = self.heads(context.convolve(self.conv, qkv))
        wide = torch.promote_types(x.dtype, torch.float32)
        y = context.apply(self.kernel, q, k, v, self.log_decay(self.decay_proj(a).to(wide)), b.to(wide).sigmoid())
        return self.out_proj(self.norm(y.flatten(-2), self.gate_proj(z)))

    def log_decay(self, a: Tensor) -> Tensor:
        """Logarithms of the decays, at most 0. a: [..., heads * key_head_dim] in fp32 or wider -> [..., heads, key_head_dim]."""
        rate = self.decay.A_log.to(a.dtype).exp()[:, None]
        a = (a + self.decay.dt_bias.to(a.dtype)).unflatten(-1, (-1, self.spec.key_head_dim))
        if self.lower_bound is None:
            return -rate * F.softplus(a)
        return self.lower_bound * (rate * a).sigmoid()
