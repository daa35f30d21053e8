"""Whether several GPUs gain by CUDA graphs, by rough figures, and whether a run is expected to make them."""

import pytest

from llmtrain.plan.graph_gain import gained, takes_graphs
from llmtrain.schema.load import load_config

ONCE = "train.sharding={strategy: grad_op, sync_every_microbatch: false}"


@pytest.mark.parametrize(
    ("parameters", "layers", "microbatches", "tokens", "ranks", "one_node", "gains"),
    [
        (130_000_000, 24, 8, 8_192, 2, True, True),  # a small model, whose GPUs wait for the host
        (130_000_000, 24, 8, 8_192, 64, False, True),
        (130_000_000, 24, 1, 8_192, 64, False, True),
        (1_300_000_000, 24, 1, 2_048, 16, False, False),  # 8 GB over the network for one short microbatch
        (2_700_000_000, 54, 4, 8_192, 2, True, True),
        (8_000_000_000, 32, 1, 8_192, 8, True, False),  # all that travels, beside one microbatch
    ],
)
def test_graphs_gain_more_than_they_lose(parameters, layers, microbatches, tokens, ranks, one_node, gains):
    assert (gained(parameters, layers, microbatches, tokens, ranks, one_node) > 0) == gains


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([ONCE], True),
        ([ONCE, "train.cuda_graphs=off"], False),
        (["train.sharding={strategy: full}"], False),
        ([ONCE, "train.sharding.reduce_dtype=bf16"], False),
        ([ONCE, "train.float8={}"], False),  # gathers weights in float8
        ([ONCE, "model.dropout=0.1", "train.activation_checkpointing.type=full"], False),
    ],
)
def test_a_run_takes_graphs_where_nothing_rules_out_them(settings, expected):
    batch = ["train.microbatch_size=2", "train.global_batch_size=16"]
    assert takes_graphs(load_config("zamba2-2.7b", [*settings, *batch]), 2_700_000_000, 2, one_node=True) == expected


def test_named_graphs_are_taken_where_they_lose():
    asked = ["train.microbatch_size=1", "train.global_batch_size=8", ONCE]
    auto, on = (load_config("llama3-8b", [*asked, f"train.cuda_graphs={setting}"]) for setting in ("auto", "on"))
    assert not takes_graphs(auto, 8_000_000_000, 8, one_node=True)
    assert takes_graphs(on, 8_000_000_000, 8, one_node=True)
