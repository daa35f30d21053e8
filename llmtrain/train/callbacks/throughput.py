"""Tokens per second, MFU and HFU."""

import time
from collections import deque
from dataclasses import dataclass

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from llmtrain.flops.count import training_flops_per_token
from llmtrain.flops.mfu import describe_excess
from llmtrain.flops.peaks import Peak, dense_peak, find_device
from llmtrain.logs import run_log
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.training import TrainConfig

_SLOWER, _SETTLED = 1.25, 5
"""Until so many steps count, one that takes so many times the seconds a token of a later one is dropped."""


@dataclass(frozen=True)
class TokenCost:
    """Training FLOP per token under each convention, and the device's dense peak.

    foundry: LLM Foundry's count, attention in full. causal: attention's lower triangle only. hardware: the causal count
    plus recomputed activations; what kernels compute beyond the mathematics is left out here too.
    """

    foundry: float
    causal: float
    hardware: float
    peak: Peak


def token_cost(model: HybridLM, config: TrainConfig, seq_len: int, device: torch.device) -> TokenCost:
    per_token = training_flops_per_token(model, seq_len)
    checkpointing, compiled = config.activation_checkpointing, config.compiles(device.type)
    own = seq_len // config.parallel.of_stage
    at_once = min(checkpointing.mlp_tokens or own, own)
    chunk = (own % at_once or at_once) / own
    # Of the kind budget what the compiler recomputes is not known: the cheap part.
    recomputed = sum(
        block.recomputed(seq_len, checkpointing.type if checkpointing.recomputes(index) else "none", compiled, chunk)
        for index, block in model.layers_with_backward().items()
    )
    return TokenCost(
        foundry=per_token["foundry"],
        causal=per_token["causal"],
        hardware=per_token["causal"] + recomputed / seq_len,
        peak=_peak(config, device),
    )


def _peak(config: TrainConfig, device: torch.device) -> Peak:
    if device.type != "cuda":
        return dense_peak(None, config.precision, config.peak_tflops, "CPUs")
    properties = torch.cuda.get_device_properties(device)
    units = properties.multi_processor_count
    known = find_device(properties.name, units)
    return dense_peak(known, config.precision, config.peak_tflops, f"'{properties.name}' with {units} multiprocessors")


class Throughput(Callback):
    """Measures from the request for a batch to the end of its step, over the last `window` steps.

    Validation and checkpoints are not counted; data loading is. The first step (compilation, allocation) is left out, and those
    after it that take longer than what follows: they compile more, or record CUDA graphs. evaluation_share and save_share are
    parts of the time since the first step, and seconds_left takes both to go on so.
    Says once why there is no MFU, and once that one is above 100 %.
    """

    def __init__(self, cost: TokenCost, window: int = 20, mfu: bool = True):
        """mfu: false where steps compute something else than a pass over data.seq_len tokens of each sequence."""
        self.cost, self.mfu = cost, mfu
        self.steps: deque[tuple[float, int]] = deque(maxlen=window)
        self._start: float | None = None
        self._data_wait = 0.0
        self._tokens = 0
        self._warm = self._settled = False
        self._told = False
        self._first = self._step_end = self._evaluated = 0.0
        self._evaluation = self._saves = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.cost.peak.flops is None and torch.cuda.is_available():
            run_log.info(f"without MFU: {self.cost.peak.source}")

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._start = time.perf_counter()
        if self._warm:
            self._saves += self._start - self._evaluated
        self._tokens = state.timestamp.token.value

    def after_dataloader(self, state: State, logger: Logger) -> None:
        assert self._start is not None
        self._data_wait = time.perf_counter() - self._start

    def batch_end(self, state: State, logger: Logger) -> None:
        assert self._start is not None
        seconds = time.perf_counter() - self._start
        tokens = state.timestamp.token.value - self._tokens
        self._step_end = self._evaluated = time.perf_counter()
        if not self._warm:
            self._warm, self._first = True, self._step_end
            return
        while not self._settled and self.steps and self.steps[0][0] * tokens > _SLOWER * seconds * self.steps[0][1]:
            self.steps.popleft()
        self.steps.append((seconds, tokens))
        self._settled = self._settled or len(self.steps) == _SETTLED
        rate = sum(tokens for _, tokens in self.steps) / sum(seconds for seconds, _ in self.steps)
        per_device = rate / dist.get_world_size()
        metrics = {
            "throughput/step_seconds": seconds,
            "throughput/data_wait_seconds": self._data_wait,
            "throughput/tokens_per_second": rate,
            "throughput/tokens_per_second_per_device": per_device,
        }
        if self.cost.peak.flops and self.mfu:
            at_peak = self.cost.peak.flops / per_device
            metrics["throughput/mfu_foundry"] = self.cost.foundry / at_peak
            metrics["throughput/mfu_causal"] = self.cost.causal / at_peak
            metrics["throughput/hfu"] = self.cost.hardware / at_peak
            self._tell_excess(metrics)
        if torch.cuda.is_available():
            metrics["memory/peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            metrics["memory/allocated_gib"] = torch.cuda.memory_allocated() / 2**30
            metrics["memory/reserved_gib"] = torch.cuda.memory_reserved() / 2**30
        since = self._step_end - self._first
        metrics["throughput/evaluation_share"] = self._evaluation / since
        metrics["throughput/save_share"] = self._saves / since
        if state.max_duration is not None:
            left = (
                (state.max_duration.value - state.timestamp.batch.value)
                * sum(one for one, _ in self.steps)
                / len(self.steps)
            )
            metrics["throughput/seconds_left"] = left / max(1 - (self._evaluation + self._saves) / since, 0.01)
        logger.log_metrics(metrics)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Time of the evaluation that lies between the end of a step and this; between this and the next step is the save."""
        self._evaluated = time.perf_counter()
        if self._warm:
            self._evaluation += self._evaluated - self._step_end

    def _tell_excess(self, metrics: dict[str, float]) -> None:
        """Foundry's squares can exceed 100 % over long sequences where kernels compute half of them; the others cannot."""
        peak, foundry, hfu = self.cost.peak, metrics["throughput/mfu_foundry"], metrics["throughput/hfu"]
        if self._told or not peak.flops or max(foundry, hfu) <= 1:
            return
        self._told = True
        if hfu > 1:
            reason = describe_excess(hfu, peak.flops, peak.source)
            run_log.warning(f"HFU of {reason} (data.mask_documents). Set train.peak_tflops if the peak is another")
        else:
            run_log.warning(
                f"MFU of {foundry:.1%} (foundry) is above 100 %: it counts whole T x T squares of attention, of which half are "
                f"not computed. Read mfu_causal ({metrics['throughput/mfu_causal']:.1%}) instead"
            )
