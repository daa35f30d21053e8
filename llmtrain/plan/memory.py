"""GPU memory of a training run, estimated from the config. No torch here.

Weights, gradients and optimizer state are exact sizes; activations are an estimate, and fragmentation, communication
buffers and the CUDA or HIP context (1 to 3 GB) are left out. P = parameters (with train.parallel.tensor those of one rank's part),
T = those of them that are trained (models/parameters.py), S = ranks that share one copy of them
(all ranks, or train.sharding.shard_size, divided by train.parallel.tensor), b = bytes of the computation's format (2 in bf16, 4 in
fp32):

    weights      4 P / S, plus what FSDP2 holds gathered: b * P with grad_op, sync_every_microbatch: false or S = 1;
                 otherwise b times the root group (embedding, shared blocks, norm, head) and two layers (the one at
                 work and the next)
    gradients    4 T / S (4 T with sync_every_microbatch: false), plus (b + r) * the largest group during its reduction, r bytes of
                 reduce_dtype
    optimizer    state_bytes T / S, of the optimizer's section: 8 for AdamW's two moments in fp32; 4 for the matrices of Muon,
                 about 2 for those of 8-bit AdamW. With optimizer.offload three parts of it, each of OFFLOADED_AT_ONCE parameters or
                 of a larger one, as far as they need more than activations and loss do, which are not there then
    average      4 T / S with train.ema
    rollouts     of a policy that draws its own answers: keys, values and states of objective.rollout.rows answers, prefix_mb, and
                 with `weights: copied` b P of weights, without frozen ones where no other rank has a part of them
    float8       weights that FSDP2 gathers in float8 take 1 byte there in place of b, and so does the input of a product in float8
                 among the activations; attention's output, of which its backward pass wants the numbers in b bytes, takes both.
                 Of experts one matrix of a layer is in 1 byte beside that in b bytes, for a while
    activations  what autograd keeps of one microbatch if all is trained (frozen weights keep less; layers below the first trained
                 one, none), counted by each block's section (saved_bytes), as compiled blocks with fused attention keep it; with
                 checkpointing, what is kept plus one layer's worth in full. Ranks that share sequences (train.parallel.context)
                 keep those of their tokens, what a block computes beside them (kept_in_segments), and of the others what it gathers
                 (gathered_bytes); ranks that share layers (train.parallel.tensor), their part, and the whole inputs of mixer and
                 MLP. And what a layer's backward pass takes for a while, whatever the batch (workspace_bytes), of the layer that
                 takes the most
                 A stage of a pipeline (train.parallel.pipeline) holds its own layers, and the activations of as many microbatches
                 as are under way in it: N of the first of N stages, 1 of the last; and what it received of each. The estimate is of
                 the stage that takes the most
    loss         logits and their gradient (plain: of all tokens, chunked: of one chunk), and for chunked the fp32
                 gradient of the head's weights, if they are trained

The activations per layer follow Korthikanti et al. (arXiv:2205.05198, section 4), with the linear-memory attention
of FlashAttention and without dropout masks. The reference backend of the scan keeps, without torch.compile, several
chunk-by-chunk squares per head more. With the selective kind of checkpointing a layer keeps the outputs of the matrix products
that its sections name (kept_products) and those of the operators that its backends declare (saved_ops in kernels/registry.py), with
the kind `kernels` the latter alone. Where sharding or checkpointing is
`auto`, the estimate is that of full sharding and of no checkpointing; automatic.py resolves them by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from llmtrain.errors import UserError
from llmtrain.models.config import LayerRange
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.block import BlockSection
from llmtrain.models.sections.experts import ExpertsSection
from llmtrain.schema.adapt import NF4_BYTES
from llmtrain.schema.config import Config
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.pipeline import rounds

OFFLOADED_AT_ONCE = 2**25
"""Elements of a rank whose optimizer state is on the GPU together, with optimizer.offload. A larger parameter is there alone."""
GPUS_PER_NODE = 8  # what hybrid sharding is described with when the config leaves shard_size to the machine


@dataclass(frozen=True)
class ParameterSizes:
    """Parameters of the model as FSDP2 groups them: one group per layer, and the root for everything else."""

    total: int
    root: int
    largest_layer: int
    matrices: int = 0
    """Of the trained, those that an optimizer of matrices takes: see models/parameters.py."""
    float8: int = 0
    """Of the total, those of products in float8 (train.float8)."""
    float8_copy: int = 0
    """Numbers of the largest matrix of a layer's experts whose products are in float8, on a rank that divides them."""
    float8_inputs: int = 0
    """Channels of their inputs, over all layers."""
    float8_beside: int = 0
    """Of these, those that are kept in the computation's format too: outputs of attention."""
    elsewhere: int = 0
    """Of the total, experts of other ranks (train.parallel.expert), which are never gathered on this one."""
    head: int = 0
    """Of the root, those of an untied head, whose gradients are reduced by themselves."""
    frozen: int = 0
    """Of the total, those that are not trained."""
    largest_trained: int = 0
    """Trained parameters of the group of gradients that is reduced at once and has the most; 0: all of the largest group's."""
    narrow: int = 0
    """Of the frozen, those in 4 bits (adapt.base: nf4), of which every rank has all."""
    frozen_head: bool = False
    """The weights of the logits are not trained, be they the head's or the embedding's."""
    below: int = 0
    """Layers below the first trained one, which keep nothing for a backward pass."""
    rollout_row: int = 0
    """Bytes of keys, values and states for each answer that a rank draws at a time."""
    stages: tuple[StageSizes, ...] = ()
    """The stages of a pipeline, where there are any; the rest is of the whole model."""

    @property
    def largest_stage(self) -> ParameterSizes:
        """Parameters of the stage that has the most; of the whole model without stages."""
        return max((stage.sizes for stage in self.stages), key=lambda sizes: sizes.total, default=self)

    @property
    def trained(self) -> int:
        return self.total - self.frozen

    @property
    def reduced(self) -> int:
        """Parameters whose gradients are reduced at once."""
        return self.largest_trained or max(self.root - self.head, self.head, self.largest_layer)


@dataclass(frozen=True)
class StageSizes:
    """Spans of layers, first .. last - 1 each, of a model. forward, backward: shares of the FLOPs of its training that such passes
    have."""

    spans: tuple[LayerRange, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sizes: ParameterSizes

    @property
    def share(self) -> float:
        return sum(self.forward + self.backward)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    average: int
    rollouts: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def estimate_memory(config: Config, sizes: ParameterSizes, world_size: int) -> Memory:
    """Memory of one of `world_size` GPUs, of the stage that takes the most, by the formulas above. Raises UserError for a world
    size below 1."""
    if world_size < 1:
        raise UserError(f"the world size is at least 1, not {world_size}")
    if sizes.stages:
        return max(stage_memories(config, sizes, world_size), key=lambda memory: memory.total)
    return _of_layers(config, sizes, world_size, _Layers(((0, len(config.model.layer_list())),)))


def stage_memories(config: Config, sizes: ParameterSizes, world_size: int) -> list[Memory]:
    """Memory of a GPU of each stage."""
    train, count, virtual = config.train, len(sizes.stages), config.train.parallel.virtual_stages
    groups = max(world_size // train.parallel.ranks, 1)
    microbatches = max(train.global_batch_size // (groups * train.least_microbatch), 1)
    return [
        _of_layers(
            config,
            stage.sizes,
            world_size,
            _Layers(stage.spans, under_way(number, count, virtual, microbatches), number > 0, number == count - 1),
        )
        for number, stage in enumerate(sizes.stages)
    ]


def under_way(stage: int, stages: int, virtual: int, microbatches: int) -> float:
    """Most microbatches whose activations a stage holds at a time, each of all its layers: one of half of them counts for half.
    1F1B, and torch.distributed.pipelining's interleaved form of it."""
    if virtual == 1:
        return min(stages - stage, microbatches)
    of_round = microbatches // rounds(stages, microbatches)
    return min((virtual - 1) * of_round + 2 * (stages - 1 - stage) + 1, virtual * microbatches) / virtual


@dataclass(frozen=True)
class _Layers:
    """Spans of layers, of which so many microbatches' activations are there at once. receives: the input of the first is another
    stage's output. ends: the head comes behind the last."""

    spans: tuple[LayerRange, ...]
    microbatches: float = 1
    receives: bool = False
    ends: bool = True


def _of_layers(config: Config, sizes: ParameterSizes, world_size: int, layers: _Layers) -> Memory:
    train = config.train
    shards = max(shard_ranks(config, world_size) // train.parallel.tensor, 1)
    width = train.width
    once_a_step = train.sharding.sync_every_microbatch is False
    whole = train.sharding.strategy == "grad_op" or shards == 1 or once_a_step
    # On one rank frozen weights are read where they are (train/parallel.py).
    gathered = sizes.total - sizes.elsewhere if whole else sizes.root + 2 * sizes.largest_layer
    gathered = sizes.trained if shards == 1 else gathered - gathered * sizes.narrow // sizes.total
    wide = 4 * sizes.trained + width * (sizes.frozen - sizes.narrow)
    held = width * gathered
    if train.float8 is not None and train.float8.gathers:
        held -= (width - 1) * gathered * sizes.float8 // sizes.total
    reduced = 2 if train.sharding.reduce_dtype == "bf16" else 4
    gradients = max(sizes.trained - sizes.elsewhere, 0) if once_a_step else -(-sizes.trained // shards)
    of_float8 = sizes if train.float8 is not None else ParameterSizes(0, 0, 0)
    below = sizes.below if layers.ends and not layers.receives else 0
    activations = _activations(config, width, of_float8.float8_inputs, of_float8.float8_beside, layers, below)
    activations += of_float8.float8_copy
    loss = _loss(config, width, head_gradient=not sizes.frozen_head) if layers.ends else 0
    optimizer = -(-optimizer_bytes(config.optimizer, sizes) // shards)
    if config.optimizer.offload:  # in the place of activations, which a step has not
        largest = max(OFFLOADED_AT_ONCE, sizes.root // shards)
        optimizer = max(min(optimizer, 3 * config.optimizer.state_bytes * largest) - activations - loss, 0)
    return Memory(
        weights=-(-wide // shards) + math.ceil(NF4_BYTES * sizes.narrow) + held,
        gradients=4 * gradients + (width + reduced) * sizes.reduced,
        optimizer=optimizer,
        activations=activations,
        loss=loss,
        average=-(-4 * sizes.trained // shards) if train.ema else 0,
        rollouts=_rollouts(
            config, sizes, world_size, width * (sizes.trained if shards == 1 else sizes.total - sizes.narrow)
        ),
    )


def _rollouts(config: Config, sizes: ParameterSizes, world_size: int, copies: int) -> int:
    """copies: bytes of a copy of the weights."""
    rollout = config.objective.own_rollout
    if rollout is None:
        return 0
    drawn = config.objective.answers_drawn(config.samples_per_step) // world_size
    slots = (min(rollout.rows, drawn) + 1) * sizes.rollout_row  # and one in which a prompt is read
    return slots + round(rollout.prefix_mb * 1e6) + (copies if rollout.weights == "copied" else 0)


def optimizer_bytes(config: OptimizerConfig, sizes: ParameterSizes) -> int:
    """Bytes of the optimizer's state, over all ranks that share a model."""
    of_matrices = config.state_bytes if config.matrix_state_bytes is None else config.matrix_state_bytes
    return config.state_bytes * (sizes.trained - sizes.matrices) + math.ceil(of_matrices * sizes.matrices)


def shard_ranks(config: Config, world_size: int) -> int:
    """Ranks that hold one copy of the model, or of a stage of it, between them."""
    sharding, world_size = config.train.sharding, max(world_size // config.train.parallel.pipeline, 1)
    return min(world_size, sharding.shard_size or GPUS_PER_NODE) if sharding.strategy == "hybrid" else world_size


def gathered_bytes(config: Config) -> float:
    """Bytes that a rank receives of one microbatch, in a forward pass, from those that share its sequences. Of an average stage."""
    model, context = config.model, config.train.parallel.context
    if context == 1:
        return 0.0
    width = config.train.width
    used = [name for layer in model.layer_list() for name in (layer.block, layer.shared) if name]
    of_sequence = sum(
        model.blocks[name].gathered_bytes(model.d_model, width, config.data.seq_len, context) for name in used
    )
    return config.train.least_microbatch * of_sequence / config.train.parallel.pipeline


def exchanged_bytes(config: Config) -> float:
    """Bytes that a rank receives of one microbatch, in a forward pass, from those that share its layers: each mixer and each MLP
    gathers its inputs and hands on sums, as the embedding and the head do once. Of an average stage."""
    model, parallel = config.model, config.train.parallel
    width = config.train.width
    tokens = config.train.least_microbatch * config.data.seq_len / parallel.context
    used = [model.blocks[name] for layer in model.layer_list() for name in (layer.block, layer.shared) if name]
    d_model = model.d_model
    channels = sum(block.input_width(d_model) + d_model + (2 * d_model if block.mlp else 0) for block in used)
    return (channels + 2 * d_model) * width * tokens * (parallel.tensor - 1) / parallel.tensor / parallel.pipeline


def stage_bytes(config: Config) -> float:
    """Bytes that a stage hands to the next of one microbatch: hidden states, the embeddings where shared blocks read them, and what
    layers hand on beside them."""
    model, train = config.model, config.train
    width, streams = train.width, 1 + any(layer.shared for layer in model.layer_list())
    channels = streams * model.d_model + model.carried_width
    return channels * width * train.least_microbatch * config.data.seq_len / train.parallel.of_stage


def routed_bytes(config: Config) -> float:
    """Bytes that a rank receives of one microbatch, in a forward pass, from those that divide the experts with it: the rows of a
    balanced router, and as many outputs."""
    model, parallel = config.model, config.train.parallel
    width = config.train.width
    tokens = config.train.least_microbatch * config.data.seq_len / parallel.of_stage
    experts, layers = model.experts(), [layer.block for layer in model.layer_list()]
    channels = sum(experts[name].top_k * (experts[name].latent or model.d_model) for name in layers if name in experts)
    return 2 * channels * width * tokens * (parallel.expert - 1) / parallel.expert / parallel.pipeline


def _activations(
    config: Config, width: int, float8_inputs: int, float8_beside: int, layers: _Layers, below: int
) -> int:
    model, checkpointing = config.model, config.train.activation_checkpointing
    residual = width * model.d_model
    seq_len, context = config.data.seq_len, config.train.parallel.context
    local = seq_len / context  # tokens of a sequence in one rank's layers
    tensor, at_once = config.train.parallel.tensor, checkpointing.mlp_tokens or float("inf")
    parts = [0.0]  # of MLPs at work, of one sequence

    def saved_by(block: BlockSection) -> SavedBytes:
        saved = block.saved_by_layer(model.d_model, width, model.norm)
        if context > 1:
            saved += SavedBytes(block.gathered_bytes(model.d_model, width, seq_len, context) / local)
            saved += block.kept_in_segments(model.d_model, width)
        if block.mlp is not None and at_once < local / tensor:
            inside = block.mlp.saved_bytes(model.d_model, width).everything - 2 * residual
            parts.append(inside * at_once)
            saved += SavedBytes(-inside)
        if isinstance(block.mlp, ExpertsSection) and config.train.parallel.expert > 1:
            saved += SavedBytes(width * block.mlp.top_k * (block.mlp.latent or model.d_model))  # outputs that came back
        if tensor == 1:
            return saved
        inputs = width * (block.input_width(model.d_model) + (model.d_model if block.mlp else 0))
        everything = saved.everything / tensor + inputs * (1 - 1 / tensor)
        return SavedBytes(everything, saved.results / tensor, saved.products / tensor)

    per_layer = []
    here = [layer for first, last in layers.spans for layer in model.layer_list()[first:last]]
    for layer in here:
        saved = saved_by(model.blocks[layer.block])
        per_layer.append(saved + saved_by(model.blocks[layer.shared]) if layer.shared else saved)
    kept = 0.0
    for index, saved in list(enumerate(per_layer))[below:]:
        if checkpointing.fraction is not None:
            kept += residual / tensor + checkpointing.fraction * (saved.everything - residual / tensor)
        elif not checkpointing.recomputes(index):
            kept += saved.everything
        else:
            results = {"selective": saved.results + saved.products, "kernels": saved.results}
            kept += results.get(checkpointing.type, 0) + (0 if checkpointing.offload else residual / tensor)
            kept += width * model.carried_width / tensor
    if checkpointing.type in ("none", "auto", "budget"):
        narrower = ((width - 1) * float8_inputs - width * float8_beside) * (checkpointing.fraction or 1)
        kept -= narrower * (1 - below / len(per_layer))
    recomputed = max(saved.everything for saved in per_layer) if checkpointing.type not in ("none", "auto") else 0
    # The embedding's output, and the final norm's input and output; of inputs in host memory that of the next layer. Of a stage its
    # input, and gradients of both ends.
    outside = (not layers.receives) + 2 * layers.ends + checkpointing.offload
    between = stage_bytes(config) / config.train.least_microbatch * (layers.microbatches + 1)
    parts.append(max(parts) + between * (2 * len(layers.spans) - layers.ends - (not layers.receives)))
    batch = config.train.least_microbatch
    used = [model.blocks[name] for layer in here for name in (layer.block, layer.shared) if name]
    call = seq_len if context == 1 else seq_len // (2 * context)  # attention goes segment by segment
    workspace = max(block.workspace_bytes(model.d_model, width, call) for block in used)
    kept *= layers.microbatches
    return round(batch * (local * (kept + recomputed + outside * residual / tensor) + max(parts))) + workspace


def host_state_bytes(config: Config, sizes: ParameterSizes, world_size: int) -> int:
    """Bytes of host memory for a rank's optimizer state, with optimizer.offload."""
    if not config.optimizer.offload:
        return 0
    shards = max(shard_ranks(config, world_size) // config.train.parallel.tensor, 1)
    return -(-optimizer_bytes(config.optimizer, sizes.largest_stage) // shards)


def host_bytes(config: Config) -> int:
    """Bytes of host memory for the inputs of a rank's recomputed layers, with activation_checkpointing.offload."""
    train, layers = config.train, len(config.model.layer_list())
    if not train.activation_checkpointing.offload:
        return 0
    width = train.width
    tokens = config.data.seq_len // train.parallel.of_stage * train.least_microbatch
    return width * config.model.d_model * tokens * sum(map(train.activation_checkpointing.recomputes, range(layers)))


def _loss(config: Config, width: int, head_gradient: bool) -> int:
    tokens = -(-config.train.least_microbatch * config.data.seq_len // config.train.parallel.context)
    vocab, d_model = config.model.vocab_size // config.train.parallel.tensor, config.model.d_model
    if config.train.loss.type == "plain":
        return tokens * vocab * (width + 4 + 4)  # logits, their fp32 log-softmax, its gradient
    chunk = min(tokens, config.train.loss.chunk_tokens)
    return chunk * vocab * 2 * width + tokens * d_model * width + 4 * vocab * d_model * head_gradient
