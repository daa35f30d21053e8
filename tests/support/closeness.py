"""How far two ways to compute a number may be apart: by the rounding of its terms."""

import math

import torch

SLACK = 4.0
"""Roundings per term: what a term went through before it was summed (products, exp, log) is rounded too."""


def rounding(magnitude: float, terms: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """Absolute tolerance for a sum of `terms` numbers, in any order.

    magnitude: of the terms' absolute values together; of a mean too, which divides both. The roundings of a sum's partial
    sums are independent of each other, so that they grow with the root of their number.
    """
    return SLACK * torch.finfo(dtype).eps * math.sqrt(terms) * magnitude
