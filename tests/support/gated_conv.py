"""A mixer without a cache for decoding and without a form for shared prefixes, in a model's config."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from llmtrain.config.base import PositiveInt
from llmtrain.kernels import platform
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.costs import Flops
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layers import Linear
from llmtrain.models.mixers.base import Mixer, MixerContext
from llmtrain.models.mixers.convolution import CausalConv1d
from llmtrain.models.sections.block import BlockSection
from tests.support.models import ATTENTION, ROTARY, SWIGLU, VOCAB, large_weights


class GatedConvBlock(BlockSection):
    """x + gated_conv(norm(x)), then an optional MLP."""

    implementation: ClassVar[str] = "tests.support.gated_conv:GatedConv"

    type: Literal["gated_conv"]
    d_conv: PositiveInt = 4


class GatedConvConfig(ModelConfig):
    """A model whose blocks are attention or gated convolutions."""

    blocks: dict[str, Annotated[AttentionBlock | GatedConvBlock, Field(discriminator="type")]]


class GatedConv(Mixer):
    """x: [batch, T, d_model] -> [batch, T, d_model]."""

    def __init__(
        self,
        block: GatedConvBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool = False,
    ):
        super().__init__(block, config, platform, dtype, documents)
        self.in_proj = Linear(config.d_model, 2 * config.d_model, parts=[config.d_model] * 2)
        spec = Conv1dSpec(config.d_model, block.d_conv, str(dtype).removeprefix("torch."), documents)
        self.conv = CausalConv1d(spec, bias=True, platform=platform)
        self.out_proj = Linear(config.d_model, config.d_model, residual=True)

    def forward(self, x: Tensor, context: MixerContext) -> Tensor:
        a, b = self.in_proj(x).chunk(2, dim=-1)
        return self.out_proj(context.convolve(self.conv, a) * b)

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return self.in_proj.flops(seq_len) + self.conv.flops(seq_len) + self.out_proj.flops(seq_len)


def build(layers: str = "g a g", documents: bool = False) -> CausalLM:
    """With weights large enough that it tells tokens apart, in eval mode."""
    blocks = {"g": {"type": "gated_conv", "mlp": SWIGLU}, "a": ATTENTION | {"position": ROTARY}}
    used = {name: block for name, block in blocks.items() if name in layers}
    settings = {"vocab_size": VOCAB, "d_model": 32, "max_seq_len": 300, "blocks": used, "layers": layers}
    model = HybridLM(GatedConvConfig.model_validate(settings), platform.cpu(), documents=documents)
    return CausalLM(large_weights(model)).eval()
