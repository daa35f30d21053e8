"""From a block of the config to the spec of its kernel, and what is wrong with the backends it names. No torch."""

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
    head_dim = block.head_dim or block_width(block, d_model) // block.n_heads
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


def backend_problems(config: ModelConfig, documents: bool = False) -> Iterator[Problem]:
    """Named backends of blocks and of norms that cannot serve them on any machine. Paths start at the model section.

    documents: as HybridLM's.
    """
    for name, block in config.blocks.items():
        operation, spec = kernel_spec(block, config.d_model, documents=documents)
        if reason := registry.refusal(operation, block.backend, spec):
            yield Problem(f"blocks.{name}.backend", block.backend, reason)
    yield from _norm_problems(config)


def _norm_problems(config: ModelConfig) -> Iterator[Problem]:
    """model.norm's is told once, whatever takes it."""

    def refusal(norm: NormConfig, width: int) -> str | None:
        return registry.refusal("norm", norm.backend, norm_spec(norm, width))

    widths = {name: block_width(block, config.d_model) for name, block in config.blocks.items()}
    for name, block in config.blocks.items():
        if block.norm and (reason := refusal(block.norm, widths[name])):
            yield Problem(f"blocks.{name}.norm.backend", block.norm.backend, reason)
    reason, takers = refusal(config.norm, config.d_model), ""
    if reason is None:
        inheriting = [name for name, block in config.blocks.items() if block.norm is None]
        wide = [name for name in inheriting if refusal(config.norm, widths[name])]
        if wide:
            reason = refusal(config.norm, widths[wide[0]])
            one = len(wide) == 1
            takers = (
                f"; {'block' if one else 'blocks'} {', '.join(wide)} {'takes' if one else 'take'} model.norm at "
                f"{widths[wide[0]]} channels, or a norm of {'its' if one else 'their'} own with type, bias and eps"
            )
    if reason:
        yield Problem("norm.backend", config.norm.backend, reason + takers)


def block_width(block: Block, d_model: int) -> int:
    """Channels of what a block's norm reads; a shared block's is concat(hidden, embedding)."""
    return (2 if isinstance(block, SharedAttentionBlock) else 1) * d_model


def servable(config: ModelConfig, platform: Platform, dtype: str) -> ModelConfig:
    """The same function, to be run but not trained: `auto` where a backend was named that this machine has not, for a run on
    another may have named it.
    """

    def backend(name: str, block: Block) -> str:
        operation, spec = kernel_spec(block, config.d_model, dtype)
        return "auto" if registry.refusal(operation, block.backend, spec, platform) else block.backend

    return config.with_backends("auto", backend)
