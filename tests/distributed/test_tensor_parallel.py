"""Ranks that share every layer's work (train.parallel.tensor), and sequences too, compute what one rank does."""

import math
import os
from pathlib import Path

import pytest
import torch

from llmtrain.checkpoint import save_load
from llmtrain.schema.config import Config
from tests.distributed.test_context_parallel import (
    ATTENTION,
    MODELS,
    SHARED,
    SHORT,
    SLOW,
    assert_exact,
    assert_same_run,
)
from tests.distributed.test_gradients import ONE_STEP, assert_same_step, one_step
from tests.support.runs import Run, read_tensors, train
from tests.support.sharded import build, write
from tests.support.shared_sequences import Case, random_case
from tests.support.tiny import tiny_config

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "0"))
"""Of the slow random cases: another gives others."""


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=SLOW)])
def test_every_kind_of_layer_has_the_loss_and_gradients_of_one_rank(ranks, size):
    """Documents, and a length that the ranks do not divide; fewer groups and key/value heads than ranks, as many, and more."""
    models = {name: model for name, model in MODELS.items() if size <= 4}
    assert_exact(
        ranks, size, [Case(model, 29, borders=0.1, train={"parallel": {"tensor": size}}) for model in models.values()]
    )


@pytest.mark.ci
def test_random_models_on_random_meshes(ranks):
    """Meshes of context, tensor, shards and replicas."""
    assert_exact(ranks, 4, [random_case(seed, 4) for seed in range(20)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_many_random_models_on_random_meshes(ranks, size):
    first = 1000 * size + 10_000 * SEED
    for begin in range(first, first + 42, 7):
        assert_exact(ranks, size, [random_case(seed, size) for seed in range(begin, begin + 7)])


@pytest.fixture(scope="module")
def whole(ranks, shards, tmp_path_factory) -> Run:
    """The run of one rank."""
    return ranks(1).run(train, tiny_config(shards, tmp_path_factory.mktemp("whole"), SHORT))[0]


@pytest.mark.parametrize(
    "legs",
    [
        [(2, 1, 2, 2), (1, 1, 1, None)],
        pytest.param([(4, 2, 2, 1), (1, 1, 1, 2), (4, 1, 2, 3), (2, 1, 2, None)], marks=SLOW),
    ],
    ids=["there and back", "over four meshes"],
)
def test_a_run_and_its_checkpoints_move_between_meshes(ranks, shards, tmp_path, whole, legs):
    """legs: (ranks, context, tensor, the step before which it is interrupted)."""
    for size, context, tensor, stop_before in legs:
        changes = SHORT | {"train.parallel": {"context": context, "tensor": tensor}}
        run = ranks(size).run(train, tiny_config(shards, tmp_path / "run", changes), stop_before)[0]
    assert_same_run(run, whole)


def move(config: Config, folder: Path | None, root: Path, step: int) -> Path:
    """A job: what a model under the config's mesh has loaded from a folder (or, of none, its own state), saved again."""
    model, optimizer = build(config, seed=step)
    if folder is not None:
        save_load.load(folder, model, optimizer)
    return write(root, model, optimizer, step)


MESHES = [
    (1, {}),
    (4, {"train.parallel": {"tensor": 4}}),
    (2, {}),
    (4, {"train.parallel": {"context": 2, "tensor": 2}}),
    (2, {"train.parallel": {"tensor": 2}}),
    (4, {"train.parallel": {"tensor": 2}, "train.sharding": {"strategy": "hybrid", "shard_size": 2}}),
    (4, {"train.parallel": {"context": 4}}),
    (4, {"train.parallel": {"tensor": 2}, "train.sharding": {"strategy": "grad_op"}}),
]


STAGES = [
    (2, {"train.parallel": {"pipeline": 2, "virtual_stages": 2}}),
    (4, {"train.parallel": {"pipeline": 2, "tensor": 2}}),
    (1, {}),
    (3, {"train.parallel.pipeline": 3}),
    (4, {"train.parallel.pipeline": 2}),
    (2, {}),
    (4, {"train.parallel": {"pipeline": 2, "context": 2}}),
    (4, {"train.parallel.pipeline": 2, "train.sharding": {"strategy": "hybrid", "shard_size": 1}}),
]
"""Meshes with stages."""


@pytest.mark.parametrize(
    "meshes",
    [
        [MESHES[1], STAGES[0]],
        pytest.param([MESHES[1], *STAGES[:3]], marks=pytest.mark.ci),
        pytest.param(MESHES, marks=SLOW),
        pytest.param(STAGES, marks=SLOW),
    ],
    ids=["two meshes", "four meshes", "eight meshes", "eight meshes with stages"],
)
def test_a_checkpoint_keeps_every_bit_through_other_meshes_and_back(ranks, shards, tmp_path, meshes):
    """One group of B and C, and two heads of keys and values, over four ranks; 5 rows of `down` over two: uneven shards."""
    blocks = {
        "model.blocks.s": SHARED | {"n_kv_heads": 2, "adapter_rank": 5, "attn_adapter_rank": 3},
        "model.blocks.w": ATTENTION | {"n_kv_heads": 1, "qk_norm": "full", "qkv_bias": True, "out_bias": True},
        "model.layers": "m s+m w m",
        "model.tie_embeddings": False,
    }
    folder, first = None, {}
    for step, (size, mesh) in enumerate([*meshes, meshes[0]], start=1):
        config = tiny_config(shards, tmp_path / "run", blocks | mesh)
        folder = ranks(size).run(move, config, folder, tmp_path, step)[0]
        tensors = {name: value for name, value in read_tensors(folder).items() if isinstance(value, torch.Tensor)}
        first = first or tensors
        assert tensors.keys() == first.keys() and len(tensors) > 60
        assert all(torch.equal(tensors[name], value) for name, value in first.items()), mesh


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "selective"])
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"context": 2, "tensor": 2}], ids=["tensor", "context and tensor"])
def test_compiled_blocks_hold_the_collectives(ranks, shards, tmp_path, mesh, kind):
    """aot_eager refuses graph breaks as inductor does. One group of B and C, one norm group: statistics cross the ranks."""
    blocks = {"model.blocks.w": ATTENTION | {"sliding_window": 7, "qk_norm": "full"}, "model.layers": "m s+m w"}
    blocks["data.mask_documents"] = True
    changes = {"train.parallel": mesh, "train.compile": "on", "train.activation_checkpointing": {"type": kind}}
    config = tiny_config(shards, tmp_path / "run", ONE_STEP | blocks | changes)
    compiled = ranks(math.prod(mesh.values())).run(one_step, config, "aot_eager")[0]
    assert_same_step(compiled, ranks(1).run(one_step, tiny_config(shards, tmp_path / "alone", ONE_STEP | blocks))[0])


@pytest.mark.slow
def test_in_bf16_a_step_is_close_to_that_of_one_rank(ranks, shards, tmp_path):
    changes = ONE_STEP | {"train.precision": "amp_bf16"}
    shared = tiny_config(shards, tmp_path / "shared", changes | {"train.parallel.tensor": 2})
    alone = tiny_config(shards, tmp_path / "alone", changes)
    assert_same_step(ranks(2).run(one_step, shared)[0], ranks(1).run(one_step, alone)[0], relative=0.1)


TWENTY_STEPS = {
    "train.duration": "20 steps",
    "optimizer.lr": 1e-3,
    "train.microbatch_size": 1,
    "eval.interval": "20 steps",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mpt", "llama", "mamba2, 1 groups", "zamba2", "windows"])
def test_twenty_steps_have_the_losses_of_one_rank(ranks, shards, tmp_path, kind):
    """In fp32; packed documents, and every part of a step besides: averages of weights, the spike guard, z-loss, chunks."""
    model = {f"model.{key}": value for key, value in MODELS[kind].items()}
    changes = (
        TWENTY_STEPS
        | model
        | {
            "data.mask_documents": True,
            "train.ema": {},
            "train.spike": {},
            "train.loss": {"type": "chunked", "chunk_tokens": 24, "z_loss": 1e-4},
        }
    )
    losses = []
    for i, (size, mesh) in enumerate([MESHES[0], MESHES[1], *MESHES[3:6]]):
        run = ranks(size).run(train, tiny_config(shards, tmp_path / str(i), changes | mesh))[0]
        losses.append(list(run.losses.values()) + list(run.validation.values()))
        assert len(losses[i]) == 21 and losses[i] == pytest.approx(losses[0], rel=1e-5), mesh
