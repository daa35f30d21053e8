"""Predictions for many GPUs: beside what two were measured to keep, and what must hold of any."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.flops.peaks import device_by_short_name
from llmtrain.models.sections.float8 import Float8Config
from llmtrain.plan.memory import ParameterSizes, exchanged_bytes, gathered_bytes
from llmtrain.plan.parameters import parameter_sizes
from llmtrain.plan.scaling import LOCAL_SHARE, NETWORK_SHARE, Cluster, Scale, cluster, curve, exchanged_seconds
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

YAMLS = Path(__file__).parents[3] / "yamls" / "pretrain"
H200 = cluster(device_by_short_name("h200"), 8, "ndr", None)
ONCE = "{strategy: grad_op, sync_every_microbatch: false}"
SIZES = ParameterSizes(total=1_000_000_000, root=100_000_000, largest_layer=50_000_000)
MPT_1B = ("mpt-1b", 66_150, ("data.seq_len=2048", "train.microbatch_size=16", "train.global_batch_size=128"))
ZAMBA = ("zamba2-2.7b", 19_679, ("data.seq_len=4096", "train.microbatch_size=2", "train.global_batch_size=16"))
MPT_1B_NOW = ("mpt-1b", 66_743, ("data.seq_len=2048", "train.microbatch_size=16", "train.global_batch_size=64"))
ZAMBA_NOW = ("zamba2-2.7b", 21_138, ZAMBA[2])


def config(name: str = "mpt-1b", *overrides: str) -> Config:
    return load_config(YAMLS / f"{name}.yaml", overrides)


def predicted(name: str, rate: float, overrides: tuple[str, ...], sharding: str) -> Scale:
    run = config(name, *overrides, f"train.sharding={sharding}")
    sizes = parameter_sizes(run)
    return next(point for point in curve(run, sizes, rate, H200, 141e9, wanted=2) if point.gpus == 2)


@pytest.mark.parametrize(
    ("model", "sharding", "kept"),
    [
        (MPT_1B, "{strategy: full}", 0.923),
        (MPT_1B, "{strategy: grad_op}", 0.944),
        (MPT_1B, ONCE, 0.971),
        (ZAMBA, "{strategy: full}", 0.898),
        (ZAMBA, ONCE, 0.964),
        (MPT_1B_NOW, ONCE, 0.968),
        (ZAMBA_NOW, ONCE, 0.9364),
    ],
)
def test_two_h200s_without_graphs_keep_about_what_was_measured(
    model: tuple[str, float, tuple[str, ...]], sharding: str, kept: float
):
    """Measured 2026-11-23, and 2026-11-26 where one GPU's graphs have no copies of FSDP2's: medians, against one GPU's."""
    name, rate, overrides = model
    found = predicted(name, rate, (*overrides, "train.cuda_graphs=off"), sharding)
    assert found.kept == pytest.approx(kept, abs=0.02)


@pytest.mark.parametrize(
    ("model", "rate", "overrides", "kept"),
    [("zamba2-2.7b", 20_716, ZAMBA[2], 0.980), ("mpt-1b", 64_019, MPT_1B[2], 0.999)],
)
def test_two_gpus_with_graphs_keep_what_was_measured(model: str, rate: float, overrides: tuple[str, ...], kept: float):
    """Measured 2026-11-26: Zamba2 on H200s, MPT-1B on H100s of 80 GB."""
    assert predicted(model, rate, overrides, ONCE).kept == pytest.approx(kept, abs=0.01)


def test_the_curve_has_whole_nodes_and_what_was_asked_for():
    points = curve(config("mpt-1b", "train.global_batch_size=768"), SIZES, 50_000, H200, 141e9, wanted=24)
    assert [point.gpus for point in points] == [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024]
    of_four = curve(config(), SIZES, 50_000, Cluster(4, 1e12, 1e11), 141e9, wanted=32, most=64)
    assert [point.gpus for point in of_four] == [1, 2, 4, 8, 16, 32, 64]
    of_six = curve(
        config("mpt-1b", "train.global_batch_size=192"), SIZES, 5e4, Cluster(6, 1e12, 1e11), 141e9, 12, most=50
    )
    assert [point.gpus for point in of_six] == [1, 2, 4, 6, 12, 24, 48]
    assert points[0].kept == 1 and points[0].exposed == 0
    assert all(point.kept < 1 for point in points[1:])


def test_each_gpu_has_the_same_work():
    for point in curve(config(), SIZES, 50_000, H200, 141e9, wanted=16):
        assert point.tokens_per_second * point.step_seconds == pytest.approx(point.gpus * 512 / 16 * 2048)


def test_a_slow_network_is_seen_where_computation_no_longer_hides_it():
    full = config("mpt-1b", "train.sharding={strategy: full}", "train.microbatch_size=1", "train.global_batch_size=128")
    exposed = [
        curve(full, SIZES, 50_000, Cluster(8, 450e9, link), 141e9, wanted=128)[-1].exposed for link in (1e12, 1e10, 1e9)
    ]
    assert exposed[0] < exposed[1] < exposed[2]


def test_bytes_within_a_node_and_between_nodes():
    """1e9 parameters, one microbatch a step, full: 2 x 2 + 4 bytes of each; 8 GPUs a node at 1e9 B/s, networks of 1e8 B/s."""
    place = Cluster(8, 1e9 / 0.55, 1e8 / 0.8)
    overrides = ("train.precision=amp_bf16", "train.microbatch_size=1")
    full = config("mpt-1b", *overrides, "train.sharding={strategy: full}", "train.global_batch_size=32")
    assert exchanged_seconds(full, SIZES, place, 8) == pytest.approx((4 * 8 * 7 / 8, 0))  # 4 microbatches
    grad_op = config("mpt-1b", *overrides, "train.sharding={strategy: grad_op}", "train.global_batch_size=32")
    assert exchanged_seconds(grad_op, SIZES, place, 8) == pytest.approx(((2 + 4 * 4) * 7 / 8, 0))  # gathered once
    float8 = grad_op.model_copy(update={"train": grad_op.train.model_copy(update={"float8": Float8Config()})})
    sizes = replace(SIZES, float8=600_000_000)
    assert exchanged_seconds(float8, sizes, place, 8) == pytest.approx(((2 - 0.6 + 4 * 4) * 7 / 8, 0))
    local, network = exchanged_seconds(full, SIZES, place, 32)
    assert local == pytest.approx(8 * 7 / 8) and network == pytest.approx(8 * (3 / 4) / (8 * 0.1))
    hybrid = config(
        "mpt-1b", *overrides, "train.sharding={strategy: hybrid, shard_size: 8}", "train.global_batch_size=32"
    )
    local, network = exchanged_seconds(hybrid, SIZES, place, 32)
    assert local == pytest.approx(8 * 7 / 8) and network == pytest.approx(2 * 4 / 8 * (3 / 4) / 0.1)


@pytest.mark.parametrize(
    ("name", "link", "node_link", "message"),
    [
        ("l4", "ndr", None, "give --node-link in GB/s"),
        ("h200", "fast", None, "one of hdr, ndr, xdr"),
        ("h200", "0", None, "are above 0"),
        ("h200", "ndr", -1.0, "are above 0"),
    ],
)
def test_links_that_are_not_known(name, link, node_link, message):
    with pytest.raises(UserError, match=message):
        cluster(device_by_short_name(name), 8, link, node_link)


def test_ranks_that_share_samples_exchange_within_a_node_or_over_the_network():
    """FSDP2 moves a tensor-parallel rank's part alone; what ranks exchange of activations comes on top, over slower links where a
    node does not hold them all."""
    place = Cluster(8, 1e9 / LOCAL_SHARE, 1e9 / NETWORK_SHARE)

    def seconds(*overrides: str) -> tuple[float, float, Config]:
        shared = ["train.sharding.strategy=full", "train.microbatch_size=4", "train.global_batch_size=64"]
        made = config("llama3-1b", *shared, *overrides)
        return *exchanged_seconds(made, SIZES, place, 16), made

    local, network, tensor = seconds("train.parallel.tensor=2")
    moved = 2 * 2 * 2 + 2 * 4  # of each of 2 microbatches gathered twice in 2 bytes, and summed in 4
    exchanged = 2 * exchanged_bytes(tensor) / 1e9
    assert (local, network) == pytest.approx((moved * 3 / 4 + 2 * exchanged, moved / 2 / 4))
    again, _, _ = seconds("train.parallel.tensor=2", "train.activation_checkpointing.type=full")
    assert again - local == pytest.approx(exchanged)
    local, network, context = seconds("train.parallel.context=16")
    received = 16 * 3 * gathered_bytes(context) / 1e9
    assert (local, network) == pytest.approx((8 * moved * 7 / 8, 8 * moved / 2 / 8 + received))
