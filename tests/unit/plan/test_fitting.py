"""Settings by which a run would fit: each is enough by the estimate, changes what others do not, and is no more than needed."""

from pathlib import Path

import pytest

from llmtrain.flops.peaks import device_by_short_name
from llmtrain.plan.describe import describe
from llmtrain.plan.fitting import plans_that_fit, ranks_that_fit
from llmtrain.plan.memory import ParameterSizes, estimate_memory
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

MPT_1B = Path(__file__).parents[3] / "yamls" / "pretrain" / "mpt-1b.yaml"
SIZES = ParameterSizes(total=1_300_000_000, root=100_000_000, largest_layer=50_000_000)
SETTINGS = ("train.microbatch_size=16", "train.global_batch_size=128")


def config(*overrides: str) -> Config:
    return load_config(MPT_1B, (*SETTINGS, *overrides))


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.loss.type=plain",),
        ("train.sharding.strategy=grad_op", "train.sharding.sync_every_microbatch=false"),
        ("train.activation_checkpointing={type: every_k, k: 3}",),
        ("train.activation_checkpointing={type: every_k, k: 3, offload: true, mlp_tokens: 256}",),
        ("train.sharding={strategy: hybrid, shard_size: 2}",),
    ],
    ids=["defaults", "plain loss", "gathered", "every third layer", "every third in host memory", "hybrid"],
)
def test_the_settings_make_a_config_that_fits(overrides, ranks):
    """Given on the command line they are accepted, and the estimate is what was promised."""
    before = estimate_memory(config(*overrides), SIZES, ranks).total
    for limit in (0.9 * before, 0.6 * before, 0.4 * before):
        for fit in plans_that_fit(config(*overrides), SIZES, ranks, limit):
            after = estimate_memory(config(*overrides, *fit.settings), SIZES, ranks)
            assert after == fit.memory and after.total <= limit


def test_the_largest_microbatch_and_the_least_recomputation_are_named():
    before = estimate_memory(config(), SIZES, 1).total
    found = plans_that_fit(config(), SIZES, 1, 0.9 * before)
    assert {fit.settings[0].partition("=")[0] for fit in found} == {
        "train.microbatch_size",
        "train.activation_checkpointing.type",
        "optimizer.offload",
    }
    assert ("train.microbatch_size=8",) in [fit.settings for fit in found]
    assert ("train.activation_checkpointing.type=selective",) in [fit.settings for fit in found]


def test_two_settings_only_where_one_is_not_enough():
    least = estimate_memory(
        config("train.microbatch_size=1", "train.activation_checkpointing.type=full"), SIZES, 1
    ).total
    found = plans_that_fit(config(), SIZES, 1, least)
    assert found and {len(fit.settings) for fit in found} == {2}


def test_a_microbatch_divides_what_a_rank_reads():
    found = plans_that_fit(config("train.global_batch_size=48", "train.microbatch_size=12"), SIZES, 4, 40e9)
    sizes = [int(s.partition("=")[2]) for fit in found for s in fit.settings if "microbatch" in s]
    assert sizes and all(12 % size == 0 for size in sizes)


def test_where_nothing_is_enough_more_gpus_are_named():
    assert plans_that_fit(config(), SIZES, 1, 10e9) == []
    enough = ranks_that_fit(config(), SIZES, 1, 10e9)
    assert enough is not None
    ranks, settings = enough
    assert estimate_memory(config(*settings), SIZES, ranks).total <= 10e9
    assert plans_that_fit(config(), SIZES, ranks // 2, 10e9) == []
    assert ranks_that_fit(config(), SIZES, 1, 1e9) is None


def test_describe_names_them_only_where_the_gpu_is_too_small():
    small, large = (describe(config(), 1, device_by_short_name(name)) for name in ("a100-40gb", "mi300x"))
    assert small.memory_total > (small.gpu_memory or 0) and small.fits
    assert large.fits == []
