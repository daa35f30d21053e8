"""Dropout as a function of (seed, step, rank)."""

import hashlib

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist


class StepRNG(Callback):
    """Seeds every random generator at the start of each step.

    Composer does not restore the generators mid-epoch with a StreamingDataset, and their state would tie a
    checkpoint to a vendor and a rank count. Derived anew at every step, it needs no saving: a resumed run
    draws what the uninterrupted one drew, bit for bit on the same number of ranks, and an independent stream otherwise.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def batch_start(self, state: State, logger: Logger) -> None:
        torch.manual_seed(step_seed(self.seed, state.timestamp.batch.value, dist.get_global_rank()))


def step_seed(seed: int, step: int, rank: int) -> int:
    """63 bits that share nothing visible between neighbouring steps and ranks."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
