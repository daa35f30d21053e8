"""`llmtrain describe` and `llmtrain mfu`. Declaring them imports no torch."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.commands.arguments import add_config
from llmtrain.errors import UserError
from llmtrain.flops import mfu as arithmetic
from llmtrain.flops.peaks import Device, device_by_short_name

if TYPE_CHECKING:
    from llmtrain.plan.describe import Description
    from llmtrain.plan.meshes import AtRate
    from llmtrain.plan.scaling import Cluster, Scale
    from llmtrain.schema.config import Config


def add_describe(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "describe",
        help="parameters, FLOPs, memory and expected speed of a config",
        description="Says what a config amounts to, in seconds and without a GPU, however large the model is.",
    )
    add_config(parser)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="GPUs of the run (default 1)")
    parser.add_argument("--gpu", metavar="NAME", help="h200, mi300x, ...: adds expected tokens/s and days")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="with --gpu: predict the run on N nodes, and up to 1,024 GPUs"
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="with --nodes (default 8)")
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="with --nodes: network of each GPU, hdr, ndr, xdr or Gbit/s (default ndr: 400); of several, 25,100,ndr, also the "
        "fastest mesh at each, with and without stages (some minutes for large models)",
    )
    parser.add_argument(
        "--node-link", type=float, metavar="GB/S", help="with --nodes: of each GPU inside a node (default: datasheet)"
    )
    drawn = "with --nodes: draw the curve, or with several rates of --link the fastest meshes (.png, .svg)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=drawn)
    parser.add_argument("--mfu", type=float, metavar="X", help="share of the GPU's peak to expect (default 0.5)")
    parser.add_argument("--json", action="store_true", help="print JSON rather than tables")
    parser.set_defaults(func=run_describe)


def run_describe(args: argparse.Namespace) -> int:
    """Print what a config amounts to. Raises UserError for a bad config, an unknown GPU or an impossible MFU."""
    from llmtrain.plan.scaling import cluster
    from llmtrain.schema.load import load_config

    device, place, places = device_by_short_name(args.gpu) if args.gpu else None, None, []
    if args.nodes is not None:
        if args.nodes < 1:
            raise UserError(f"--nodes {args.nodes}: expected 1 or more")
        if device is None:
            raise UserError("--nodes needs --gpu NAME, the GPU to predict for")
        if args.world_size != 1:
            raise UserError("--world-size has no effect with --nodes: it is nodes x --gpus-per-node; leave it out")
        per_node = 8 if args.gpus_per_node is None else args.gpus_per_node
        places = [cluster(device, per_node, link, args.node_link) for link in (args.link or "ndr").split(",")]
        place = places[0]
        args.world_size = args.nodes * place.per_node
    else:
        for name in ("gpus_per_node", "link", "node_link", "plot"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} is of the prediction for --nodes N")
    if args.plot and args.plot.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--plot {args.plot}: expected the name of a .png or .svg")
    config = load_config(args.file, args.overrides, world_size=args.world_size)
    config = config if place is None else _on_nodes(config, place, args.world_size)
    if args.mfu is not None and args.gpu is None and config.train.peak_tflops is None:
        raise UserError("--mfu has no effect without --gpu or train.peak_tflops, the peak that it is a share of")

    from llmtrain.plan.describe import describe
    from llmtrain.plan.report import print_description, print_links, print_meshes, print_scaling

    per_node = {} if place is None else {"per_node": place.per_node}
    description = describe(config, args.world_size, device, 0.5 if args.mfu is None else args.mfu, **per_node)
    points = _predictions(args, config, place, device, description) if place is not None and device is not None else []
    meshes = _meshes(args, config, place, device, description) if points and place and device else {}
    by_link = _by_link(args, places, device, description) if len(places) > 1 and device else []
    for point in points:
        if (
            point.gpus == args.world_size and description.speed is not None
        ):  # the one time of a step, with communication
            description = replace(description, speed=description.speed.on(point.gpus, point.step_seconds, description))
    if args.json:
        print(
            json.dumps(
                asdict(description)
                | {
                    "scaling": [asdict(point) for point in points],
                    "meshes": {n: asdict(point) for n, point in meshes.items()},
                    "links": [asdict(one) for one in by_link],
                },
                indent=2,
            )
        )
    else:
        print_description(description, config, points)
        if points:
            print_scaling(points)
            print_meshes(meshes)
            print_links(by_link)
    return 0


def _predictions(
    args: argparse.Namespace, config: Config, place: Cluster, device: Device, description: Description
) -> list[Scale]:
    from llmtrain.plan.parameters import parameter_sizes
    from llmtrain.plan.scaling import curve, draw

    assert description.speed is not None
    rate, memory = description.speed.tokens_per_second_per_gpu, device.memory_gb * 1e9
    points = curve(config, parameter_sizes(config), rate, place, memory, args.world_size)
    if args.plot and "," not in (args.link or ""):
        draw(points, args.plot, f"{config.name} on {device.title}")
    return points


def _on_nodes(config: Config, place: Cluster, world_size: int) -> Config:
    """The config with its default of train.sharding.shard_size, a node's GPUs."""
    sharding = config.train.sharding
    if sharding.strategy != "hybrid" or sharding.shard_size is not None:
        return config
    sharding = sharding.model_copy(update={"shard_size": min(place.per_node, world_size)})
    return config.model_copy(update={"train": config.train.model_copy(update={"sharding": sharding})})


def _by_link(args: argparse.Namespace, places: list[Cluster], device: Device, description: Description) -> list[AtRate]:
    """The fastest meshes over each of the networks, with and without stages."""
    from llmtrain.plan.meshes import configs, draw_links, over_links
    from llmtrain.schema.load import load_config

    assert description.speed is not None
    rate, memory = description.speed.tokens_per_second_per_gpu, device.memory_gb * 1e9
    given = configs(lambda more: load_config(args.file, [*args.overrides, *more], world_size=args.world_size))
    some, links = (
        [_on_nodes(one, places[0], args.world_size) for one in given],
        sorted({place.link for place in places}),
    )
    found = over_links(some, rate, places[0], links, memory, args.world_size)
    if args.plot:
        draw_links(found, args.plot, f"{description.name} on {args.world_size:,} x {device.title}")
    return found


def _meshes(
    args: argparse.Namespace, config: Config, place: Cluster, device: Device, description: Description
) -> dict[int, Scale]:
    """Predictions for the run's GPUs with other numbers of stages, where `check` has nothing against them."""
    from llmtrain.plan.parameters import parameter_sizes
    from llmtrain.plan.scaling import predicted
    from llmtrain.schema.load import check_for_world
    from llmtrain.schema.pipeline import pipeline_problems

    assert description.speed is not None
    rate, memory, found = description.speed.tokens_per_second_per_gpu, device.memory_gb * 1e9, {}
    for stages in (1, 2, 4, 8, 16):
        parallel = config.train.parallel.model_copy(update={"pipeline": stages})
        other = config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})
        if any(pipeline_problems(other)) or any(check_for_world(other, args.world_size)):
            continue
        found[stages] = predicted(other, parameter_sizes(other), rate, place, memory, args.world_size)
    return found


def add_mfu(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "mfu",
        help="model FLOPs utilisation from plain figures",
        description="Computes MFU from figures of a log: parameters, batch, step time and GPUs.",
        epilog="example: llmtrain mfu --params 405e9 --batch 16 --seq-len 64 --step-time 30 --gpus 8 --peak 1.3e15",
    )
    need = {"required": True, "type": float}
    parser.add_argument("--params", **need, metavar="N", help="parameters a token passes through, e.g. 7e9")
    parser.add_argument("--batch", **need, metavar="N", help="sequences per optimizer step, over all GPUs")
    parser.add_argument("--seq-len", **need, metavar="N", help="tokens per sequence")
    parser.add_argument("--step-time", **need, metavar="SECONDS", help="time of one optimizer step")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="default 1")
    peak = parser.add_mutually_exclusive_group(required=True)
    peak.add_argument("--peak", type=float, metavar="FLOPS", help="dense peak of one GPU in FLOP/s, e.g. 989.5e12")
    peak.add_argument("--gpu", metavar="NAME", help="h200, mi300x, ...: its peak from the table")
    parser.add_argument("--dtype", metavar="NAME", help="with --gpu: bf16 (default), fp16, fp8, tf32 or fp32")
    parser.add_argument("--frozen", action="store_true", help="weights are frozen (LoRA): no weight gradients")
    parser.add_argument("--layers", type=int, metavar="N", help="with --d-model: adds the attention term")
    parser.add_argument("--d-model", type=int, metavar="N", help="heads * head_dim of attention")
    parser.add_argument(
        "--recompute", type=float, default=0.0, metavar="X", help="share of forward run twice: adds HFU"
    )
    parser.set_defaults(func=run_mfu)


def run_mfu(args: argparse.Namespace) -> int:
    """Print MFU (and HFU). Raises UserError for figures that make no sense."""
    if (args.layers is None) != (args.d_model is None):
        raise UserError("--layers and --d-model go together: they make the attention term")
    for name in ("params", "batch", "seq_len", "step_time", "gpus", "peak", "layers", "d_model"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be positive and finite, not {value:g}")
    peak, source = _peak(args)
    attention = {"n_layers": args.layers or 0, "d_attn": args.d_model or 0, "seq_len": args.seq_len}
    flops = arithmetic.transformer_token_flops(args.params, frozen=args.frozen, **attention)
    hardware = flops.with_recompute(args.recompute)
    rate = args.batch * args.seq_len / args.step_time
    weights = "4 N, weights frozen" if args.frozen else "6 N"
    formula = weights + (" + 12 L d T" if args.layers else "")
    print(f"FLOP per token   {flops.total:.4g}   ({formula}; N = {args.params:.4g})")
    print(f"tokens/s         {rate:,.4g}   ({args.batch:g} x {args.seq_len:g} in {args.step_time:g} s)")
    print(f"peak             {peak * args.gpus:.4g} FLOP/s   ({args.gpus} x {peak:.4g}, {source})")
    print(f"MFU              {_percent(arithmetic.mfu(flops.total, rate, peak, args.gpus))}")
    if args.recompute:
        print(f"HFU              {_percent(arithmetic.mfu(hardware, rate, peak, args.gpus))}")
    most = arithmetic.mfu(max(hardware, flops.total), rate, peak, args.gpus)
    if most > 1:
        print(
            f"{arithmetic.describe_excess(most, peak, source)}. Are --batch and --step-time those of one optimizer step, and "
            f"is --gpus {args.gpus} right?" + (" The attention term counts whole T x T squares." if args.layers else "")
        )
    return 0


def _peak(args: argparse.Namespace) -> tuple[float, str]:
    """FLOP/s of one GPU and where the figure comes from."""
    if args.gpu is None:
        if args.dtype is not None:
            raise UserError("--dtype has no effect with --peak, which is a figure already")
        return args.peak, "as given"
    device, dtype = device_by_short_name(args.gpu), args.dtype or "bf16"
    peak = device.peak(dtype)
    if peak is None:
        raise UserError(f"{device.title} has no peak for '{dtype}'; it has {', '.join(device.tflops)}")
    return peak, f"{dtype}, {device.source}"


def _percent(share: float) -> str:
    """Two significant digits below 1 %, two decimals above."""
    return f"{share * 100:.2g} %" if share < 0.01 else f"{share * 100:.2f} %"
