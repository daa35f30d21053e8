"""Autoregressive decoding of token ids with a cache."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llmtrain.errors import UserError
from llmtrain.generate.sampling import Sampler, Sampling
from llmtrain.models.cache import Cache
from llmtrain.models.causal_lm import CausalLM

PREFILL_TOKENS = 32_768
"""About the number of prompt tokens per forward pass in prefill, which bounds the memory of activations."""


def decode(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    options: Sampling = Sampling(),  # noqa: B008 (frozen)
    *,
    max_new_tokens: int,
    stop: Callable[[int, int], bool] = lambda row, token: False,
    row_numbers: Sequence[int] | None = None,
) -> Iterator[list[int | None]]:
    """Yield, per step, the next token of every row; None for rows that have ended.

    stop: (row, token) -> True if the token ends its row; called in order for every token yielded.
    row_numbers: numbers of the rows in the whole request, which seed their draws; default 0, 1, ...
    Raises UserError for an empty prompt, or one too long for the model's learned positions.
    """
    if any(not ids for ids in prompts):
        raise UserError("a prompt has no tokens; give it at least the end-of-document token")
    longest = max(map(len, prompts))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # blocks compiled for training take no cache
        cache = model.empty_cache(len(prompts), longest + max_new_tokens - 1)
        device = cache.next.device
        sampler = Sampler(
            options,
            prompts,
            row_numbers or range(len(prompts)),
            vocab_size=model.config.vocab_size,
            draws=max_new_tokens,
            device=device,
        )
        tokens = sampler(prefill(model, cache, prompts), 0)
    step = DecodeStep(model, cache, max_new_tokens)
    live = set(range(len(prompts)))
    for draw in range(1, max_new_tokens + 1):
        next_tokens = [token if row in live else None for row, token in enumerate(tokens.tolist())]
        live -= {row for row, token in enumerate(next_tokens) if token is not None and stop(row, token)}
        yield next_tokens
        if not live or draw == max_new_tokens:
            return
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            tokens = sampler(step(tokens), draw)


def prefill(model: CausalLM, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Fill the cache from the prompts. Returns the logits after every prompt, [batch, vocab_size]."""
    device = cache.next.device
    longest = max(map(len, prompts))
    padding = [longest - len(ids) for ids in prompts]
    ids = torch.tensor([[0] * pad + list(row) for pad, row in zip(padding, prompts, strict=True)], device=device)
    shift = torch.tensor(padding, device=device) if any(padding) else None
    size = max(PREFILL_TOKENS // longest, 1)
    logits = []
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        rows = cache.rows(part)
        logits.append(model.next_logits(ids[part], rows, None if shift is None else shift[part]))
    cache.advance(longest)
    return torch.cat(logits)


class DecodeStep:
    """Forward pass over one token per row: tokens [batch] -> logits [batch, vocab_size].

    On a GPU the second call captures a CUDA graph and later ones replay it: a token takes hundreds of small kernels,
    whose launches would take longer than their execution.
    """

    def __init__(self, model: CausalLM, cache: Cache, steps: int):
        self.model, self.cache = model, cache
        # Collectives of a sharded model are not captured.
        self.record = model.device.type == "cuda" and not isinstance(model, FSDPModule) and steps > 4
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if not self.record or self.calls == 1:  # the first compiles kernels and initialises libraries
            return self._forward(tokens[:, None])
        if self.graph is None:
            self.ids = tokens[:, None].clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self._forward(self.ids)
        else:
            self.ids.copy_(tokens[:, None])
            self.cache.length += 1
        self.graph.replay()
        return self.logits

    def _forward(self, ids: Tensor) -> Tensor:
        return self.model.next_logits(ids, self.cache)
