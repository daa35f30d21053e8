"""Sampling the next token from logits: repetition penalty, temperature, top-k, top-p, in that order (as in transformers)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmtrain.generate.options import Sampling


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
    logits = logits / options.temperature
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
