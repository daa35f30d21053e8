"""Choice of launch parameters of the attention kernels, from the tuning tables."""

from __future__ import annotations

from llmtrain.kernels import tuning
from llmtrain.kernels.attention.triton_launch import Kernel, Launch
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.tuning_table import Row

MIXED = "mixed"
_INTERPRETED = Launch(32, 16, 4, 1)  # small tiles show their edges in small tests


def choose(
    kernel: Kernel,
    head_dim: int,
    dtype: str,
    platform: Platform,
    seq_len: int | None = None,
    variant: str | None = None,
) -> Launch:
    """Launch parameters of the row that serves this shape.

    seq_len: T, or how far back a query sees, where a window is shorter: as many tiles a program goes through.
    variant: `plain`, what is beyond it (alibi, documents, softcap, window), or several of these, joined by `+` in this order;
    or `mixed`: without causality. Several without a row of their own take the rows for `mixed`, whose small tiles leave
    registers for everything. None: rows that name no variant.
    """
    if platform.vendor == "cpu":
        return _INTERPRETED

    def select(variant: str | None) -> Row:
        return tuning.select(f"attention.{kernel}", dtype, {"head_dim": head_dim}, platform, seq_len, variant)

    row = select(variant)
    return (select(MIXED) if variant is not None and "+" in variant and row.variant != variant else row).launch


def pairs_in_flight(platform: Platform, bytes_each: int, at_least: int = 1) -> int:
    """Pairs of sequence and head that should run side by side when each rereads `bytes_each` from the L2 cache."""
    budget = (32 << 20) if platform.vendor == "cpu" else tuning.table(platform).l2_budget
    return max(1, budget // bytes_each) * at_least
