"""Ranks that hold stages of a model (train.parallel.pipeline) compute what one rank does."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from llmtrain.checkpoint import partial_load
from llmtrain.distributed.world import gloo_group
from llmtrain.objectives.next_token import NextToken
from llmtrain.schema.config import Config
from llmtrain.train.pipeline.schedule import PipelineStep
from llmtrain.train.step import GradientSync
from tests.distributed.test_context_parallel import (
    ATTENTION,
    MAMBA,
    MODELS,
    SHARED,
    SHORT,
    SLOW,
    assert_exact,
    assert_same_run,
)
from tests.support import sharded
from tests.support.runs import Run, read_tensors, train
from tests.support.shared_sequences import Case, random_case
from tests.support.tiny import BLOCKS, tiny_config

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "0"))
"""Of the slow random cases: another gives others."""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
def test_every_kind_of_layer_has_the_loss_and_gradients_of_one_rank(ranks, size):
    """Documents; tied embeddings, shared blocks that two stages use, and as many microbatches as stages or more."""
    mesh = {"parallel": {"pipeline": 2}, "sharding": {"strategy": "full"}}
    cases = [Case(model, 29, 2 + i % 2, 0.1, mesh) for i, model in enumerate(MODELS.values())]
    assert_exact(ranks, size, cases)


IN_TURN = {"parallel": {"pipeline": 2, "virtual_stages": 2}}
NAMED: dict[str, tuple[str, int, int, float | str | None, dict[str, Any], dict[str, Any]]] = {
    "one layer per stage, tied": ("a*4", 29, 4, None, {"parallel": {"pipeline": 4}}, {"tie_embeddings": True}),
    "unequal layers": ("m a m m a m a", 29, 2, 0.1, {"parallel": {"pipeline": 2, "virtual_stages": 3}}, {}),
    "one shared block, on the last part alone": ("m m m s+m", 21, 2, None, IN_TURN, {}),
    "one shared block, on the first part alone": ("s+m m m m", 21, 4, 0.1, IN_TURN, {}),
    "one shared block, on every part": ("(s+m)*4", 21, 4, 0.1, IN_TURN, {"tie_embeddings": False}),
    "scaled embeddings": ("a s+m a m", 21, 2, None, IN_TURN, {"embedding_multiplier": 3.0, "logit_multiplier": 0.5}),
    "borders everywhere": ("a m a m", 23, 2, "everywhere", {"parallel": IN_TURN["parallel"] | {"context": 2}}, {}),
    "an odd length": ("a m a m", 17, 2, 0.3, {"parallel": IN_TURN["parallel"] | {"tensor": 2}}, {}),
    "seven microbatches": ("a*8", 17, 7, None, {"parallel": {"pipeline": 4, "virtual_stages": 2}}, {}),
    "replicas": ("a m a m", 17, 4, 0.3, IN_TURN | {"sharding": {"strategy": "hybrid", "shard_size": 1}}, {}),
    "sums every microbatch": ("a m a m", 17, 4, 0.3, IN_TURN | {"sharding": {"sync_every_microbatch": True}}, {}),
    "sums once": ("a m a m", 17, 6, 0.3, IN_TURN | {"sharding": {"sync_every_microbatch": False}}, {}),
    "recomputed, grad_op": (
        *("a s+m a m", 17, 4, 0.3),
        *(IN_TURN | {"sharding": {"strategy": "grad_op"}, "activation_checkpointing": {"type": "full"}}, {}),
    ),
    "two tokens, learned positions": ("a s+m a m", 2, 2, None, IN_TURN, {"positions": "learned"}),
}


@pytest.mark.ci
def test_named_cases_have_the_loss_and_gradients_of_one_rank(ranks):
    blocks = {"a": ATTENTION | {"position": {"type": "rotary"}}, "m": MAMBA, "s": SHARED | {"n_shared": 1}}
    cases = []
    for layers, seq_len, samples, borders, train_settings, more in NAMED.values():
        model = {"blocks": {name: one for name, one in blocks.items() if name in layers}, "layers": layers} | more
        cases.append(Case(model, seq_len, samples, borders, {"sharding": {"strategy": "full"}} | train_settings))
    assert_exact(ranks, 4, cases)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 20), marks=pytest.mark.ci)], ids=["few", "more"])
def test_random_models_on_random_meshes(ranks, seeds):
    """Meshes of stages, context, tensor, shards and replicas."""
    assert_exact(ranks, 4, [random_case(seed, 4, staged=True) for seed in seeds])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_many_random_models_on_random_meshes(ranks, size):
    first = 1000 * size + 10_000 * SEED
    for begin in range(first, first + 42, 7):
        assert_exact(ranks, size, [random_case(seed, size, staged=True) for seed in range(begin, begin + 7)])


EIGHT = SHORT | {"train.microbatch_size": 1}


def exchanges(config: Config) -> tuple[int, str]:
    """A job: layers of this stage, and what a step of six microbatches exchanges, in turn: `g`athers of weights, `r`eductions of
    gradients, and what goes to other stages or comes from them, `>`."""
    lm: Any = sharded.build_causal_lm(config)[0]
    lm.zero_grad()
    ids = torch.arange(6 * 16).reshape(6, 16) % config.model.vocab_size
    batch = {"input_ids": ids, "labels": ids, "sample_ids": torch.arange(6), "text_bytes": torch.zeros(6)}
    step, found = PipelineStep(lm, NextToken(), 1, GradientSync(lm, config.train.sharding), gloo_group()), list[str]()

    def noted(mark: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **rest: found.append(mark) or call(*args, **rest)

    with (
        patch.object(dist, "all_gather_into_tensor", noted("g", dist.all_gather_into_tensor)),
        patch.object(dist, "reduce_scatter_tensor", noted("r", dist.reduce_scatter_tensor)),
        patch.object(schedules, "_batch_p2p", noted(">", schedules._batch_p2p)),
    ):
        step.forward_backward(batch, lambda *_: None)
    return len(lm.hybrid.blocks), "".join(found)


@pytest.mark.parametrize("virtual", [1, 2])
def test_stages_exchange_weights_and_gradients_once_a_step(ranks, shards, tmp_path, virtual):
    """And those behind the first sum gradients when those before them have all that they wait for."""
    parallel = {"pipeline": 2, "virtual_stages": virtual}
    sharding = {"strategy": "grad_op", "sync_every_microbatch": False}
    settings = {"train.parallel": parallel, "train.sharding": sharding, "model.layers": "m s+m m s+m"}
    of_ranks = ranks(4).run(exchanges, tiny_config(shards, tmp_path, EIGHT | settings))
    for layers, found in of_ranks:  # one group each, and one of what is used throughout
        assert found.count("g") == found.count("r") == layers + 1
    layers, last = of_ranks[-1]
    assert last.endswith(">" + "r" * (layers + 1))


def test_stages_of_full_sharding_gather_each_layer_twice_a_microbatch(ranks, shards, tmp_path):
    settings = {"train.parallel.pipeline": 2, "train.sharding.strategy": "full", "model.layers": "m s+m m s+m"}
    for layers, found in ranks(4).run(exchanges, tiny_config(shards, tmp_path, EIGHT | settings)):
        assert found.count("g") == 2 * 6 * layers + 1
        assert found.count("r") == 6 * (layers + 1)


@pytest.fixture(scope="module")
def whole(ranks, shards, tmp_path_factory) -> Run:
    """The run of one rank."""
    return ranks(1).run(train, tiny_config(shards, tmp_path_factory.mktemp("whole"), EIGHT))[0]


@pytest.mark.parametrize(
    "legs",
    [
        [(2, {"pipeline": 2}, 2), (1, {}, None)],
        pytest.param(
            [(4, {"pipeline": 2}, 1), (1, {}, 2), (4, {"pipeline": 2, "tensor": 2}, 3), (3, {"pipeline": 3}, None)],
            marks=SLOW,
        ),
    ],
    ids=["there and back", "over four meshes"],
)
def test_a_run_and_its_checkpoints_move_between_meshes(ranks, shards, tmp_path, whole, legs):
    """legs: (ranks, train.parallel, the step before which it is interrupted)."""
    samples: dict[int, list[int]] = {}
    for size, parallel, stop_before in legs:
        config = tiny_config(shards, tmp_path / "run", EIGHT | {"train.parallel": parallel})
        run = ranks(size).run(train, config, stop_before)[0]
        samples |= {step: ids[:: config.train.parallel.ranks] for step, ids in run.samples.items()}
    assert samples == whole.samples
    assert_same_run(run, whole)


EXPERTS = {"type": "experts", "n_experts": 4, "top_k": 2, "d_ff": 16, "z_loss": 1e-3, "router": {"choice_bias": True}}
EXPERTS["router"] |= {"bias_rate": 1e-2}
PARTS = {
    "experts": {
        "model.blocks": {"e": {"type": "attention", "n_heads": 2, "mlp": EXPERTS}, "m": BLOCKS["m"]},
        "model.layers": "e m e m e m",
        "train.parallel.virtual_stages": 2,
        "model.tie_embeddings": False,
    },
    "muon, averages and a guard": {
        "model.blocks": {"a": {"type": "attention", "n_heads": 2, "mlp": {"type": "gelu", "d_ff": 48}}},
        "model.layers": "a*3",
        "model.positions": "learned",
        "optimizer": {"type": "muon", "lr": 3e-3},
        "train.ema": {},
        "train.spike": {"window": 4},
        "eval.samples": {"prompts": ["the quick", "a"], "max_new_tokens": 3},
        "train.loss": {"type": "chunked", "chunk_tokens": 24, "z_loss": 1e-4},
        "data.mask_documents": True,
    },
    "adapters": {
        "adapt": {"lora": {"rank": 2, "dora": True}},
        "model.layers": "(s+m)*6",
        "model.tie_embeddings": False,
        "train.parallel.virtual_stages": 2,
    },
    "8-bit states in host memory, a group of one stage": {
        "optimizer": {
            "type": "adamw_8bit",
            "lr": 3e-3,
            "offload": True,
            "groups": [{"match": "blocks.0.*", "lr": 1e-3}],
        }
    },
}


@pytest.mark.ci
@pytest.mark.parametrize("kind", PARTS)
def test_every_part_of_a_step_is_that_of_one_rank(ranks, shards, tmp_path, kind):
    """Losses, what is logged of layers, samples, and all tensors of the checkpoint, of two stages and of three."""
    found = []
    for size in (1, 2, 3):
        parallel = {"train.parallel.pipeline": size, "train.global_batch_size": 6}
        if size == 1:
            parallel["train.parallel.virtual_stages"] = 1
        config = tiny_config(shards, tmp_path / str(size), EIGHT | PARTS[kind] | parallel)
        run, folder = ranks(size).run(train, config)[0], Path(config.run_dir)
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        logged = [
            {name: v for name, v in one.items() if name.startswith(("blocks", "loss", "train/"))} for one in metrics
        ]
        tensors = read_tensors(folder / "checkpoints" / "step-00000004")
        written = samples.read_text() if (samples := folder / "samples.jsonl").exists() else ""
        found.append((run, [one for one in logged if one], tensors, written))
    whole, logged, tensors, written = found[0]
    assert ("blocks.2.mlp/load_max" in logged[0]) == (kind == "experts")
    for staged, logged_of_stages, tensors_of_stages, written_of_stages in found[1:]:
        assert written_of_stages == written
        assert_same_run(staged, whole)
        assert len(logged) == len(logged_of_stages)
        for one, other in zip(logged, logged_of_stages, strict=True):
            assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
        assert tensors.keys() == tensors_of_stages.keys()
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
                assert (tensors_of_stages[name].int() - tensor.int()).abs().max() <= 1, name  # codes of 8 bits
                continue
            torch.testing.assert_close(
                tensors_of_stages[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )


def started(config: Config) -> tuple[Run, str]:
    """A job: a run, and what rank 0 says of the weights that it begins with."""
    said = list[str]()
    with patch.object(
        partial_load.Loaded, "summary", lambda one, make=partial_load.Loaded.summary: said.append(make(one)) or ""
    ):
        return train(config), "".join(said)


@pytest.mark.ci
def test_a_run_starts_from_some_weights_of_another(ranks, shards, tmp_path):
    """Of which one stage has none; what is said is of all stages."""
    base = tmp_path / "base"
    ranks(1).run(train, tiny_config(shards, base, EIGHT))
    found = []
    for size in (1, 2):
        settings = {"init_from": {"path": str(base), "parameters": ["blocks.0.*"]}, "train.parallel.pipeline": size}
        found.append(ranks(size).run(started, tiny_config(shards, tmp_path / str(size), EIGHT | settings))[0])
    (run, said), (staged, said_of_stages) = found
    assert said == said_of_stages
    assert "left fresh" in said and "skipped" in said
    assert_same_run(staged, run)


@pytest.mark.ci
@pytest.mark.parametrize("float8", [None, {"emulate": True, "small_products": True}], ids=["bf16", "float8"])
def test_in_narrow_formats_a_run_is_close_to_that_of_one_rank(ranks, shards, tmp_path, float8):
    """What a stage hands on is in the computation's format; scales are of whole matrices, which one stage each holds."""
    changes = EIGHT | {"train.precision": "amp_bf16", "train.float8": float8}
    runs = [
        ranks(size).run(
            train, tiny_config(shards, tmp_path / str(size), changes | {"train.parallel.pipeline": stages})
        )[0]
        for size, stages in ((1, 1), (2, 2), (3, 3), (4, 2))
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=2e-3)
        assert run.validation == pytest.approx(runs[0].validation, rel=2e-3)


@pytest.mark.ci
@pytest.mark.parametrize("tied", [False, True])
def test_in_narrow_formats_only_what_several_stages_hold_is_rounded_otherwise(ranks, shards, tmp_path, tied):
    """One rank adds up the uses of such a weight in bf16, stages in fp32. All else is bit-equal, scales of float8 included."""
    block = {"type": "attention", "n_heads": 2, "position": {"type": "rotary"}, "mlp": {"type": "swiglu", "d_ff": 64}}
    changes = EIGHT | {"model.blocks": {"a": block}, "model.layers": "a*4", "model.tie_embeddings": tied}
    changes |= {"train.precision": "amp_bf16", "train.float8": {"emulate": True, "small_products": True}}
    changes |= {"train.clip_grad_norm": None, "train.duration": "1 steps", "schedule": {"type": "constant"}}
    # Momentum from zeros: of each gradient.
    held = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        ranks(size).run(train, tiny_config(shards, folder, changes | {"train.parallel.pipeline": size}))
        [step] = (folder / "checkpoints").glob("step-*")
        held.append({name: value for name, value in read_tensors(step).items() if "exp_avg" in name})
    one, two = held
    assert one and one.keys() == two.keys()
    differ = {name for name in one if not torch.equal(one[name], two[name])}
    assert {"embed" in name for name in differ} == ({True} if tied else set())
