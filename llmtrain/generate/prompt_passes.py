"""Passes over short prompts, each of which a GPU records once: prompts are padded on the left to one of a few shapes.

A pass is hundreds of kernels, whose launches take the host 14 ms (Llama-3.2-1B) to 50 ms (Zamba2-1.2B): longer than a GPU takes
for a prompt of 1,000 tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llmtrain.models.cache import Cache
from llmtrain.models.causal_lm import CausalLM

LENGTHS = (*range(64, 1025, 64), *range(1280, 2049, 256))
COUNTS = (1, 2, 3, 4)
TOKENS = 4096
"""Of the largest pass, padding included. With more, a GPU takes longer than the host, recorded or not."""


class PromptPasses:
    """One pass for each number of prompts and length. They share a cache, which holds what the last one read."""

    def __init__(self, model: CausalLM, longest: int):
        """longest: tokens of a prompt."""
        self.model = model
        self.lengths = sorted({min(one, longest) for one in LENGTHS})
        self.cache = model.empty_cache(COUNTS[-1], self.lengths[-1])
        self.passes: dict[tuple[int, int], PromptPass] = {}
        if model.device.type == "cuda" and not self._recordable():
            return
        pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        shapes = [(count, length) for count in COUNTS for length in self.lengths if count * length <= TOKENS]
        for count, length in sorted(
            shapes, key=lambda shape: -shape[0] * shape[1]
        ):  # the largest takes the pool's memory
            self.passes[count, length] = one = PromptPass(model, self.cache.rows(slice(0, count)), length)
            if pool is not None:
                one.record(pool)

    def _recordable(self) -> bool:
        """False where the host waits for the device within a pass, or ranks gather weights."""
        if isinstance(self.model, FSDPModule):
            return False
        one = PromptPass(self.model, self.cache.rows(slice(0, 1)), self.lengths[0])
        one.forward()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            one.forward()
        except RuntimeError:
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True

    def find(self, count: int, longest: int) -> "PromptPass | None":
        """The pass for so many prompts, the longest of which has so many tokens; None if there is none."""
        length = next((one for one in self.lengths if one >= longest), 0)
        return self.passes.get((count, length))


class PromptPass:
    """Reads prompts of up to `length` tokens into `cache`, as many as it has rows."""

    def __init__(self, model: CausalLM, cache: Cache, length: int):
        self.model, self.cache, self.length = model, cache, length
        count, device = len(cache.first), model.device
        self.ids = torch.zeros(count, length, dtype=torch.int64, device=device)
        self.padding = torch.zeros(count, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits after each prompt, [count, vocab_size], until the next pass."""
        padding = [self.length - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
        self.ids.copy_(ids, non_blocking=True)
        self.padding.copy_(torch.tensor(padding), non_blocking=True)
        if self.graph is None:
            return self.forward()
        self.graph.replay()
        return self.logits

    def record(self, pool: Any) -> None:
        self.forward()  # compiles what this shape needs
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits = self.forward()

    def forward(self) -> Tensor:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            self.cache.clear()
            return self.model.next_logits(self.ids, self.cache, self.padding)
