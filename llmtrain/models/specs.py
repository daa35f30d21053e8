"""From a block of the config to the spec of its kernel, and what is wrong with the backend it names. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config.base import Problem
from llmtrain.kernels import registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.models.config import AttentionBlock, Block, Mamba2Block, ModelConfig, NormConfig, SharedAttentionBlock

AnyAttention = AttentionBlock | SharedAttentionBlock


def attention_spec(
    block: AnyAttention, d_model: int, dtype: str = "bfloat16", documents: bool = False
) -> AttentionSpec:
    """The kernel's view of an attention block. A shared block reads concat(hidden, embedding), 2 * d_model wide."""
    shared = isinstance(block, SharedAttentionBlock)
    head_dim = block.head_dim or (2 if shared else 1) * d_model // block.n_heads
    return AttentionSpec(
        n_heads=block.n_heads,
        n_kv_heads=block.kv_heads,
        head_dim=head_dim,
        scale=block.softmax_scale or (head_dim / 2 if shared else head_dim) ** -0.5,
        alibi_max_bias=block.position.max_bias if block.position.type == "alibi" else None,
        sliding_window=block.sliding_window,
        softcap=block.softcap,
        dtype=dtype,
        documents=documents,
    )


def ssd_spec(block: Mamba2Block, d_model: int, dtype: str = "bfloat16") -> SSDSpec:
    return SSDSpec(
        n_heads=block.expand * d_model // block.head_dim,
        head_dim=block.head_dim,
        d_state=block.d_state,
        n_groups=block.n_groups,
        chunk_size=block.chunk_size,
        dt_limit=block.dt_limit,
        dtype=dtype,
    )


def norm_spec(norm: NormConfig, dim: int, dtype: str = "bfloat16") -> NormSpec:
    return NormSpec(dim, norm.type, norm.bias, norm.eps, dtype)


def kernel_spec(
    block: Block, d_model: int, dtype: str = "bfloat16", documents: bool = False
) -> tuple[registry.Operation, registry.Spec]:
    """The operation a block's backend serves, and its spec. documents: as HybridLM's."""
    if isinstance(block, Mamba2Block):
        return "ssd", ssd_spec(block, d_model, dtype)
    return "attention", attention_spec(block, d_model, dtype, documents)


def backend_problems(
    config: ModelConfig, platform: Platform | None = None, dtype: str = "bfloat16", documents: bool = False
) -> Iterator[Problem]:
    """Blocks whose named backend cannot serve them; with platform=None, anywhere. Paths start at the model section.

    documents: as HybridLM's.
    """
    for name, block in config.blocks.items():
        operation, spec = kernel_spec(block, config.d_model, dtype, documents)
        if reason := registry.refusal(operation, block.backend, spec, platform):
            yield Problem(f"blocks.{name}.backend", block.backend, reason)


def norm_backend_problems(
    config: ModelConfig, platform: Platform | None = None, dtype: str = "bfloat16"
) -> Iterator[Problem]:
    """Norms whose named backend cannot serve them; as backend_problems. A setting is told once, whatever takes it."""

    def refusal(norm: NormConfig, width: int) -> str | None:
        return registry.refusal("norm", norm.backend, norm_spec(norm, width, dtype), platform)

    inherited = refusal(config.norm, config.d_model)
    if inherited:
        yield Problem("norm.backend", config.norm.backend, inherited)
    for name, block in config.blocks.items():
        shared = isinstance(block, SharedAttentionBlock)
        if block.norm is None and (inherited or not shared):
            continue
        norm, width = block.norm or config.norm, (2 if shared else 1) * config.d_model
        if reason := refusal(norm, width):
            told = (
                reason
                if block.norm
                else f"{reason}; block {name} takes model.norm at {width} channels, or a norm of its own"
            )
            yield Problem(f"blocks.{name}.norm.backend" if block.norm else "norm.backend", norm.backend, told)
