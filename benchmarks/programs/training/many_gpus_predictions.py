"""Predictions of `llmtrain describe` for the runs of `llmtrain bench train`, from their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmtrain.flops.peaks import Device, find_device
from llmtrain.plan.automatic import resolve_auto
from llmtrain.plan.describe import parameter_sizes
from llmtrain.plan.memory import ParameterSizes, estimate_memory
from llmtrain.plan.scaling import cluster, curve
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

Result = dict[str, Any]
"""A line of results.jsonl."""


def predicted(few: Result, run: Result) -> float:
    """Tokens per second and GPU of `run` by `describe --nodes 1`, from the measured speed of the same model on fewer GPUs."""
    device = find_device(run["gpu"])
    if device is None:
        return float("nan")
    alone = few["tokens_per_second_per_gpu"]
    if few["gpus"] > 1:
        alone /= kept(few, alone, device)
    return alone * kept(run, alone, device)


def kept(run: Result, alone: float, device: Device) -> float:
    """Share of one GPU's speed that each keeps, predicted. alone: tokens/s of one GPU."""
    gpus = run["gpus"]
    config, sizes = described(run)
    points = curve(config, sizes, alone, cluster(device, gpus, "ndr", None), device.memory_gb * 1e9, gpus)
    return next(point.kept for point in points if point.gpus == gpus)


def memory(run: Result) -> float | None:
    """GiB of each GPU, estimated; None on a device that is not known."""
    device, gpus = find_device(run["gpu"]), run["gpus"]
    if device is None:
        return None
    config, sizes = described(run)
    config = resolve_auto(config, sizes, gpus, gpus, device.memory_gb * 1e9).config
    return estimate_memory(config, sizes, gpus).total / 2**30


def described(run: Result) -> tuple[Config, ParameterSizes]:
    file = min(Path("yamls").glob(f"*/{run['model']}.yaml"))  # bench/ before pretrain/
    config = load_config(file, run["key"]["settings"], world_size=run["gpus"])
    return config, parameter_sizes(config)
