"""The facts behind `llmtrain describe`: FLOPs, memory and expected speed, on the meta device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields, replace

from llmtrain.adapt.base import meta_model
from llmtrain.data.shards.checks import steps_per_epoch
from llmtrain.errors import UserError
from llmtrain.flops.count import count_parameters, training_flops_per_token
from llmtrain.flops.mfu import tokens_per_second_at
from llmtrain.flops.peaks import Device, dense_peak
from llmtrain.kernels.platform import detect, named
from llmtrain.models.backends import chosen
from llmtrain.models.config import LayerRange, ModelConfig
from llmtrain.models.costs import Work
from llmtrain.models.hf.family import UnsupportedModelError, family_for_model
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
    routed_bytes,
    shard_ranks,
    stage_memories,
)
from llmtrain.plan.parameters import (
    Component,
    Float8Description,
    GroupDescription,
    MatrixOptimizer,
    components,
    float8_description,
    matrix_optimizer,
    parameter_groups,
    parameter_sizes,
)
from llmtrain.schema.config import Config
from llmtrain.schema.schedule import resolve

SECONDS_PER_DAY = 86_400


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
class StageDescription:
    """Spans of layers, first .. last - 1 each. share: of the FLOPs of training. memory: bytes of a GPU of the stage."""

    spans: tuple[LayerRange, ...]
    share: float
    parameters: int
    memory: int


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
    stages: list[StageDescription]
    """The stages of a pipeline; empty without."""
    host_state: int
    """Bytes of host memory for a rank's optimizer state."""
    gpu_memory: float | None
    fits: list[Fit]
    """Settings with which the run would fit the GPU, where it does not."""
    gathered: float
    """Bytes that a GPU receives per microbatch and forward pass from those that share its sequences."""
    exchanged: float
    """Bytes that a GPU receives per microbatch and forward pass from those that share its layers."""
    routed: float
    """Those from ranks that divide the experts with it."""
    tokens_per_step: int
    steps: int | None
    schedule: str | None
    """The learning rate in words; None, as steps, where lengths are in epochs of data that is not on this machine."""
    tokens: int | None
    speed: Speed | None


def describe(
    config: Config, world_size: int = 1, device: Device | None = None, mfu: float = 0.5, per_node: int = GPUS_PER_NODE
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
    per_epoch = steps_per_epoch(config.data, config.samples_per_step)
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
        float8=float8_description(meta_model(config.model), config.train.float8, device)
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
        stages=_stages(config, sizes, world_size),
        host_state=host_state_bytes(config, sizes, world_size),
        gpu_memory=gpu_memory,
        fits=plans_that_fit(config, sizes, world_size, ADVISED * gpu_memory) if gpu_memory and too_much else [],
        gathered=gathered_bytes(config),
        exchanged=exchanged_bytes(config),
        routed=routed_bytes(config),
        tokens_per_step=config.tokens_per_step,
        steps=steps,
        schedule=schedule,
        tokens=tokens,
        speed=speed,
    )


def _stages(config: Config, sizes: ParameterSizes, world_size: int) -> list[StageDescription]:
    return [
        StageDescription(stage.spans, stage.share, stage.sizes.total, memory.total)
        for stage, memory in zip(sizes.stages, stage_memories(config, sizes, world_size), strict=True)
    ]


def _export(model: ModelConfig) -> tuple[str | None, list[str]]:
    try:
        return family_for_model(model).architecture, []
    except UnsupportedModelError as error:
        return None, list(error.reasons)


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
