"""Tensor and expert parallelism -> converters (float8, adapters) -> stages of a pipeline -> context parallelism -> activation
checkpointing -> compile -> FSDP2 -> memory, in that order, in one function.

Mixed precision is FSDP2's: fp32 master weights, bf16 copies for computation, fp32 reduction. No autocast: Composer would
stack it on top of FSDP2's casts. Composer gets fp32, which switches autocast off.
"""

import inspect
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._functorch import config as functorch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from llmtrain.adapt.base import adaptations
from llmtrain.adapt.float8 import Float8
from llmtrain.adapt.nf4 import frozen_linears, wait_in_host_memory
from llmtrain.distributed.world import World
from llmtrain.errors import UserError
from llmtrain.logs import run_log
from llmtrain.models.attached_loss import TokenSharers
from llmtrain.models.block import Block
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.feed_forward.base import FeedForward
from llmtrain.models.feed_forward.exchange import ExpertRanks
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import parts_of
from llmtrain.models.parameters import parameter_info
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.tensor_parallel import TensorRanks
from llmtrain.plan.stages import stage_spans
from llmtrain.schema.adapt import AdaptConfig
from llmtrain.schema.training import ActivationCheckpointing, TrainConfig
from llmtrain.train.graphs.persistent_weights import sum_by_our_kernel
from llmtrain.train.pipeline.stages import StagedLM
from llmtrain.train.ranks.async_tensor import overlap_products
from llmtrain.train.ranks.host_inputs import HostInputs


def parallelize(
    model: CausalLM,
    config: TrainConfig,
    world: World,
    device: torch.device,
    adapt: AdaptConfig | None = None,
    seq_len: int | None = None,
) -> ContextParallelRanks | None:
    """Prepares a model on the meta device for training on this rank; weights are allocated, not yet set. adapt: of the config.
    seq_len: for which layers are counted, where stages are to take as long as each other; default: the model's largest.

    Returns this rank's part of the sequences, for CausalLM.loss, where train.parallel.context ranks share them. `model.hybrid` is
    then this rank's stage.

    The order matters. Tensor and expert parallelism divide parameters, for which float8 and context parallelism choose kernels,
    whose operators checkpointing has to know. Converters replace linear layers, by patterns of names in the whole model, so
    nothing may hold one yet, and a stage leaves layers out only then. Checkpointing wraps a layer, so that compilation sees (and
    may fuse) the recomputation; compilation comes before FSDP2, whose hooks on the layer then stay outside the graph, which
    therefore has no break; memory comes last, so that a rank only ever holds its own shard.
    """
    mesh = device_mesh(config, world, device)
    sharding, of_experts = fsdp_mesh(mesh), expert_mesh(mesh, config.parallel.expert)
    ranks, segments = tensor_ranks_of(mesh), segments_of(mesh)
    length, virtual = seq_len or model.config.max_seq_len, config.parallel.virtual_stages
    spans = stage_spans(model.hybrid, length, world.pipeline, virtual)
    if ranks is not None:
        model.hybrid.split(ranks)
        ranks.overlapped = overlap_products(ranks, config, world, model.hybrid.platform)
    if of_experts is not None:
        split_experts(model.hybrid, of_experts, config.parallel.tensor)
    model.hybrid.sharers = token_sharers(mesh)
    changes = [Float8(config.float8, shards=sharding.size(-1))] if config.float8 is not None else []
    changes = [*changes, *adaptations(adapt)]
    for converter in changes:
        converter.convert(model.hybrid, model.hybrid.platform)
    if isinstance(model, StagedLM):
        model.begin(mesh, spans)
    if segments is not None:
        model.hybrid.enable_segments()
    chunk_mlps(model.hybrid, config.activation_checkpointing.mlp_tokens)
    kept = set[str]().union(*(converter.saved_ops() for converter in changes))
    checkpoint_activations(
        model.hybrid,
        config.activation_checkpointing,
        kept,
        draws=adapt is not None and adapt.draws_in_training,
        compiled=config.compiles(device.type),
    )
    if config.compiles(device.type):
        fraction = config.activation_checkpointing.fraction
        functorch.activation_memory_budget = 1.0 if fraction is None else fraction
        # The host waits for how many rows experts send: no graph holds that.
        compile_layers(model.hybrid, fullgraph=of_experts is None, max_autotune=config.compile == "max_autotune")
    elif config.activation_checkpointing.type == "budget":
        run_log.warning("train.activation_checkpointing: budget has no effect here, where layers are not compiled")
    if config.activation_checkpointing.offload:
        offload_inputs(model.hybrid)
    shard(model, sharding, config, adapt, of_experts)
    if device.type == "cuda":
        sum_by_our_kernel(model)
    model.to_empty(device=device)
    if adapt is not None and adapt.base == "nf4":
        wait_in_host_memory(model.hybrid)
    for buffer in model.buffers():
        buffer.zero_()
    return segments


def chunk_mlps(model: HybridLM, tokens: int | None) -> None:
    """Have every feed-forward layer read so many tokens of a sequence at a time."""
    for _, part in parts_of(model):
        if isinstance(part, FeedForward):
            part.tokens_at_once = tokens


def checkpoint_activations(
    model: HybridLM,
    config: ActivationCheckpointing,
    kept: Collection[str] = (),
    draws: bool = False,
    compiled: bool = False,
) -> None:
    """kept: operators whose outputs the kinds `kernels` and `selective` keep, beside those that the layers' parts name. draws:
    layers draw random numbers, also without the model's dropout. compiled: layers will be, and what is inside of a
    torch.autograd.Function the compiler keeps unless a policy is asked about its operators one by one."""
    if config.type in ("none", "budget"):
        return
    # By name: a backend's own operator exists only once the backend was imported.
    saved_ops = set(kept).union(*(part.saved_ops() for _, part in parts_of(model)))
    fixed_ops = set[str]().union(*(part.fixed_ops() for _, part in parts_of(model)))
    for i, block in enumerate(model.blocks):
        if not config.recomputes(i):
            continue
        options: dict[str, Any] = {"preserve_rng_state": model.config.draws_in_training or draws}
        if config.type in ("kernels", "selective"):
            # Of a rank's part of the weights, as they are before FSDP2 shards them.
            products = [(tuple(one.linear.weight.t().shape), one.kept) for one in cast("Block", block).products()]
            kept_products = products if config.type == "selective" else []
            options["context_fn"] = _selective(saved_ops | fixed_ops, kept_products)
        elif fixed_ops or compiled:
            options["context_fn"] = _selective(fixed_ops, [])
        model.blocks[i] = checkpoint_wrapper(block, **options)


def offload_inputs(model: HybridLM) -> None:
    """Have what recomputed layers keep, their inputs, in host memory. After compilation: copies are no part of a graph."""
    inputs = HostInputs()
    for block in model.blocks:
        if isinstance(block, CheckpointWrapper):
            block.forward = inputs.keep(block.forward)


_WEIGHT_OF = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2, torch.ops.aten._scaled_mm.default: 1}
"""The argument that is a linear layer's weight [d_in, d_out]: without and with a bias, and in float8."""


def _selective(saved_ops: set[str], products: Sequence[tuple[tuple[int, ...], bool]]) -> Any:
    """`_selective_contexts` of these, with the key by which the compiler finds what an earlier process compiled."""
    contexts: Any = partial(_selective_contexts, saved_ops, products)
    contexts.cache_hash = repr((inspect.getsource(_selective_contexts), sorted(saved_ops), products))
    return contexts


def _selective_contexts(saved_ops: set[str], products: Sequence[tuple[tuple[int, ...], bool]]):
    """Keeps the outputs of these operators, and of some products with weights. products: in the order of the forward pass, the
    weight's shape [d_in, d_out], and whether the output is kept. Products of other shapes are no linear layer's."""
    expected = {is_recompute: list(products) for is_recompute in (False, True)}

    def policy(ctx, op, *args, **kwargs):
        keep = str(op) in saved_ops
        if op in _WEIGHT_OF:
            left, shape = expected[ctx.is_recompute], tuple(args[_WEIGHT_OF[op]].shape)
            place = next((i for i, one in enumerate(left) if one[0] == shape), None)
            if place is not None:
                keep = left[place][1]
                del left[: place + 1]
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compile_layers(model: HybridLM, fullgraph: bool = True, max_autotune: bool = False) -> None:
    """Compiles each layer's forward, by default without graph breaks; equal layers share one compilation.

    Only `forward` is compiled, not `__call__`: FSDP2's hooks live in the latter.
    """
    from torch._inductor import config as inductor  # which takes a while
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()  # its processes take seconds to begin: until then kernels are compiled one after the other

    # All layers share the code of Block.forward, and with it one cache of compilations: one per kind of layer,
    # twice over (training and validation).
    kinds = len(model.config.blocks) * 4
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, kinds)
    # Inductor would lengthen rows of a product to whole lines of memory. Our kernels are handed rows as they are, so that each of
    # them would come with a copy of what the product wrote, at widths such as Zamba2's.
    inductor.comprehensive_padding = False
    # Otherwise every process compiles layers with a torch.autograd.Function anew. What ours compute depends on the graph alone.
    functorch.autograd_cache_allow_custom_autograd_functions = True
    model.compiled = True
    mode = "max-autotune-no-cudagraphs" if max_autotune else None
    for block in model.blocks:
        # Not dynamic: a size that differs between two kinds of layer would become symbolic in both.
        block.forward = torch.compile(block.forward, fullgraph=fullgraph, dynamic=False, mode=mode)


def device_mesh(config: TrainConfig, world: World, device: torch.device) -> DeviceMesh:
    """All ranks, over the dimensions (stage, replicate, shard, context, tensor), consecutive ranks in the last one; replicate is
    there for hybrid sharding alone, stage, context and tensor where they are more than 1. Raises UserError where a size does not
    divide another."""
    sharding, context, tensor, stages = config.sharding, config.parallel.context, config.parallel.tensor, world.pipeline
    of_stage = world.size // stages
    size = min(sharding.shard_size or world.local_size, of_stage) if sharding.strategy == "hybrid" else of_stage
    if of_stage % size:
        raise UserError(f"train.sharding.shard_size = {size} does not divide the {of_stage} ranks")
    shared = context * tensor
    if size % shared:
        raise UserError(
            f"train.parallel takes {shared} ranks (context {context} x tensor {tensor}), which do not divide the {size} ranks that "
            "share one model"
        )
    if size % (expert := config.parallel.expert):
        raise UserError(f"train.parallel.expert = {expert} does not divide the {size} ranks that share one model")
    dimensions = {"stage": stages, "replicate": of_stage // size}
    dimensions |= {"shard": size // shared, "context": context, "tensor": tensor}
    if sharding.strategy != "hybrid":
        del dimensions["replicate"]
    for name in ("stage", "context", "tensor"):
        if dimensions[name] == 1:
            del dimensions[name]
    return init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def tensor_ranks_of(mesh: DeviceMesh) -> TensorRanks | None:
    """This rank's place among those that share every layer's work, where there are any."""
    if "tensor" not in (mesh.mesh_dim_names or ()):
        return None
    group = mesh.get_group("tensor")
    return TensorRanks(mesh.get_local_rank("tensor"), group.size(), group.group_name)


def segments_of(mesh: DeviceMesh) -> ContextParallelRanks | None:
    """This rank's part of sequences, where ranks share them."""
    if "context" not in (mesh.mesh_dim_names or ()):
        return None
    group = mesh.get_group("context")
    return ContextParallelRanks(mesh.get_local_rank("context"), group.size(), group.group_name)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """(shard,) or (replicate, shard) for FSDP2, of the ranks that hold the same part of every layer. To it the ranks of a
    context-parallel group are shards like others: each has the gradients of its own tokens."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if context := sizes.pop("context", None):
        sizes["shard"] *= context
        mesh = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    names = tuple(name for name in sizes if name not in ("stage", "tensor"))
    return mesh if len(names) == len(sizes) else mesh[names]


def expert_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh | None:
    """All ranks, over (stage, replicate, shard, expert), the first two if the mesh has them, where `size` consecutive ones divide
    the experts between them: they are shards, segments and tensor-parallel ranks, which have tokens of their own between layers.
    None for a size of 1."""
    if size == 1:
        return None
    outside = {
        name: n for name, n in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True) if name in ("stage", "replicate")
    }
    dimensions = outside | {"shard": mesh.size() // math.prod(outside.values()) // size, "expert": size}
    return init_device_mesh(mesh.device_type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def split_experts(model: HybridLM, mesh: DeviceMesh, tensor: int) -> None:
    """Divide the experts of every layer. mesh: of `expert_mesh`. tensor: ranks that compute one loss, whose gradients are added up
    rather than averaged."""
    group = mesh.get_group("expert")
    ranks = ExpertRanks(mesh.get_local_rank("expert"), group.size(), group.group_name, tensor / group.size())
    for _, part in parts_of(model):
        part.split_experts(ranks)


def token_sharers(mesh: DeviceMesh) -> TokenSharers | None:
    """The ranks that read the same samples, each a part of their tokens; None for one."""
    sizes = {name: n for name, n in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True) if name in SHARING}
    if not sizes:
        return None
    [*_, last] = sizes
    shared = mesh[last] if len(sizes) == 1 else mesh[tuple(sizes)]._flatten()
    return TokenSharers(shared.size(), sizes.get("tensor", 1), shared.get_group().group_name)


SHARING = ("context", "tensor")


def shard(
    model: CausalLM,
    mesh: DeviceMesh,
    config: TrainConfig,
    adapt: AdaptConfig | None = None,
    of_experts: DeviceMesh | None = None,
) -> None:
    """FSDP2: one group per layer, one for an untied head, and one for what is used throughout (embedding, shared blocks, norm); of
    experts that ranks divide, one per layer among those that hold the same."""
    policy, ignored = MixedPrecisionPolicy(), unsharded(model, mesh, adapt)
    if config.precision != "fp32":
        # A layer's inputs follow from the parameters. Casting them would also cast what a layer gets in fp32, wherever FSDP2
        # finds tensors (in tuples, dicts and dataclasses): rotary tables, ALiBi's slopes, the states of a cache.
        summed = torch.bfloat16 if config.sharding.reduce_dtype == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=summed, cast_forward_inputs=False)
        _shard_fp32(model, mesh, ignored)
    # With one rank per group there is nothing to free by resharding.
    reshard = config.sharding.strategy != "grad_op" and mesh.size(-1) > 1
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": ignored}
    if of_experts is not None:
        among = of_experts[tuple(name for name in of_experts.mesh_dim_names or () if name not in ("stage", "expert"))]
        whole = config.sharding.strategy == "grad_op" or among.size(-1) == 1
        for _, part in parts_of(model.hybrid):
            for module in part.split_modules():
                options: dict[str, Any] = common | {"mesh": among}
                fully_shard(module, reshard_after_forward=not whole, **options)
    for block in model.hybrid.blocks:
        fully_shard(block, reshard_after_forward=reshard, **common)
        if of_experts is not None:
            # The host waits in each layer before its experts are called: their gather is to begin with the layer.
            inside = [cast("FSDPModule", one) for _, part in parts_of(block) for one in part.split_modules()]
            cast("FSDPModule", block).set_modules_to_forward_prefetch(inside)
    if model.hybrid.head is not None:
        fully_shard(model.hybrid.head, reshard_after_forward=False, **common)
    fully_shard(model, reshard_after_forward=False, **common)


def unsharded(model: CausalLM, mesh: DeviceMesh, adapt: AdaptConfig | None) -> set[nn.Parameter]:
    """Parameters that FSDP2 leaves alone: frozen ones, which are in the format of the computation (adapt/base.py), where no other
    rank has a part of them, for it would keep a copy; and those that become 4 bits."""
    if mesh.size(-1) > 1:
        return (
            {cast("nn.Parameter", one.weight) for one in frozen_linears(model.hybrid)}
            if adapt and adapt.base == "nf4"
            else set()
        )
    return {parameter for parameter in model.parameters() if not parameter.requires_grad}


def _shard_fp32(model: CausalLM, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    """Gives the parameters that must not be cast, by what the layers' parts declare, one group of their own, gathered once per
    forward.

    Their modules are read, never called (a hook inside a compiled layer would break its graph), so the
    gather is asked for when the model is entered. FSDP2 reduces their gradients with the root's.
    """
    parameters = {parameter for parameter, info in parameter_info(model.hybrid).items() if info.fp32}
    parameters -= ignored
    modules = [
        module for module in model.hybrid.modules() if not parameters.isdisjoint(module.parameters(recurse=False))
    ]
    if not modules:
        return
    for module in modules:
        others = set(module.parameters()) - parameters
        assert not others, (
            f"{type(module).__name__} holds fp32 parameters beside others; they need a module of their own"
        )
    group = fully_shard(modules, mesh=mesh, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=False)
    assert isinstance(group, list)
    first = group[0]
    assert isinstance(first, FSDPModule)

    def gather(module: nn.Module, args: object) -> None:
        first.unshard()

    model.register_forward_pre_hook(gather)
