"""The facts behind `llmtrain describe`: parameters, FLOPs, memory and expected speed, on the meta device."""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

from torch import nn

from llmtrain.adapt.base import adapted, meta_model
from llmtrain.data.shards.checks import steps_per_epoch
from llmtrain.errors import UserError
from llmtrain.flops.count import count_parameters, training_flops_per_token
from llmtrain.flops.mfu import tokens_per_second_at
from llmtrain.flops.peaks import Device, dense_peak
from llmtrain.kernels.platform import detect, named
from llmtrain.models.backends import chosen
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Work
from llmtrain.models.float8_products import Float8Product, exclude_problems, float8_products
from llmtrain.models.hf.family import UnsupportedModelError, family_for_model
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.mixers.attention import Attention
from llmtrain.models.parameters import parameter_info
from llmtrain.models.sections.float8 import Float8Config
from llmtrain.models.tensor_parallel import TensorRanks
from llmtrain.plan.automatic import resolve_auto
from llmtrain.plan.candidates import ADVISED
from llmtrain.plan.decisions import decisions
from llmtrain.plan.fitting import Fit, plans_that_fit
from llmtrain.plan.memory import (
    GPUS_PER_NODE,
    Memory,
    ParameterSizes,
    estimate_memory,
    exchanged_bytes,
    gathered_bytes,
    host_state_bytes,
    shard_ranks,
)
from llmtrain.schema.config import Config
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.parameter_groups import ParameterSettings, parameter_settings
from llmtrain.schema.schedule import resolve

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Component:
    """Parameters of one part of the model. uses: times a token passes through each copy of it, over all layers."""

    name: str
    parameters: int
    copies: int
    uses: int


@dataclass(frozen=True)
class GroupDescription:
    """Parameters to which the same entries of optimizer.groups apply, and that get the same settings. matched: the entries'
    patterns, none for all the others; parameters: their number."""

    matched: tuple[str, ...]
    tensors: int
    parameters: int
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class MatrixOptimizer:
    """Trained matrices, their parameters, and the linear maps that stand in them. others: names of the trained parameters of two
    dimensions that are none to it, `*` for places, which AdamW takes with all vectors; other_parameters: the number in both."""

    matrices: int
    parameters: int
    maps: int
    others: list[str]
    other_parameters: int


@dataclass(frozen=True)
class Float8Description:
    """Linear layers with train.float8. share: of the products' FLOPs in float8. left_out: (layers, why), equal ones of all layers
    together: `blocks.*.mixer.in_proj, 2560 -> 10448`. refused: why a run on the GPU ends before it begins, if it does."""

    recipe: str
    share: float
    left_out: list[tuple[str, str]]
    refused: str | None


@dataclass(frozen=True)
class Speed:
    """Time of a run at an assumed MFU (LLM Foundry's convention). Rates are per second."""

    gpu: str
    peak_flops: float
    peak_source: str
    mfu: float
    tokens_per_second_per_gpu: float
    seconds_per_step: float
    days: float | None

    def on(self, gpus: int, seconds_per_step: float, run: Description) -> Speed:
        """The speed of a run on so many GPUs whose steps take so long."""
        days = None if run.steps is None else run.steps * seconds_per_step / SECONDS_PER_DAY
        rate = run.tokens_per_step / gpus / seconds_per_step
        return replace(self, tokens_per_second_per_gpu=rate, seconds_per_step=seconds_per_step, days=days)


@dataclass(frozen=True)
class Description:
    """Everything `describe` says. Parameters are counts, FLOPs are per token, memory is in bytes per GPU."""

    name: str
    layers: str
    n_layers: int
    exports_as: str | None
    """The class in transformers that `llmtrain export` writes; None when there is none, for the reasons in not_exported."""
    not_exported: list[str]
    total_parameters: int
    active_parameters: int
    trained_parameters: int
    trained_active_parameters: int
    by_matrix: MatrixOptimizer | None
    """The parameters that an optimizer of matrices takes; None for one that takes all alike."""
    components: list[Component]
    parameter_groups: list[GroupDescription]
    """Empty without optimizer.groups."""
    float8: Float8Description | None
    forward_full: dict[str, float]
    forward_causal: dict[str, float]
    training_foundry: float
    training_causal: float
    world_size: int
    shard_ranks: int
    resolved: tuple[str, ...]
    """What `auto` stands for in sharding, recomputation and the size of a microbatch, with the reason."""
    device: str
    """For which `decided` is: the GPU that was named, or what is here."""
    decided: dict[str, str | int | bool | None]
    """All that the config leaves open, by setting (plan/decisions.py)."""
    microbatch_size: int
    sharding: str
    checkpointing: str
    memory: Memory
    memory_total: int
    host_state: int
    """Bytes of host memory for a rank's optimizer state."""
    gpu_memory: float | None
    fits: list[Fit]
    """Settings with which the run would fit the GPU, where it does not."""
    gathered: float
    """Bytes that a GPU receives per microbatch and forward pass from those that share its sequences."""
    exchanged: float
    """Bytes that a GPU receives per microbatch and forward pass from those that share its layers."""
    tokens_per_step: int
    steps: int | None
    schedule: str | None
    """The learning rate in words; None, as steps, where lengths are in epochs of data that is not on this machine."""
    tokens: int | None
    speed: Speed | None


def describe(
    config: Config,
    world_size: int = 1,
    device: Device | None = None,
    mfu: float = 0.5,
    per_node: int = GPUS_PER_NODE,
) -> Description:
    """Describes a config without allocating its weights.

    device: the GPU whose speed and memory to compare with. mfu: share of its peak that the run is assumed to reach. The
    peak is train.peak_tflops where the config has it, which also stands for a GPU that is not in the table.
    Raises UserError for a world size the batch cannot be split over, an MFU outside 0..1, or a device without a
    peak for train.precision. per_node: GPUs of a node.
    """
    config.grad_accum(world_size)  # refuses a batch that cannot be split
    model = meta_model(config.model, config.adapt)
    seq_len = config.data.seq_len
    training = training_flops_per_token(model, seq_len)
    sizes = parameter_sizes(config)
    gpu_memory = device.memory_gb * 1e9 if device else None
    resolved = resolve_auto(config, sizes, world_size, min(world_size, per_node), gpu_memory)
    given, config = config, resolved.config
    platform = detect() if device is None else named(device.title, round(device.memory_gb * 1e9), device.compute_units)
    kernels = chosen(config.model, platform, config.train.dtype, config.data.mask_documents)
    memory = estimate_memory(config, sizes, world_size)
    too_much = gpu_memory is not None and memory.total > gpu_memory
    per_epoch = steps_per_epoch(config.data, config.train.global_batch_size)
    steps = schedule = None
    with contextlib.suppress(UserError):  # lengths in epochs, of data that is not here
        steps = config.train.duration.steps(
            tokens_per_step=config.tokens_per_step, steps_per_epoch=per_epoch, total_steps=None
        )
        schedule = str(resolve(config, per_epoch))
    tokens = steps * config.tokens_per_step if steps is not None else None
    speed = None
    if device is not None or config.train.peak_tflops is not None:
        speed = _speed(config, device, mfu, training["foundry"], world_size, config.grad_accum(world_size), tokens)
    counts = count_parameters(model)
    exports_as, not_exported = _export(config.model)
    return Description(
        name=config.name,
        layers=config.model.layers,
        n_layers=len(model.blocks),
        exports_as=exports_as,
        not_exported=not_exported,
        total_parameters=counts.total,
        active_parameters=counts.active,
        trained_parameters=counts.trained,
        trained_active_parameters=counts.trained_active,
        by_matrix=matrix_optimizer(model) if config.optimizer.matrix_state_bytes is not None else None,
        components=components(model),
        parameter_groups=parameter_groups(model, config.optimizer) if config.optimizer.groups else [],
        float8=_float8(meta_model(config.model), config.train.float8, device)
        if config.train.float8 is not None
        else None,
        forward_full=_per_token(model.flops(seq_len).forward, seq_len),
        forward_causal=_per_token(model.flops(seq_len, causal=True).forward, seq_len),
        training_foundry=training["foundry"],
        training_causal=training["causal"],
        world_size=world_size,
        shard_ranks=shard_ranks(config, world_size),
        resolved=resolved.reasons if device else (),
        device=platform.device_name,
        decided=decisions(given, config, platform, kernels, counts.total, world_size, min(world_size, per_node)),
        microbatch_size=config.train.least_microbatch,
        sharding=config.train.sharding.strategy,
        checkpointing=config.train.activation_checkpointing.type,
        memory=memory,
        memory_total=memory.total,
        host_state=host_state_bytes(config, sizes, world_size),
        gpu_memory=gpu_memory,
        fits=plans_that_fit(config, sizes, world_size, ADVISED * gpu_memory) if gpu_memory and too_much else [],
        gathered=gathered_bytes(config),
        exchanged=exchanged_bytes(config),
        tokens_per_step=config.tokens_per_step,
        steps=steps,
        schedule=schedule,
        tokens=tokens,
        speed=speed,
    )


def _export(model: ModelConfig) -> tuple[str | None, list[str]]:
    try:
        return family_for_model(model).architecture, []
    except UnsupportedModelError as error:
        return None, list(error.reasons)


def components(model: HybridLM) -> list[Component]:
    """Parameters by part of the model, in the order of the forward pass. They add up to the total."""
    layers = model.config.layer_list()
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[0] == "blocks":
            layer = layers[int(parts[1])]
            owner = layer.shared if parts[2] == "shared_input" else layer.block
            sizes[f"{owner}: {_PARTS[parts[2]]}"] += parameter.numel()
        elif parts[0] == "shared":
            sizes[f"{parts[1]}: shared block"] += parameter.numel()
        else:
            sizes[_PARTS_OUTSIDE[parts[0]]] += parameter.numel()
    block_uses = Counter(layer.block for layer in layers)
    shared_uses = Counter(layer.shared for layer in layers if layer.shared)
    rows = []
    for name, parameters in sizes.items():
        owner, _, part = name.partition(": ")
        if part == "shared block":
            copies, uses = len(model.shared[owner]), shared_uses[owner]  # type: ignore[arg-type]
        else:
            copies = uses = shared_uses[owner] or block_uses[owner] or 1
        rows.append(Component(name, parameters, copies, uses))
    first = [row for row in rows if row.name in ("embedding", "positions")]
    last = [row for row in rows if row.name in ("final norm", "head")]
    return first + [row for row in rows if row not in first and row not in last] + last


def parameter_groups(model: HybridLM, config: OptimizerConfig) -> list[GroupDescription]:
    """Parameters by their settings, what no entry matches first. Raises UserError for entries that fit no parameter."""
    infos = parameter_info(model, config.decay_embeddings)
    settings = parameter_settings(config, infos.values())
    sizes: dict[ParameterSettings, list[int]] = {}
    for parameter, info in infos.items():
        if info.trainable:
            sizes.setdefault(settings[info.name], []).append(parameter.numel())
    return [
        GroupDescription(of.matched, len(found), sum(found), of.lr, of.weight_decay)
        for of, found in sorted(sizes.items(), key=lambda item: bool(item[0].matched))
    ]


def matrix_optimizer(model: HybridLM) -> MatrixOptimizer:
    trained = {parameter: info for parameter, info in parameter_info(model).items() if info.trainable}
    taken = {parameter: len(info.matrix_rows) for parameter, info in trained.items() if info.matrix_rows}
    left = {parameter: info.name for parameter, info in trained.items() if parameter not in taken}
    names = dict.fromkeys(_anywhere(name) for parameter, name in left.items() if parameter.ndim > 1)
    sizes = (sum(parameter.numel() for parameter in some) for some in (taken, left))
    parameters, others = sizes
    return MatrixOptimizer(len(taken), parameters, sum(taken.values()), list(names), others)


def _anywhere(name: str) -> str:
    """A name with `*` for places of layers and copies."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _products_with_uses(model: HybridLM, config: Float8Config) -> Iterator[tuple[str, Float8Product, int]]:
    """Every linear layer, and how often a token passes through it."""
    uses = Counter(id(block) for block in model.shared_uses())
    times = {
        f"shared.{name}.{i}": uses[id(block)]
        for name, blocks in model.shared.items()
        for i, block in enumerate(cast("nn.ModuleList", blocks))
    }
    for name, product in float8_products(model, config).items():
        yield name, product, next((times[shared] for shared in times if name.startswith(f"{shared}.")), 1)


def _float8(model: HybridLM, config: Float8Config, device: Device | None) -> Float8Description:
    """Raises UserError for a pattern of train.float8.exclude that matches nothing."""
    if problems := list(exclude_problems(config, float8_products(model, config))):
        raise UserError("\n".join(f"{problem.path} = {problem.found}: {problem.message}" for problem in problems))
    work, alike = {True: 0, False: 0}, defaultdict[tuple[str, str], list[tuple[str, str | None]]](list)
    for name, product, used in _products_with_uses(model, config):
        work[product.left_out is None] += product.d_in * product.d_out * used
        alike[_anywhere(name), f"{product.d_in} -> {product.d_out}"].append((name, product.left_out))
    left_out = [left for (anywhere, shape), found in alike.items() for left in _left_out(anywhere, shape, found)]
    refused = None
    if device is not None and device.peak("fp8") is None and not config.emulate:
        refused = f"{device.title} has no float8 units"
    return Float8Description(config.recipe, work[True] / sum(work.values()), left_out, refused)


def _left_out(anywhere: str, shape: str, found: Sequence[tuple[str, str | None]]) -> Iterator[tuple[str, str]]:
    """Names with the shape, and reasons, of the layers that are left out. anywhere: the name of all in `found`, with `*` for their
    places; these are pairs of a name and a reason or None."""
    reasons = dict.fromkeys(reason for _, reason in found)
    for reason in reasons:
        if reason is None:
            continue
        names = [name for name, why in found if why == reason]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        label = anywhere if len(reasons) == 1 else ", ".join(names[:3]) + more
        yield f"{label}, {shape}", reason


_NORMS = ("norm", "post_norm", "mlp_norm", "mlp_post_norm")
_PARTS = {"mixer": "mixer", "mlp": "MLP", "shared_input": "per-use adapters"} | dict.fromkeys(_NORMS, "norms")
_PARTS_OUTSIDE = {"embed": "embedding", "positions": "positions", "norm": "final norm", "head": "head"}


def parameter_sizes(config: Config) -> ParameterSizes:
    """Sizes of the groups FSDP2 shards: one per layer, the rest together (see train/parallel.py). Of a model that ranks divide
    (train.parallel.tensor), those of one rank."""
    model, float8 = meta_model(config.model), config.train.float8
    if (tensor := config.train.parallel.tensor) > 1:
        model.split(TensorRanks(0, tensor))
    model = adapted(model, config.adapt)
    infos = parameter_info(model)

    def count(parameters: Iterable[nn.Parameter], **wanted: bool) -> int:
        return sum(p.numel() for p in parameters if all(getattr(infos[p], name) == is_ for name, is_ in wanted.items()))

    total, frozen = count(infos), count(infos, trainable=False)
    layers = [list(block.parameters()) for block in model.blocks]
    head = [] if model.head is None else list(model.head.parameters())
    inside = {parameter for some in (*layers, head) for parameter in some}
    groups = [*layers, head, [parameter for parameter in infos if parameter not in inside]]
    largest_trained = max(count(group, trainable=True) for group in groups)
    weights = inputs = beside = 0
    for name, product, used in _products_with_uses(model, float8) if float8 is not None else ():
        if product.left_out is None:
            weights += product.d_in * product.d_out
            inputs += product.d_in * used
            beside += product.d_in * used if _reads_attention(model, name) else 0
    sizes = [count(layer) for layer in layers]
    return ParameterSizes(
        total,
        root=total - sum(sizes),
        largest_layer=max(sizes),
        matrices=sum(p.numel() for p, info in infos.items() if info.trainable and info.matrix_rows),
        float8=weights,
        float8_inputs=inputs,
        float8_beside=beside,
        head=count(head),
        frozen=frozen,
        largest_trained=largest_trained if frozen else 0,
        frozen_head=not model.head_weight.requires_grad,
    )


def _reads_attention(model: HybridLM, linear: str) -> bool:
    """True for the projection of what attention computes, as it is."""
    owner, _, name = linear.rpartition(".")
    mixer = model.get_submodule(owner)
    return isinstance(mixer, Attention) and name == "wo" and not mixer.block.output_gate


def _per_token(flops: Work, seq_len: int) -> dict[str, float]:
    return {kind.name: getattr(flops, kind.name) / seq_len for kind in fields(flops)}


def _speed(
    config: Config,
    device: Device | None,
    mfu: float,
    flops_per_token: float,
    world_size: int,
    grad_accum: int,
    tokens: int | None,
) -> Speed:
    peak = dense_peak(device, config.train.precision, config.train.peak_tflops)
    if peak.flops is None:
        raise UserError(peak.source)
    rate = tokens_per_second_at(mfu, flops_per_token, peak.flops)
    tokens_per_gpu = grad_accum * config.train.least_microbatch * config.data.seq_len / config.train.parallel.ranks
    return Speed(
        gpu=device.title if device else "one GPU",
        peak_flops=peak.flops,
        peak_source=peak.source,
        mfu=mfu,
        tokens_per_second_per_gpu=rate,
        seconds_per_step=tokens_per_gpu / rate,
        days=tokens / (rate * world_size) / SECONDS_PER_DAY if tokens is not None else None,
    )
