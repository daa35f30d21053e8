"""Stages of a pipeline: where their borders lie, what each holds, and how long they wait for each other."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import FORWARD, FULL_BACKWARD

from llmtrain.adapt.base import meta_model
from llmtrain.flops.peaks import device_by_short_name
from llmtrain.plan.describe import describe
from llmtrain.plan.memory import estimate_memory, stage_bytes, stage_memories, under_way
from llmtrain.plan.parameters import parameter_sizes
from llmtrain.plan.scaling import cluster, handed_on_seconds, passes_share, predicted
from llmtrain.plan.stages import divided, stage_spans
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config
from llmtrain.schema.pipeline import rounds

YAMLS = Path(__file__).parents[3] / "yamls" / "pretrain"
H200 = device_by_short_name("h200")
PLACE = cluster(H200, 8, "ndr", None)


def config(name: str, stages: int, *overrides: str) -> Config:
    return load_config(
        YAMLS / f"{name}.yaml", [f"train.parallel.pipeline={stages}", "train.microbatch_size=1", *overrides]
    )


def test_the_largest_of_all_stages_is_as_small_as_it_can_be():
    rng = random.Random(0)
    for _ in range(200):
        costs = [rng.randint(0, 9) for _ in range(rng.randint(1, 8))]
        parts = rng.randint(1, len(costs))
        bounds = divided(costs, parts)
        assert [end for _, end in bounds[:-1]] == [first for first, _ in bounds[1:]]
        assert bounds[0][0] == 0 and bounds[-1][1] == len(costs) and all(first < last for first, last in bounds)
        ways = ((0, *cut, len(costs)) for cut in itertools.combinations(range(1, len(costs)), parts - 1))
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(way)) for way in ways)
        assert max(sum(costs[first:last]) for first, last in bounds) == best


@pytest.mark.parametrize(
    ("stages", "virtual", "microbatches"), [(2, 2, 2), (2, 3, 8), (4, 2, 7), (4, 4, 16), (8, 2, 12)]
)
def test_microbatches_under_way_in_turn_are_those_of_the_schedule_of_torch(
    stages: int, virtual: int, microbatches: int
):
    order = object.__new__(ScheduleInterleaved1F1B)
    order.n_local_stages, order.pp_group_size, order._n_microbatches = virtual, stages, microbatches
    order.microbatches_per_round = microbatches // rounds(stages, microbatches)
    for rank in range(stages):
        kinds = [one.computation_type for one in order._calculate_single_rank_operations(rank) if one is not None]
        held = list(itertools.accumulate((kind == FORWARD) - (kind == FULL_BACKWARD) for kind in kinds))
        assert max(held) == virtual * under_way(rank, stages, virtual, microbatches), rank


def test_a_large_head_takes_layers_from_the_last_stage():
    sizes = parameter_sizes(config("llama3-8b", 4))
    layers = [last - first for stage in sizes.stages for first, last in stage.spans]
    assert sum(layers) == 32 and layers[-1] < min(layers[:-1])
    assert sum(stage.share for stage in sizes.stages) == pytest.approx(1)
    assert max(stage.share for stage in sizes.stages) < 0.28


@pytest.mark.parametrize(("name", "virtual"), [("zamba2-2.7b", 1), ("zamba2-2.7b", 3), ("mpt-7b", 2), ("llama3-8b", 1)])
def test_stages_hold_the_whole_model_and_shared_blocks_several_times(name: str, virtual: int):
    of = config(name, 2, f"train.parallel.virtual_stages={virtual}")
    sizes, model = parameter_sizes(of), meta_model(of.model)
    held = [
        {name for name, _ in meta_model(of.model).stage(*spans).named_parameters()}
        for spans in stage_spans(model, of.data.seq_len, 2, virtual)
    ]
    twice = sum(p.numel() for name, p in model.named_parameters() if all(name in names for names in held))
    assert sum(stage.sizes.total for stage in sizes.stages) == sizes.total + twice
    assert sizes.largest_stage.total == max(stage.sizes.total for stage in sizes.stages)
    assert bool(twice) == (name != "llama3-8b")  # tied heads, and Zamba2's shared blocks


def test_memory_is_that_of_the_stage_that_takes_the_most():
    """Of the first of four stages four microbatches are under way, of the last one; only that has logits."""
    of = config("llama3-8b", 4, "train.sharding.strategy=full", "train.global_batch_size=64")
    memories = stage_memories(of, parameter_sizes(of), 8)
    assert estimate_memory(of, parameter_sizes(of), 8) == max(memories, key=lambda memory: memory.total)
    assert [memory.loss > 0 for memory in memories] == [False, False, False, True]
    kept = [memory.activations for memory in memories]
    layers = [last - first for stage in parameter_sizes(of).stages for first, last in stage.spans]
    of_layer = [one / n / count for one, n, count in zip(kept, layers, (4, 3, 2, 1), strict=True)]
    assert of_layer == pytest.approx([of_layer[0]] * 4, rel=0.1)
    whole = config("llama3-8b", 1, "train.sharding.strategy=full", "train.global_batch_size=64")
    one = estimate_memory(whole, parameter_sizes(whole), 8)
    # Four times the microbatches of a fourth of the layers.
    assert kept[0] == pytest.approx(one.activations, rel=0.1)
    found = describe(of, 8, H200)
    assert [stage.memory for stage in found.stages] == [memory.total for memory in memories]
    assert found.stages[0].spans[0][0] == 0 and found.stages[-1].spans[-1][1] == 32 and found.shard_ranks == 2
    assert describe(whole, 8, H200).stages == []


def test_what_a_stage_hands_on_is_hidden_states_and_embeddings_of_shared_blocks():
    assert stage_bytes(config("mpt-7b", 2)) == 2 * 4096 * 2048
    of = config("zamba2-2.7b", 2)
    assert stage_bytes(of) == 2 * 2 * of.model.d_model * of.data.seq_len


@pytest.mark.parametrize("virtual", [1, 4])
def test_a_bubble_shrinks_with_the_microbatches_and_the_virtual_stages(virtual: int):
    of = config("llama3-8b", 4, "train.global_batch_size=64", f"train.parallel.virtual_stages={virtual}")
    sizes = parameter_sizes(of)
    even = {"forward": (1 / 12 / virtual,) * virtual, "backward": (1 / 6 / virtual,) * virtual}
    sizes = replace(sizes, stages=tuple(replace(stage, **even) for stage in sizes.stages))
    assert passes_share(of, sizes, 4) == pytest.approx(1 + 3 / 64 / virtual)
    assert passes_share(of, sizes, 32) == pytest.approx(1 + 3 / 8 / virtual)


def test_there_is_no_bubble_without_stages():
    of = config("llama3-8b", 1)
    assert passes_share(of, parameter_sizes(of), 8) == 1 and handed_on_seconds(of, PLACE, 8) == 0


def test_the_head_s_gradients_are_in_the_forward_pass_of_the_last_stage_with_a_chunked_loss():
    chunked, plain = (parameter_sizes(config("llama3-8b", 2, f"train.loss.type={kind}")) for kind in ("auto", "plain"))
    for sizes in (chunked, plain):
        assert sum(stage.share for stage in sizes.stages) == pytest.approx(1)
        assert sizes.stages[0].backward[0] == pytest.approx(2 * sizes.stages[0].forward[0])
    assert plain.stages[1].backward[0] == pytest.approx(2 * plain.stages[1].forward[0])
    assert chunked.stages[1].forward[0] > 1.2 * plain.stages[1].forward[0]
    assert chunked.stages[1].share == pytest.approx(plain.stages[1].share)


def test_stages_pay_over_slow_links_alone():
    """A model that takes several nodes: FSDP2 gathers it over the network for each microbatch, a stage within its node."""

    def rates(link: str) -> list[float]:
        batch = ("train.global_batch_size=512", "train.sharding.strategy=full")
        found = []
        for stages in (1, 8):
            of = config("mpt-70b", stages, *batch)
            found.append(predicted(of, parameter_sizes(of), 1200.0, cluster(H200, 8, link, None), 141e9, 64))
        assert found[0].bubble == 0 < found[1].bubble
        return [one.tokens_per_second for one in found]

    slow, fast = rates("50"), rates("20000")
    assert slow[1] > 2 * slow[0] and fast[1] < fast[0]
