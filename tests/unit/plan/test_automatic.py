"""Choices for `auto`: the fastest that fits, and none that was not left to it."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.errors import UserError
from llmtrain.plan.automatic import resolve_auto
from llmtrain.plan.candidates import CHOSEN
from llmtrain.plan.memory import ParameterSizes, estimate_memory
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config
from tests.support.policy import policy_config

MPT_1B = Path(__file__).parents[3] / "yamls" / "pretrain" / "mpt-1b.yaml"
SIZES = ParameterSizes(total=1_300_000_000, root=100_000_000, largest_layer=50_000_000)
BATCH = ("train.microbatch_size=16", "train.global_batch_size=128")
CHECKPOINTING = "train.activation_checkpointing.type=auto"


def config(*overrides: str) -> Config:
    return load_config(MPT_1B, (*BATCH, *overrides))


def chosen(*overrides: str, available: float | None = 1e12, ranks: int = 2, per_node: int = 8) -> tuple:
    """(strategy, sync_every_microbatch, checkpointing)"""
    train = resolve_auto(config(*overrides), SIZES, ranks, min(ranks, per_node), available).config.train
    return train.sharding.strategy, train.sharding.sync_every_microbatch, train.activation_checkpointing.type


def memory_of(*overrides: str, ranks: int = 2) -> float:
    """GPU memory in which these settings just fit."""
    return estimate_memory(config(*overrides), SIZES, ranks).total / CHOSEN


GRAD_OP_ONCE = ("train.sharding={strategy: grad_op, sync_every_microbatch: false}",)
GRAD_OP = ("train.sharding={strategy: grad_op}",)
FULL = ("train.sharding={strategy: full}",)
SELECTIVE = ("train.activation_checkpointing.type=selective",)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (GRAD_OP_ONCE, ("grad_op", False, "none")),
        (GRAD_OP, ("grad_op", True, "none")),
        (FULL, ("full", True, "none")),
        ((*GRAD_OP_ONCE, *SELECTIVE), ("grad_op", False, "selective")),
        ((*FULL, *SELECTIVE), ("full", True, "selective")),
    ],
)
def test_the_fastest_that_fits(settings, expected):
    """Where the settings just fit, they are taken; with one byte less, something slower."""
    limit = memory_of(*settings)
    assert chosen(CHECKPOINTING, available=limit * 1.0001) == expected
    assert chosen(CHECKPOINTING, available=limit * 0.9999) != expected


def test_where_nothing_fits_it_is_the_least():
    assert chosen(CHECKPOINTING, available=1e9) == ("full", True, "full")
    resolved = resolve_auto(config(), SIZES, 2, 2, 1e9)
    assert "may be too much" in resolved.reasons[0]


def test_one_gpu_has_nothing_to_shard():
    assert chosen(ranks=1)[:2] == ("full", None)


def test_without_a_gpu_nothing_is_gained_by_memory():
    assert chosen(CHECKPOINTING, available=None) == ("full", None, "none")
    assert resolve_auto(config(), SIZES, 2, 2, None).reasons == ("train.sharding.strategy auto: full (no GPU)",)
    assert resolve_auto(config(), SIZES, 1, 1, None).reasons == ()


def test_several_nodes_exchange_gradients_alone():
    batch = "train.global_batch_size=512"
    assert chosen(batch, ranks=16)[:2] == ("hybrid", False)
    assert resolve_auto(config(batch), SIZES, 16, 8, 1e12).config.train.sharding.shard_size == 8


def test_one_microbatch_a_step_is_one_sync_in_any_case():
    assert chosen("train.global_batch_size=32")[:2] == ("grad_op", True)


@pytest.mark.parametrize("overrides", [FULL, GRAD_OP, GRAD_OP_ONCE])
def test_what_is_named_stays(overrides):
    resolved = resolve_auto(config(*overrides), SIZES, 2, 2, 1e12)
    assert resolved.config == config(*overrides) and resolved.reasons == ()


def test_a_sync_that_is_named_stays():
    assert chosen("train.sharding.sync_every_microbatch=true")[:2] == ("grad_op", True)


def test_the_reason_names_choice_and_memory():
    [line] = resolve_auto(config(), SIZES, 2, 2, 150e9).reasons
    assert line.startswith(
        "train.sharding.strategy auto: grad_op, gradients reduced once a step (the fastest that fits: "
    )
    assert line.endswith("of 139.7 GiB by the estimate)")


def microbatch(*overrides: str, available: float | None = 1e12, ranks: int = 2) -> int:
    config_ = config("train.microbatch_size=auto", "train.global_batch_size=48", *overrides)
    return resolve_auto(config_, SIZES, ranks, ranks, available).config.train.least_microbatch


def test_the_largest_microbatch_that_fits_and_divides_the_batch():
    """24 sequences a rank: 24, 12, 8, 6, ... are possible."""
    named = ("train.global_batch_size=48", *GRAD_OP)
    for size, next_smaller in ((24, 12), (8, 6), (2, 1)):
        limit = memory_of(f"train.microbatch_size={size}", *named)
        assert microbatch(*GRAD_OP, available=limit * 1.0001) == size
        assert microbatch(*GRAD_OP, available=limit * 0.9999) == next_smaller


def test_a_microbatch_of_a_few_tokens_is_not_bought_with_little_communication():
    """Where grad_op leaves room for one sequence, full for several: the products of 2048 tokens would cost more."""
    limit = memory_of("train.microbatch_size=3", "train.global_batch_size=48", *FULL)
    assert microbatch(available=limit * 1.0001) >= 3


def test_float8_takes_microbatches_of_a_multiple_of_16_tokens():
    overrides = ("data.seq_len=20", "train.precision=amp_bf16", "train.float8={}")
    assert microbatch(*overrides) == 24  # 4, 8, 12 and 24 sequences of 20 tokens
    odd = config("train.microbatch_size=auto", "train.global_batch_size=6", *overrides)
    with pytest.raises(UserError, match="multiple of 16 tokens"):
        resolve_auto(odd, SIZES, 2, 2, 1e12)


def test_on_a_cpu_a_microbatch_has_about_4096_tokens():
    assert microbatch(available=None) == 2


def test_weights_are_copied_for_rollouts_where_that_fits(tmp_path: Path):
    def weights_of(available: float | None, **changes: Any) -> str:
        changed = policy_config(tmp_path, tmp_path / "run", {"objective.rollout": {}} | changes)
        resolved = resolve_auto(changed, SIZES, 1, 1, available)
        assert len(resolved.reasons) == 1
        rollout = resolved.config.objective.own_rollout
        assert rollout is not None
        return rollout.weights

    copied = policy_config(tmp_path, tmp_path / "run", {"objective.rollout": {"weights": "copied"}})
    limit = estimate_memory(copied, SIZES, 1).total / CHOSEN
    assert weights_of(limit * 1.0001) == weights_of(None) == "copied"
    assert weights_of(limit * 0.9999) == "gathered"
    assert resolve_auto(copied, SIZES, 1, 1, 1.0).config.objective == copied.objective  # as it is given
    assert weights_of(None, **{"train.float8": {}, "train.precision": "amp_bf16"}) == "gathered"
