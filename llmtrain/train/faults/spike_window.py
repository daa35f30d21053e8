"""Losses and gradient norms of the last steps, and whether another step's are a spike (OLMo-core's SkipStepOptimizer)."""

from collections import deque
from typing import Any

import torch

from llmtrain.schema.training import SpikeConfig


class SpikeWindow:
    """The last `window` finite steps, skipped ones among them, so that a new level is taken for one after a few steps.

    Equal on all ranks if they are told the same numbers. It is part of a checkpoint (save_load.Part): a resumed run skips what
    the uninterrupted one does. skipped: steps that were spikes, since the run began.
    """

    def __init__(self, config: SpikeConfig):
        self.config = config
        self.skipped = 0
        self.seen = {name: deque[float](maxlen=config.window) for name in ("loss", "gradient norm")}

    def add(self, loss: float, norm: float) -> str | None:
        """Take up a step. Returns the reason if it is a spike, against the steps before it; None if it is not."""
        reasons = [
            reason
            for (name, seen), value in zip(self.seen.items(), (loss, norm), strict=True)
            if (reason := self._reason(name, seen, value))
        ]
        for seen, value in zip(self.seen.values(), (loss, norm), strict=True):
            seen.append(value)
        self.skipped += bool(reasons)
        return " and ".join(reasons) or None

    def _reason(self, name: str, seen: deque[float], value: float) -> str | None:
        if len(seen) < max(self.config.window // 2, 2):
            return None
        deviation, mean = (float(x) for x in torch.std_mean(torch.tensor(list(seen), dtype=torch.float64)))
        if value <= mean + self.config.deviations * deviation:
            return None
        above = (value - mean) / deviation if deviation else float("inf")
        return (
            f"the {name} {value:.4g} is {above:.1f} standard deviations above the mean {mean:.4g} of {len(seen)} steps"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "spike.losses": list(self.seen["loss"]),
            "spike.norms": list(self.seen["gradient norm"]),
            "spike.skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for seen, name in zip(self.seen.values(), ("spike.losses", "spike.norms"), strict=True):
            seen.clear()
            seen.extend(state[name])
        self.skipped = state["spike.skipped"]
