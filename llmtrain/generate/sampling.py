"""Sampling the next token from logits: repetition penalty, temperature, top-k, top-p, in that order (as in transformers)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmtrain.generate.options import Sampling

LEAST_TEMPERATURE = 1e-30
"""The likeliest token is certain long before."""


class Sampler:
    """Sampler for a batch. The draws of a row depend on the seed and its number alone, not on the other rows.

    prompts: token ids of every row; row_numbers: its number in the whole request.
    """

    def __init__(
        self,
        options: Sampling,
        prompts: Sequence[Sequence[int]],
        row_numbers: Sequence[int],
        *,
        vocab_size: int,
        draws: int,
        device: torch.device,
    ):
        self.options = options
        self.seen = None
        if options.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
            for row, ids in enumerate(prompts):
                self.seen[row, torch.tensor(ids, device=device)] = True
        if options.temperature > 0:
            generator = torch.Generator()
            rows = [
                torch.rand(draws, generator=generator.manual_seed(options.seed * 2**20 + number), dtype=torch.float64)
                for number in row_numbers
            ]
            self.uniform = torch.stack(rows, dim=1).to(device)  # [draws, batch]

    def __call__(self, logits: Tensor, draw: int) -> Tensor:
        """Draw token ids [batch] from logits [batch, vocab_size]. draw: number of tokens drawn before."""
        logits = logits.float()
        if self.seen is not None:
            logits = apply_repetition_penalty(logits, self.seen, self.options.repetition_penalty)
        if self.options.temperature == 0:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = sample_inverse_cdf(probabilities(logits, self.options), self.uniform[draw])
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        return tokens


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def probabilities(logits: Tensor, options: Sampling) -> Tensor:
    """Distribution to draw from, [batch, vocab_size] in fp32; zero for tokens outside top-k or top-p."""
    # Infinities, which the least temperatures and penalties make, have no softmax.
    most = torch.finfo(logits.dtype).max
    logits = (logits / max(options.temperature, LEAST_TEMPERATURE)).clamp(-most, most)
    if options.top_k is not None and options.top_k < logits.shape[-1]:
        least = logits.topk(options.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if options.top_p is not None and options.top_p < 1:
        ordered, order = logits.sort(dim=-1)
        # Ascending, so that the likeliest, the last, always stays.
        below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - options.top_p
        below[:, -1] = False
        logits = logits.masked_fill(below.scatter(1, order, below), -torch.inf)
    return logits.softmax(dim=-1)


def sample_inverse_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative probability passes `uniform`. [batch, vocab_size], [batch] -> [batch]."""
    cumulative = probability.double().cumsum(dim=-1)
    target = (uniform * cumulative[:, -1])[:, None]
    # right=True: a token of probability zero is never where the sum passes the target.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=probability.shape[-1] - 1)


class Draws:
    """State of the sampling of one request. Its draws depend on its seed and number alone, and are those of
    a Sampler. draws: the most tokens that it takes."""

    def __init__(self, options: Sampling, prompt: Sequence[int], number: int, *, vocab_size: int, draws: int):
        self.options, self.taken = options, 0
        self.shared = replace(options, seed=0)  # of rows that are drawn together
        self.seen: Tensor | None = None
        if options.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.tensor(prompt)] = True
        if options.temperature > 0:
            generator = torch.Generator().manual_seed(options.seed * 2**20 + number)
            self.uniform = torch.rand(draws, generator=generator, dtype=torch.float64)

    def record(self, token: int) -> None:
        """Count a token as drawn."""
        self.taken += 1
        if self.seen is not None:
            self.seen[token] = True


def sample(logits: Tensor, rows: Sequence[Draws]) -> Tensor:
    """Draw a token for each row of logits [batch, vocab_size] in fp32 by its own settings -> [batch]. `record` counts them as
    drawn."""
    groups: dict[Sampling, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row.shared, []).append(at)
    if len(groups) == 1:
        return _sample(logits, rows)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for places in groups.values():
        index = on_device(places, logits.device)
        tokens[index] = _sample(logits[index], [rows[at] for at in places])
    return tokens


def _sample(logits: Tensor, rows: Sequence[Draws]) -> Tensor:
    """`sample` of rows whose options differ in their seeds alone."""
    options, device = rows[0].options, logits.device
    if options.repetition_penalty != 1:
        seen = torch.stack([row.seen for row in rows if row.seen is not None]).to(device, non_blocking=True)
        logits = apply_repetition_penalty(logits, seen, options.repetition_penalty)
    if options.temperature == 0:
        return logits.argmax(dim=-1)
    uniform = torch.stack([row.uniform[row.taken] for row in rows]).to(device, non_blocking=True)
    return sample_inverse_cdf(probabilities(logits, options), uniform)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A tensor of integers. Unlike torch.tensor(…, device=…), it does not wait for what the device was given before."""
    return torch.tensor(numbers).to(device, non_blocking=True)
