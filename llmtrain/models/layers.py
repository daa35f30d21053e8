"""The small parts of blocks: linear, norm, MLP, low-rank adapter, rotary positions.

Constructors allocate and never initialise, so a model builds on the meta device; `init_rules` gives the
parameters' initial distributions. Norms compute in fp32 whatever their input's dtype, and return that dtype.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.kernels import registry
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.norm.reference import ReferenceNorm
from llmtrain.kernels.platform import Platform
from llmtrain.models.costs import Flops
from llmtrain.models.init import InitScale, Rule, constant, normal
from llmtrain.models.sections.layers import LinearScaling, Llama3Scaling, MLPConfig, NormConfig, RotaryPosition


class Linear(nn.Linear):
    """nn.Linear that leaves its memory as it is.

    residual: the output is added to the residual stream, or to what a mixer reads of it, so its initial scale shrinks with
        depth.
    """

    def __init__(self, d_in: int, d_out: int, bias: bool = False, residual: bool = False):
        super().__init__(d_in, d_out, bias=bias)
        self.residual = residual

    def reset_parameters(self) -> None:
        """Called by nn.Linear's constructor; init_weights does it instead."""

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        rules = {"weight": normal(scale.residual_std if self.residual else scale.std)}
        return rules if self.bias is None else rules | {"bias": constant(0.0)}

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return Flops(projection=2 * seq_len * self.in_features * self.out_features)


class Embedding(nn.Module):
    """Rows of a table [n, d]. tokens: [batch, T] -> [batch, T, d]."""

    def __init__(self, n: int, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, d))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": normal(scale.std)}

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class LearnedPositions(Embedding):
    """One vector per position. seq_len -> [seq_len, d], or positions [batch, T] -> [batch, T, d]."""

    def forward(self, positions: int | Tensor) -> Tensor:
        if isinstance(positions, int):
            return self.weight[:positions]
        return F.embedding(positions, self.weight)


class Norm(nn.Module):
    """LayerNorm or RMSNorm (Zhang & Sennrich, arXiv:1910.07467) over the last dimension, [..., dim].

    platform: where it will run, which picks the kernel of training, for activations of `dtype`. None: plain PyTorch, which
        the compiler fuses with what stands around it.
    """

    def __init__(
        self, dim: int, config: NormConfig, platform: Platform | None = None, dtype: torch.dtype = torch.bfloat16
    ):
        super().__init__()
        spec = config.spec(dim, str(dtype).removeprefix("torch."))
        self.plain = self.kernel = ReferenceNorm(spec)
        if platform is not None:
            self.kernel = registry.resolve("norm", config.backend, spec, platform).build(spec, platform)
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if config.bias else None

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": constant(1.0)} | ({} if self.bias is None else {"bias": constant(0.0)})

    def forward(self, x: Tensor) -> Tensor:
        return self.add_and_norm(x, None)[1]

    def add_and_norm(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta (None: x), and its norm."""
        # Our kernel was measured in training steps. Scoring and generation are not compiled, and bound by Python's overhead.
        kernel = self.kernel if torch.is_grad_enabled() else self.plain
        return kernel(x, delta, self.weight, self.bias)


class GatedRMSNorm(nn.Module):
    """Mamba-2's output norm: rms(x * silu(z)), or rms(x) * silu(z), per group of channels; in fp32.

    x, z: [..., dim] -> like x.
    """

    def __init__(self, spec: GatedNormSpec, platform: Platform, backend: str = "auto"):
        super().__init__()
        self.backend = registry.resolve_beside("gated_norm", backend, spec, platform)
        self.kernel = self.backend.build(spec, platform)
        self.weight = nn.Parameter(torch.empty(spec.dim))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": constant(1.0)}

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.kernel(x, z, self.weight)


class LowRank(nn.Module):
    """x -> up(down(x)): a low-rank addition to another projection, without bias or scale."""

    def __init__(self, d_in: int, rank: int, d_out: int):
        super().__init__()
        self.down = Linear(d_in, rank)
        self.up = Linear(rank, d_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return self.down.flops(seq_len) + self.up.flops(seq_len)


class MLP(nn.Module):
    """w_out(gelu(w_in x)), or gated: w_out(act(gate) * up), gate and up being the two halves of w_in x.

    act is SiLU (swiglu) or the exact GELU (gelu, geglu); Shazeer, arXiv:2002.05202.
    """

    def __init__(self, d_model: int, config: MLPConfig, residual: bool = True):
        super().__init__()
        self.activation = config.type
        self.d_in = config.d_ff if config.type == "gelu" else 2 * config.d_ff
        self.w_in = Linear(d_model, self.d_in, config.bias)
        self.w_out = Linear(config.d_ff, d_model, config.bias, residual=residual)

    def forward(self, x: Tensor, adapter: LowRank | None = None) -> Tensor:
        """adapter: adds to w_in's output, [..., d_in]."""
        h = self.w_in(x)
        if adapter is not None:
            h = h + adapter(x)
        if self.activation == "gelu":
            return self.w_out(F.gelu(h))
        gate, up = h.chunk(2, dim=-1)
        return self.w_out((F.silu(gate) if self.activation == "swiglu" else F.gelu(gate)) * up)

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return self.w_in.flops(seq_len) + self.w_out.flops(seq_len)


def rotary_tables(positions: Tensor, head_dim: int, rotary: RotaryPosition) -> tuple[Tensor, Tensor]:
    """cos and sin of t * frequency_i (arXiv:2104.09864), in fp32.

    positions: [T] or [batch, T] -> each [T, 1, head_dim / 2], or with batch in front.
    """
    angle = positions.to(torch.float32)[..., None, None] * rotary_frequencies(head_dim, rotary, positions.device)
    return angle.cos(), angle.sin()


def rotary_frequencies(head_dim: int, rotary: RotaryPosition, device: torch.device) -> Tensor:
    """Radians per token of each pair of channels: theta^(-2 i / head_dim), scaled. [head_dim / 2] in fp32."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequency = 1.0 / rotary.theta**steps
    match rotary.scaling:
        case None:
            return frequency
        case LinearScaling(factor=factor):
            return frequency / factor
        case Llama3Scaling() as scaling:
            turns = scaling.original_max_seq_len * frequency / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            return frequency * (kept + (1 - kept) / scaling.factor)
