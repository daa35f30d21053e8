"""Tokens per second, MFU and HFU."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from llmtrain.flops.count import training_flops_per_token
from llmtrain.flops.peaks import peak_flops
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.training import TrainConfig


@dataclass(frozen=True)
class TokenCost:
    """Training FLOP per token under each convention, and the device's dense peak in FLOP/s (None: unknown).

    foundry: LLM Foundry's count, attention in full. causal: attention's lower triangle only. hardware: what is
    executed, the causal count plus recomputed activations.
    """

    foundry: float
    causal: float
    hardware: float
    peak: float | None


def token_cost(model: HybridLM, config: TrainConfig, seq_len: int, device: torch.device) -> TokenCost:
    per_token = training_flops_per_token(model, seq_len)
    forward, spared = model.flops(seq_len, causal=True), model.saved_flops(seq_len, causal=True)
    recomputed = {
        "none": 0.0,
        "full": forward.total - forward.head,
        "every_k": (forward.total - forward.head) / (config.activation_checkpointing.k or 1),
        # Every second matrix product is kept, and the mixers' saved operators.
        "selective": forward.total - forward.head - forward.projection / 2 - spared.total,
    }[config.activation_checkpointing.type]
    return TokenCost(
        foundry=per_token["foundry"],
        causal=per_token["causal"],
        hardware=per_token["causal"] + recomputed / seq_len,
        peak=_peak(config, device),
    )


def _peak(config: TrainConfig, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return peak_flops(properties.name, config.precision, properties.multi_processor_count)


class Throughput(Callback):
    """Measures from the request for a batch to the end of its step, over the last `window` steps.

    Validation and checkpoints are not counted; data loading is. The first step (compilation, allocation) is left out.
    """

    def __init__(self, cost: TokenCost, window: int = 20):
        self.cost = cost
        self.steps: deque[tuple[float, int]] = deque(maxlen=window)
        self._start: float | None = None
        self._tokens = 0
        self._warm = False

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._start = time.perf_counter()
        self._tokens = state.timestamp.token.value

    def batch_end(self, state: State, logger: Logger) -> None:
        assert self._start is not None
        seconds = time.perf_counter() - self._start
        tokens = state.timestamp.token.value - self._tokens
        if not self._warm:
            self._warm = True
            return
        self.steps.append((seconds, tokens))
        rate = sum(tokens for _, tokens in self.steps) / sum(seconds for seconds, _ in self.steps)
        per_device = rate / dist.get_world_size()
        metrics = {
            "throughput/step_seconds": seconds,
            "throughput/tokens_per_second": rate,
            "throughput/tokens_per_second_per_device": per_device,
        }
        if self.cost.peak:
            metrics["throughput/mfu_foundry"] = per_device * self.cost.foundry / self.cost.peak
            metrics["throughput/mfu_causal"] = per_device * self.cost.causal / self.cost.peak
            metrics["throughput/hfu"] = per_device * self.cost.hardware / self.cost.peak
        if torch.cuda.is_available():
            metrics["memory/peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        logger.log_metrics(metrics)
