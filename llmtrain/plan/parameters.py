"""Parameters by part of the model, by the optimizer's settings and by format, for `llmtrain describe`; sizes for memory.py."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from llmtrain.adapt.base import adapted, meta_model
from llmtrain.adapt.nf4 import frozen_linears
from llmtrain.errors import UserError, first_few
from llmtrain.flops.peaks import Device
from llmtrain.models.cache import Cache
from llmtrain.models.float8_products import Float8Product, exclude_problems, float8_experts, float8_products
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import parts_of
from llmtrain.models.mixers.attention import Attention
from llmtrain.models.parameters import parameter_info
from llmtrain.models.sections.float8 import Float8Config
from llmtrain.models.tensor_parallel import TensorRanks
from llmtrain.plan.memory import ParameterSizes, StageSizes
from llmtrain.plan.stages import layer_costs, stage_spans
from llmtrain.schema.config import Config
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.parameter_groups import ParameterSettings, parameter_settings

_NORMS = ("norm", "post_norm", "mlp_norm", "mlp_post_norm")
_PARTS = {"mixer": "mixer", "mlp": "MLP", "shared_input": "per-use adapters"} | dict.fromkeys(_NORMS, "norms")
_PARTS |= dict.fromkeys(("mixer_scaling", "mlp_scaling"), "residual scaling")
_PARTS_OUTSIDE = {"embed": "embedding", "positions": "positions", "norm": "final norm", "head": "head"}
_PARTS_OUTSIDE |= {"embed_scaling": "embedding"}


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
    """Linear layers and experts with train.float8. share: of the products' FLOPs in float8. left_out: (layers, why), equal ones of
    all layers together: `blocks.*.mixer.in_proj, 2560 -> 10448`. refused: why a run on the GPU ends before it begins, or None."""

    recipe: str
    share: float
    left_out: list[tuple[str, str]]
    refused: str | None
    experts: bool = False
    """There are experts, in float8 or not."""


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


def float8_description(model: HybridLM, config: Float8Config, device: Device | None) -> Float8Description:
    """Raises UserError for a pattern of train.float8.exclude that matches nothing."""
    experts = float8_experts(model, config)
    if problems := list(exclude_problems(config, {**float8_products(model, config), **experts})):
        raise UserError("\n".join(f"{problem.path} = {problem.found}: {problem.message}" for problem in problems))
    work, alike = [0.0, 0.0], defaultdict[tuple[str, str], list[tuple[str, str | None]]](list)
    for name, product, used in _products_with_uses(model, config):
        work[product.left_out is None] += product.d_in * product.d_out * used
        alike[_anywhere(name), f"{product.d_in} -> {product.d_out}"].append((name, product.left_out))
    for name, found in experts.items():
        spec, share = found.spec, 0 if found.left_out else 2 / 3  # gradients of weights stay in bf16
        for at, part in enumerate((1 - share, share)):
            work[at] += spec.top_k * found.matrix * part
        widths = f"{spec.d_model} -> {spec.d_in}, {spec.d_ff} -> {spec.d_model}"
        alike[_anywhere(name), f"{spec.n_experts} x ({widths})"].append((name, found.left_out))
    left_out = [left for (anywhere, shape), found in alike.items() for left in _left_out(anywhere, shape, found)]
    refused = None
    if device is not None and device.peak("fp8") is None and not config.emulate:
        refused = f"{device.title} has no float8 units"
    return Float8Description(config.recipe, work[True] / sum(work), left_out, refused, bool(experts))


def _left_out(anywhere: str, shape: str, found: Sequence[tuple[str, str | None]]) -> Iterator[tuple[str, str]]:
    """Names with the shape, and reasons, of the layers that are left out. anywhere: the name of all in `found`, with `*` for their
    places; these are pairs of a name and a reason or None."""
    reasons = dict.fromkeys(reason for _, reason in found)
    for reason in reasons:
        if reason is None:
            continue
        names = [name for name, why in found if why == reason]
        label = anywhere if len(reasons) == 1 else first_few(names)
        yield f"{label}, {shape}", reason


def parameter_sizes(config: Config) -> ParameterSizes:
    """Sizes of the groups FSDP2 shards: one per layer, the rest together (see train/parallel.py). Of a model that ranks divide
    (train.parallel.tensor), those of one rank."""
    model, parallel, seq_len = meta_model(config.model), config.train.parallel, config.data.seq_len
    spans_of = stage_spans(model, seq_len, parallel.pipeline, parallel.virtual_stages)
    costs = layer_costs(model, seq_len, chunked_loss=config.train.loss.type != "plain")
    if parallel.tensor > 1:
        model.split(TensorRanks(0, parallel.tensor))
    model = adapted(model, config.adapt)
    whole = replace(_sizes(model, config), rollout_row=_rollout_row(config))
    if len(spans_of) == 1:
        return whole
    total = sum(map(sum, costs))
    stages = [
        StageSizes(
            tuple(spans),
            forward=tuple(sum(cost[0] for cost in costs[first:last]) / total for first, last in spans),
            backward=tuple(sum(cost[1] for cost in costs[first:last]) / total for first, last in spans),
            sizes=_sizes(model.stage(*spans), config),
        )
        for spans in spans_of
    ]
    return replace(whole, stages=tuple(stages))


def _rollout_row(config: Config) -> int:
    """Bytes of a row of the cache in which a policy draws its own answers (generate/slots.py)."""
    if config.objective.own_rollout is None:
        return 0
    seq_len = config.data.seq_len
    model = meta_model(config.model, dtype=getattr(torch, config.train.dtype))
    return Cache(model, 1, seq_len + max(64, seq_len // 4), longest=seq_len).nbytes


def _sizes(model: HybridLM, config: Config) -> ParameterSizes:
    float8, infos = config.train.float8, parameter_info(model)

    def count(parameters: Iterable[nn.Parameter], **wanted: bool) -> int:
        return sum(p.numel() for p in parameters if all(getattr(infos[p], name) == is_ for name, is_ in wanted.items()))

    total, frozen = count(infos), count(infos, trainable=False)
    in_4_bits = frozen_linears(model) if config.adapt is not None and config.adapt.base == "nf4" else []
    narrow = sum(linear.weight.numel() for linear in in_4_bits)
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
    found = [] if float8 is None else [one for one in float8_experts(model, float8).values() if one.left_out is None]
    sizes, expert = [count(layer) for layer in layers], config.train.parallel.expert
    copies = [one.spec.n_experts // expert * one.spec.d_model * max(one.spec.d_in, one.spec.d_ff) for one in found]
    divided = [[module for _, part in parts_of(block) for module in part.split_modules()] for block in model.blocks]
    apart = [count(parameter for module in some for parameter in module.parameters()) for some in divided]
    return ParameterSizes(
        total,
        root=total - sum(sizes),
        largest_layer=max(size - of - -of // expert for size, of in zip(sizes, apart, strict=True)),
        elsewhere=sum(apart) - sum(apart) // expert,
        matrices=sum(p.numel() for p, info in infos.items() if info.trainable and info.matrix_rows),
        float8=weights,
        float8_copy=max(copies, default=0),
        float8_inputs=inputs,
        float8_beside=beside,
        head=count(head),
        frozen=frozen,
        largest_trained=largest_trained if frozen else 0,
        narrow=narrow,
        frozen_head=model.ends and not model.head_weight.requires_grad,
        below=min(model.layers_with_backward(), default=len(layers)) if model.is_whole else 0,
    )


def _reads_attention(model: HybridLM, linear: str) -> bool:
    """True for the projection of what attention computes, as it is."""
    owner, _, name = linear.rpartition(".")
    mixer = model.get_submodule(owner)
    return isinstance(mixer, Attention) and name == "wo" and not mixer.block.output_gate
