"""Step time on many GPUs, predicted from the speed of one and from stated bandwidths. No torch here.

FSDP2 gathers b P bytes of weights twice a microbatch with full or hybrid sharding; once a step with grad_op, or where gradients are
summed once a step (train/callbacks/gradient_sync.py). It sums r P bytes of gradients a microbatch, or once a step. b and r are the
bytes of the computation's and of the sums' format; weights of products in float8 are gathered in one byte. Of all that, (S - 1) / S
passes each GPU's links inside a node; where a sharding group spans n nodes of g GPUs, (n - 1) / n enters each node through its g
network links. Hybrid sharding sums each GPU's P / S gradients over the nodes instead: 2 r P / S bytes, times (n - 1) / n.

Communication inside a node takes multiprocessors and memory from the computation beside it: it costs as if it ran alone, at
LOCAL_SHARE of the stated rate, fitted to what full sharding, grad_op and one sync a step kept beside each other (two H200s over
NVLink, 2026-11-23). That of the network is hidden behind the computation as far as that is long enough; NETWORK_SHARE is an
assumption, and nothing beyond one node has been measured.

GPUs that share sequences or layers (train.parallel) share a microbatch's work evenly, and exchange what plan/memory.py counts,
inside a node where all of them are, beside what FSDP2 moves of each one's part. That costs as if nothing of it were hidden: with
train.parallel.async_tensor less. The stages of a pipeline are followed pass by pass (schedule.py), each as long as its share of the
FLOPs: of N equal ones with n microbatches each waits (N - 1) / n of the time of its work for others, with V virtual stages a V-th
of it; of unequal ones all wait for the longest. Activations and their gradients go over the network where stages are on nodes of
their own.

WITHOUT_GRAPHS stands for what several GPUs lose that launch no CUDA graphs, where one does: time for FSDP2's copies and the host's
launches. It is no constant of nature: beyond the communication, two H200s without graphs lost 1.7 % of the step of MPT-1B and 4.6 %
of Zamba2-2.7B's, of more and smaller kernels. With graphs, which ranks of one node may have (plan/graph_gain.py), two GPUs kept
what the communication leaves, within 1 % (2026-11-26; BENCHMARKS.md, "More GPUs", has every measurement beside its prediction).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.flops.peaks import Device
from llmtrain.pictures import new_figure, save_figure
from llmtrain.plan.automatic import resolve_auto
from llmtrain.plan.graph_gain import takes_graphs
from llmtrain.plan.memory import (
    ParameterSizes,
    estimate_memory,
    exchanged_bytes,
    gathered_bytes,
    routed_bytes,
    shard_ranks,
    stage_bytes,
)
from llmtrain.schema.config import Config
from llmtrain.schema.pipeline import rounds

LOCAL_SHARE = 0.55
NETWORK_SHARE = 0.8
WITHOUT_GRAPHS = 0.025

NODE_LINKS = {
    **dict.fromkeys(("a100", "a100-40gb", "h100-nvl", "h200-nvl"), 300.0),
    **dict.fromkeys(("h100-sxm", "h200", "h20"), 450.0),
    **dict.fromkeys(("b200", "gb200", "b300", "gb300"), 900.0),
    **dict.fromkeys(("mi300x", "mi325x"), 448.0),
    **dict.fromkeys(("mi350x", "mi355x"), 537.6),
}
"""GB/s in one direction between a GPU and the others of its node, by datasheet: NVLink; of AMD seven Infinity Fabric links."""
LINKS = {"hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
"""Gbit/s of one InfiniBand port, one of which each GPU is taken to have."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of so many GPUs. node_link, link: bytes per second in one direction of a GPU's links inside a node, and of its network
    port."""

    per_node: int
    node_link: float
    link: float


@dataclass(frozen=True)
class Scale:
    """A run on so many GPUs with the same work for each. exposed: seconds of a step that communication adds. bubble: seconds of a
    step in which a GPU of a pipeline waits for other stages. kept: tokens/s of a GPU, as a share of one GPU's alone. memory: bytes
    per GPU by the estimate; fits: they are no more than it has."""

    gpus: int
    sharding: str
    step_seconds: float
    exposed: float
    bubble: float
    kept: float
    tokens_per_second: float
    memory: int
    fits: bool


def cluster(device: Device, per_node: int, link: str, node_link: float | None) -> Cluster:
    """link: one of LINKS, or Gbit/s. node_link: GB/s; None: from the table. Raises UserError for what is not known."""
    rate = node_link if node_link is not None else NODE_LINKS.get(device.short)
    if rate is None:
        raise UserError(f"the links inside a node of {device.title} are not in the table; give --node-link in GB/s")
    try:
        gigabits = LINKS[link] if link in LINKS else float(link)
    except ValueError:
        raise UserError(f"--link takes Gbit/s per GPU, or one of {', '.join(LINKS)}, not '{link}'") from None
    if not (0 < gigabits < math.inf and 0 < rate < math.inf and per_node > 0):
        raise UserError("--link, --node-link and --gpus-per-node are above 0, and finite")
    return Cluster(per_node, rate * 1e9, gigabits * 1e9 / 8)


def curve(
    config: Config, sizes: ParameterSizes, rate: float, place: Cluster, memory: float, wanted: int, most: int = 1024
) -> list[Scale]:
    """Predictions for 1, 2, 4, ... GPUs of a node, 1, 2, 4, ... nodes up to `most` GPUs, and `wanted` GPUs, each of which has the
    work that it has on `wanted` of them; of the numbers that the ranks which share samples (train.parallel) divide.

    config: may have `auto`, which is resolved for each number of GPUs. sizes: of a tensor-parallel rank's part. rate: tokens/s of
    one GPU alone, with tokens of sequences that GPUs share counted once. memory: bytes of a GPU.
    """
    per_group = config.grad_accum(wanted) * config.train.least_microbatch
    doubled = [2**i for i in range(most.bit_length())]
    counts = {count for count in doubled if count <= place.per_node} | {place.per_node * count for count in doubled}
    counts = {count for count in counts if count <= most and count % config.train.parallel.unit == 0} | {wanted}
    return [_scale(config, sizes, rate, place, memory, gpus, per_group) for gpus in sorted(counts)]


def predicted(config: Config, sizes: ParameterSizes, rate: float, place: Cluster, memory: float, gpus: int) -> Scale:
    """The prediction for so many GPUs alone, as curve's."""
    per_group = config.grad_accum(gpus) * config.train.least_microbatch
    return _scale(config, sizes, rate, place, memory, gpus, per_group)


def _scale(
    config: Config, sizes: ParameterSizes, rate: float, place: Cluster, memory: float, gpus: int, per_group: int
) -> Scale:
    tokens = per_group * config.data.seq_len / config.train.parallel.ranks  # of one GPU
    train = config.train.model_copy(update={"global_batch_size": per_group * gpus // config.train.parallel.ranks})
    config = resolve_auto(
        config.model_copy(update={"train": train}), sizes, gpus, min(gpus, place.per_node), memory
    ).config
    compute = tokens / rate
    local, network = exchanged_seconds(config, sizes, place, gpus)
    bubble = (passes_share(config, sizes, gpus) - 1) * compute
    sent = (
        passes_share(config, sizes, gpus, handed_on_seconds(config, place, gpus) / compute) * compute - compute - bubble
    )
    exposed = local + max(network - compute, 0.0) + sent
    graphs = gpus == 1 or (gpus <= place.per_node and takes_graphs(config, sizes.total, gpus, one_node=True))
    step = compute * (1 if graphs else 1 + WITHOUT_GRAPHS) + bubble + exposed
    needed = estimate_memory(config, sizes, gpus).total
    return Scale(
        gpus=gpus,
        sharding=config.train.sharding.strategy,
        step_seconds=step,
        exposed=exposed,
        bubble=bubble,
        kept=compute / step,
        tokens_per_second=gpus * tokens / step,
        memory=needed,
        fits=needed <= memory,
    )


def passes_share(config: Config, sizes: ParameterSizes, gpus: int, handed_on: float = 0.0) -> float:
    """Time of a step's passes through all stages, as a share of an average stage's work. handed_on: that of sending what one stage
    hands on to the next of a microbatch, likewise."""
    if not sizes.stages:
        return 1.0
    microbatches, virtual = config.grad_accum(gpus), config.train.parallel.virtual_stages
    scale = len(sizes.stages) / microbatches
    forward, backward = (
        [scale * getattr(stage, name)[part] for part in range(virtual) for stage in sizes.stages]
        for name in ("forward", "backward")
    )
    return pass_seconds(forward, backward, virtual, microbatches, handed_on)


def handed_on_seconds(config: Config, place: Cluster, gpus: int) -> float:
    """Seconds in which a stage sends what the next one reads of a microbatch, or gets its gradient."""
    inside = gpus <= place.per_node
    rate = LOCAL_SHARE * place.node_link if inside else NETWORK_SHARE * place.link
    return stage_bytes(config) / rate if config.train.parallel.pipeline > 1 else 0.0


def exchanged_seconds(config: Config, sizes: ParameterSizes, place: Cluster, gpus: int) -> tuple[float, float]:
    """Seconds of a step in which a GPU's links inside its node are busy, and its network port. config: without `auto`."""
    train, sizes = config.train, sizes.largest_stage
    microbatches = config.grad_accum(gpus)
    once = train.sharding.sync_every_microbatch is False
    total = sizes.total - sizes.elsewhere
    weights = train.width * total
    if train.float8 is not None and train.float8.gathers:
        weights -= (weights // total - 1) * sizes.float8
    summed = 2 if train.sharding.reduce_dtype == "bf16" else 4
    gathers = 1 if once or train.sharding.strategy == "grad_op" else 2 * microbatches
    sums = 1 if once else microbatches
    holders, of_stage = shard_ranks(config, gpus), gpus // train.parallel.pipeline
    group = holders // train.parallel.tensor
    moved = weights * gathers + summed * total * sums
    inside = max(min(group, place.per_node // train.parallel.tensor), 1)
    local = moved * (inside - 1) / inside / (LOCAL_SHARE * place.node_link)
    network = NETWORK_SHARE * place.link
    spanned = -(-group // inside)
    seconds = moved * (spanned - 1) / spanned / (inside * network)
    if (replicas := of_stage // holders) > 1:
        seconds += 2 * summed * sums * sizes.total / group * (replicas - 1) / replicas / network
    shared = _shared_bytes(config) * microbatches
    if train.parallel.unit // train.parallel.pipeline <= place.per_node:
        return local + shared / (LOCAL_SHARE * place.node_link), seconds
    return local, seconds + shared / network


def _shared_bytes(config: Config) -> float:
    """Bytes that a GPU receives of one microbatch from those that share its sequences, layers and experts. What the forward pass
    exchanges is exchanged once more for gradients, keys and values also gathered again, and all once more where layers are
    recomputed."""
    layers = len(config.model.layer_list())
    again = sum(map(config.train.activation_checkpointing.recomputes, range(layers))) / layers
    return (3 + again) * gathered_bytes(config) + (2 + again) * (exchanged_bytes(config) + routed_bytes(config))


def draw(points: Sequence[Scale], path: Path, title: str) -> None:
    """The share of one GPU's speed that each GPU keeps, over the number of GPUs, as a PNG or SVG.

    Raises OutputError where it cannot be written.
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    axes.semilogx([point.gpus for point in points], [100 * point.kept for point in points], "o-", base=2)
    axes.set_xticks([point.gpus for point in points], [str(point.gpus) for point in points], minor=False)
    axes.set_ylim(0, 105)
    axes.set_xlabel("GPUs, each with the same work")
    axes.set_ylabel("% of one GPU's tokens/s kept")
    axes.set_title(f"{title}: predicted")
    axes.grid(alpha=0.3)
    save_figure(figure, path, make_folder=True)


_COUNTED = 8
"""Microbatches per stage from which on each further one is taken to last as long as those before."""


def pass_seconds(
    forward: Sequence[float], backward: Sequence[float], virtual: int, microbatches: int, handed_on: float = 0.0
) -> float:
    """Seconds from the first forward pass of a step to the end of its last backward pass.

    forward, backward: seconds of one microbatch in each part of the model, in order, of which a stage has `virtual`. handed_on:
    seconds that a tensor takes to another stage, in which 1F1B computes nothing.
    """
    stages = len(forward) // virtual
    assert len(forward) == len(backward) == stages * virtual
    most = max(_COUNTED * stages, stages + 1)
    if microbatches > most and (virtual == 1 or microbatches % stages == 0):  # of whole rounds
        times = [pass_seconds(forward, backward, virtual, n, handed_on) for n in (most // 2, most)]
        return times[1] + (microbatches - most) * (times[1] - times[0]) / (most - most // 2)
    orders = [order(stage, stages, virtual, microbatches) for stage in range(stages)]
    done: dict[tuple[bool, int, int], float] = {}
    clocks, places = [0.0] * stages, [0] * stages
    while any(place < len(of) for place, of in zip(places, orders, strict=True)):
        before = sum(places)
        for stage, of in enumerate(orders):
            while places[stage] < len(of):
                is_forward, part, number = of[places[stage]]
                source = part - 1 if is_forward else part + 1
                begin = clocks[stage]
                if 0 <= source < len(forward):
                    if (ready := done.get((is_forward, source, number))) is None:
                        break
                    sent = handed_on if stages > 1 else 0.0
                    begin = max(begin, ready) + sent if virtual == 1 else max(begin, ready + sent)
                clocks[stage] = begin + (forward if is_forward else backward)[part]
                done[of[places[stage]]] = clocks[stage]
                places[stage] += 1
        assert sum(places) > before, "each stage waits for another"
    return max(clocks)


def order(stage: int, stages: int, virtual: int, microbatches: int) -> list[tuple[bool, int, int]]:
    """Passes of a stage in turn: (forward, part of the model, microbatch)."""
    of_round = microbatches // rounds(stages, microbatches)
    total, later = virtual * microbatches, stages - 1 - stage
    first = min(later if virtual == 1 else (virtual - 1) * of_round + 2 * later, total)

    def at(step: int, is_forward: bool) -> tuple[bool, int, int]:
        span = step // of_round % virtual
        part = (span if is_forward else virtual - 1 - span) * stages + stage
        return is_forward, part, step // (of_round * virtual) * of_round + step % of_round

    if virtual == 1:
        of_round = 1
    passes = [at(step, True) for step in range(first)]
    for step in range(total - first):
        passes += [at(first + step, True), at(step, False)]
    return passes + [at(step, False) for step in range(total - first, total)]
