"""GPU memory of a training run, estimated from the config. No torch here.

Weights, gradients and optimizer state are exact sizes; activations are an estimate, and fragmentation, communication
buffers and the CUDA or HIP context (1 to 3 GB) are left out. P = parameters, S = ranks that share one copy of the
model (all of them, or train.sharding.shard_size), b = bytes of the computation's format (2 in bf16, 4 in fp32):

    weights      4 P / S, plus what FSDP2 holds gathered: b * P with grad_op, sync_every_microbatch: false or S = 1;
                 otherwise b times the root group (embedding, shared blocks, norm, head) and two layers (the one at
                 work and the next)
    gradients    4 P / S (4 P with sync_every_microbatch: false), plus (b + 4) * the largest group during its reduction
    optimizer    8 P / S: AdamW's two moments in fp32
    activations  what autograd keeps of one microbatch, counted per layer below, as compiled blocks with
                 fused attention keep it; with checkpointing, what is kept plus one layer's worth in full
    loss         logits and their gradient (plain: of all tokens, chunked: of one chunk), and for chunked the fp32
                 gradient of the head's weights

The activations per layer follow Korthikanti et al. (arXiv:2205.05198, section 4), with the linear-memory attention
of FlashAttention and without dropout masks. Mamba-2 keeps in_proj's output, the convolution's, y and the gated norm's
output, and in fp32 per chunk the state and C B^T; the reference backend run without torch.compile keeps several
chunk-by-chunk squares per head more. With `backend: triton` the inside of a mixer is one operator
(kernels/mamba_mixer/triton.py): states and C B^T are computed again rather than kept, and of the norm there is one fp32
number per group more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import assert_never

from llmtrain.errors import UserError
from llmtrain.models.config import AttentionBlock, Block, Mamba2Block, MLPConfig, ModelConfig, SharedAttentionBlock
from llmtrain.schema.config import Config

GPUS_PER_NODE = 8  # what hybrid sharding is described with when the config leaves shard_size to the machine


@dataclass(frozen=True)
class ParameterSizes:
    """Parameters of the model as FSDP2 groups them: one group per layer, and the root for everything else."""

    total: int
    root: int
    largest_layer: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Saved:
    """Bytes that one layer keeps per token: without checkpointing, and with the selective kind."""

    everything: float
    selective: float

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.everything + other.everything, self.selective + other.selective)


def estimate_memory(config: Config, sizes: ParameterSizes, world_size: int) -> Memory:
    """Memory of one of `world_size` GPUs, by the formulas above. Raises UserError for a world size below 1."""
    if world_size < 1:
        raise UserError(f"the world size is at least 1, not {world_size}")
    train = config.train
    shards = shard_ranks(config, world_size)
    width = 2 if train.precision == "amp_bf16" else 4
    once_a_step = train.sharding.sync_every_microbatch is False
    whole = train.sharding.strategy == "grad_op" or shards == 1 or once_a_step
    gathered = sizes.total if whole else sizes.root + 2 * sizes.largest_layer
    gradients = sizes.total if once_a_step else -(-sizes.total // shards)
    return Memory(
        weights=-(-4 * sizes.total // shards) + width * gathered,
        gradients=4 * gradients + (width + 4) * max(sizes.root, sizes.largest_layer),
        optimizer=-(-8 * sizes.total // shards),
        activations=_activations(config, width),
        loss=_loss(config, width),
    )


def shard_ranks(config: Config, world_size: int) -> int:
    """Ranks that hold one copy of the model between them."""
    sharding = config.train.sharding
    return min(world_size, sharding.shard_size or GPUS_PER_NODE) if sharding.strategy == "hybrid" else world_size


def _activations(config: Config, width: int) -> int:
    model, checkpointing = config.model, config.train.activation_checkpointing
    residual = width * model.d_model
    per_layer = []
    for layer in model.layer_list():
        saved = _saved_by(model.blocks[layer.block], model, width)
        if layer.shared is not None:
            saved += _saved_by(model.blocks[layer.shared], model, width)
        per_layer.append(saved)
    kept = 0.0
    for index, saved in enumerate(per_layer):
        if checkpointing.type == "none" or (checkpointing.k is not None and index % checkpointing.k):
            kept += saved.everything
        else:
            kept += residual + (saved.selective if checkpointing.type == "selective" else 0)
    recomputed = max(saved.everything for saved in per_layer) if checkpointing.type != "none" else 0
    # The embedding's output, and the final norm's input and output.
    tokens = config.train.microbatch_size * config.data.seq_len
    return round(tokens * (kept + recomputed + 3 * residual))


def _loss(config: Config, width: int) -> int:
    tokens = config.train.microbatch_size * config.data.seq_len
    vocab, d_model = config.model.vocab_size, config.model.d_model
    if config.train.loss.type == "plain":
        return tokens * vocab * (width + 4 + 4)  # logits, their fp32 log-softmax, its gradient
    chunk = min(tokens, config.train.loss.chunk_tokens)
    return chunk * vocab * 2 * width + tokens * d_model * width + 4 * vocab * d_model


def _saved_by(block: Block, model: ModelConfig, width: int) -> Saved:
    """Selective checkpointing keeps attention's output and every second matrix product's: wqkv's, not wo's; the
    MLP's first, not its last; in_proj's, not out_proj's."""
    d_model = model.d_model
    if isinstance(block, Mamba2Block):
        d_inner, d_bc = block.expand * d_model, block.n_groups * block.d_state
        n_heads = d_inner // block.head_dim
        in_proj = 2 * d_inner + 2 * d_bc + n_heads
        elements = 2 * d_model + in_proj + (d_inner + 2 * d_bc) + 2 * d_inner
        if block.backend == "triton":
            wide = block.n_groups
        else:
            wide = d_inner * block.d_state / block.chunk_size + block.n_groups * block.chunk_size
        saved = Saved(width * elements + 4 * wide, width * in_proj)
    elif isinstance(block, AttentionBlock | SharedAttentionBlock):
        shared = isinstance(block, SharedAttentionBlock)
        d_in = 2 * d_model if shared else d_model
        head_dim = block.head_dim or d_in // block.n_heads
        q, kv = block.n_heads * head_dim, 2 * block.kv_heads * head_dim
        log_sums = 4 * block.n_heads
        # Input and output of the norm, q, k, v, and attention's output.
        saved = Saved(width * (2 * d_in + q + kv + q) + log_sums, width * (q + kv + q) + log_sums)
        if shared:
            saved += Saved(width * d_model, 0)  # the input of the linear layer behind the block
    else:
        assert_never(block)
    return saved + _saved_by_mlp(block.mlp, d_model, width) if block.mlp else saved


def _saved_by_mlp(mlp: MLPConfig, d_model: int, width: int) -> Saved:
    up = mlp.d_ff if mlp.type == "gelu" else 2 * mlp.d_ff
    # Input and output of the norm, the first projection's output, and the second's input.
    return Saved(width * (2 * d_model + up + mlp.d_ff), width * up)
