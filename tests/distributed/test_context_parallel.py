"""Ranks that share sequences (train.parallel.context) compute what one rank does."""

from pathlib import Path

import pytest

from llmtrain.train.report.loggers import read_metrics
from tests.distributed.test_gradients import ONE_STEP, assert_same_step, one_step
from tests.support.runs import Run, train
from tests.support.shared_sequences import Case, differences
from tests.support.tiny import tiny_config

MLP = {"type": "swiglu", "d_ff": 24}
ATTENTION = {"type": "attention", "n_heads": 4, "head_dim": 4, "mlp": MLP}
LATENT = {
    "type": "latent_attention",
    "n_heads": 4,
    "kv_rank": 6,
    "nope_dim": 4,
    "rope_dim": 2,
    "value_dim": 5,
    "mlp": MLP,
}
MAMBA = {"type": "mamba2", "d_state": 4, "head_dim": 4, "chunk_size": 8}
DELTA = {"type": "gated_deltanet", "n_heads": 4, "key_head_dim": 4, "value_head_dim": 6, "negative_eigenvalues": True}
KDA = {"type": "kimi_delta", "n_heads": 4, "key_head_dim": 4, "value_head_dim": 6}
CCA = {"type": "compressed_attention", "n_heads": 8, "n_kv_heads": 4, "head_dim": 4, "qkv_bias": True}
SHARED = {"type": "shared_attention", "n_heads": 4, "adapter_rank": 2, "position": {"type": "rotary"}, "mlp": MLP}
MODELS = {
    "mpt": {"blocks": {"a": ATTENTION | {"position": {"type": "alibi"}}}, "layers": "a*2"},
    "llama": {"blocks": {"a": ATTENTION | {"n_kv_heads": 2, "position": {"type": "rotary"}}}, "layers": "a*2"},
    **{f"mamba2, {n} groups": {"blocks": {"m": MAMBA | {"n_groups": n}}, "layers": "m*2"} for n in (1, 2, 8)},
    "zamba2": {"blocks": {"m": MAMBA, "s": SHARED | {"n_shared": 2}}, "layers": "m (s+m)*2"},
    "windows": {
        "blocks": {
            "m": MAMBA | {"d_conv": 3},
            "w": ATTENTION | {"sliding_window": 5, "position": {"type": "alibi"}},
            "v": ATTENTION | {"sliding_window": 11, "position": {"type": "rotary"}, "n_kv_heads": 1},
        },
        "layers": "m w v",
    },
    "sinks": {
        "blocks": {
            "s": ATTENTION | {"n_kv_heads": 2, "sinks": True, "position": {"type": "rotary"}},
            "w": ATTENTION | {"sinks": True, "sliding_window": 5, "position": {"type": "alibi"}},
        },
        "layers": "s w",
    },
    "latent attention": {
        "blocks": {"l": LATENT | {"position": {"type": "rotary"}}, "q": LATENT | {"q_rank": 5}},
        "layers": "l q",
    },
    "gated deltanet": {"blocks": {"g": DELTA}, "layers": "g*2"},
    "gated deltanet, shared keys": {"blocks": {"g": DELTA | {"n_key_heads": 2, "d_conv": 3}}, "layers": "g*2"},
    "kimi delta attention": {"blocks": {"k": KDA, "b": KDA | {"lower_bound": -5.0, "d_conv": 3}}, "layers": "k b"},
    "compressed attention": {
        "blocks": {
            "c": CCA | {"position": {"type": "rotary"}, "d_conv": 3},
            "w": CCA | {"sliding_window": 5, "d_conv": 1, "d_head_conv": 1},
        },
        "layers": "c w",
    },
    "gated deltanet hybrid": {
        "blocks": {"g": DELTA | {"n_key_heads": 1}, "a": ATTENTION, "m": MAMBA},
        "layers": "g a g m",
    },
}
EXACT = 1e-9


def assert_exact(ranks, size: int, cases: list[Case]) -> None:
    for case, (loss, gradient, parameter) in zip(cases, ranks(size).run(differences, cases)[0], strict=True):
        assert loss < EXACT and gradient < EXACT, (case, loss, gradient, parameter)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=SLOW) for size in (2, 3, 6, 8))])
def test_every_kind_of_layer_has_the_loss_and_gradients_of_one_rank(ranks, size):
    """Documents, and a length that the segments do not divide."""
    cases = [Case(model, 29, borders=0.1, train={"parallel": {"context": size}}) for model in MODELS.values()]
    assert_exact(ranks, size, cases)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=SLOW) for size in (3, 4, 6, 8))])
def test_they_have_it_without_documents_too(ranks, size):
    cases = [Case(model, 8 * size, train={"parallel": {"context": size}}) for model in MODELS.values()]
    assert_exact(ranks, size, cases)


def test_a_document_may_begin_anywhere_relative_to_the_cuts(ranks):
    model = {"blocks": {"m": MAMBA, "w": ATTENTION | {"sliding_window": 6}, "a": ATTENTION}, "layers": "m w a m"}
    train = {"parallel": {"context": 4}}
    assert_exact(ranks, 4, [Case(model, 24, samples=25, borders="everywhere", train=train)])


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=SLOW) for size in (2, 4))])
def test_a_document_may_begin_anywhere_for_gated_deltanet_too(ranks, size):
    """Key heads fewer than value heads; an odd length, and the shortest segments."""
    model = {"blocks": {"g": DELTA | {"n_key_heads": 2}, "a": ATTENTION}, "layers": "g a g"}
    train = {"parallel": {"context": size}}
    cases = [Case(model, n, samples=n + 1, borders="everywhere", train=train) for n in (23, 24, 2 * size)]
    assert_exact(ranks, size, cases)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=SLOW) for size in (3, 4))])
def test_gated_deltanet_in_fp32_has_the_loss_and_gradients_of_fp64(ranks, size):
    model = {"blocks": {"g": DELTA | {"n_key_heads": 2}}, "layers": "g*2"}
    train = {"parallel": {"context": size}}
    cases = [
        Case(model, n, borders=borders, train=train, dtype="float32") for n in (97, 160) for borders in (None, 0.05)
    ]
    for case, (loss, gradient, parameter) in zip(cases, ranks(size).run(differences, cases)[0], strict=True):
        assert loss < 1e-5 and gradient < 1e-5, (case, loss, gradient, parameter)


def test_segments_may_be_shorter_than_the_convolution_and_the_window(ranks):
    blocks = {"m": MAMBA | {"d_conv": 5}, "w": ATTENTION | {"sliding_window": 4}, "g": DELTA | {"d_conv": 5}}
    model = {"blocks": blocks, "layers": "m w g m"}
    train = {"parallel": {"context": 4}}
    assert_exact(ranks, 4, [Case(model, 8, train=train), Case(model, 11, borders=0.2, train=train)])


SHORT = {
    "train.duration": "4 steps",
    "eval.interval": "2 steps",
    "checkpoint.interval": "1 steps",
    "train.microbatch_size": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def whole(ranks, shards, folder) -> Run:
    """The run of one rank."""
    return ranks(1).run(train, tiny_config(shards, folder / "whole", SHORT))[0]


def assert_same_run(run: Run, whole: Run) -> None:
    assert run.losses == pytest.approx(whole.losses, rel=1e-5)
    assert run.validation == pytest.approx(whole.validation, rel=1e-5) and sorted(whole.validation) == [2, 4]


@pytest.mark.parametrize(
    "legs",
    [[(2, 2, 2), (1, 1, None)], pytest.param([(4, 2, 1), (1, 1, 2), (4, 4, 3), (2, 1, None)], marks=SLOW)],
    ids=["there and back", "over four meshes"],
)
def test_a_run_and_its_checkpoints_move_between_meshes(ranks, shards, tmp_path, whole, legs):
    """legs: (ranks, ranks that share a sequence, the step before which it is interrupted)."""
    samples: dict[int, list[int]] = {}
    for size, context, stop_before in legs:
        config = tiny_config(shards, tmp_path / "run", SHORT | {"train.parallel.context": context})
        run = ranks(size).run(train, config, stop_before)[0]
        # Every sample is read by each rank of a group.
        samples |= {step: ids[::context] for step, ids in run.samples.items()}
    assert samples == whole.samples
    assert_same_run(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "context"), [(4, 4), (3, 3), (4, 2), (8, 4)])
def test_a_run_of_ranks_that_share_sequences_is_that_of_one(ranks, shards, tmp_path, whole, size, context):
    """Sequences of 32 tokens, which 6 segments do not divide; tokens and samples are counted once."""
    changes = {"train.parallel.context": context, "train.microbatch_size": 1}
    config = tiny_config(shards, tmp_path / "run", SHORT | changes)
    assert_same_run(ranks(size).run(train, config)[0], whole)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl", "time/token")[1][-1] == 3 * 8 * 32


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "selective"])
def test_compiled_blocks_hold_the_collectives(ranks, shards, tmp_path, kind):
    """aot_eager refuses graph breaks as inductor does."""
    blocks = {"model.blocks.w": ATTENTION | {"sliding_window": 7}, "model.blocks.g": DELTA, "model.layers": "m s+m w g"}
    changes = {
        "train.parallel.context": 2,
        "train.compile": "on",
        "train.activation_checkpointing": {"type": kind},
        "data.mask_documents": True,
    }
    config = tiny_config(shards, tmp_path / "run", ONE_STEP | blocks | changes)
    compiled = ranks(2).run(one_step, config, "aot_eager")[0]
    config = tiny_config(shards, tmp_path / "alone", ONE_STEP | blocks | {"data.mask_documents": True})
    assert_same_step(compiled, ranks(1).run(one_step, config)[0])


@pytest.mark.slow
def test_in_bf16_a_step_is_close_to_that_of_one_rank(ranks, shards, tmp_path):
    changes = ONE_STEP | {"train.precision": "amp_bf16"}
    shared = tiny_config(shards, tmp_path / "shared", changes | {"train.parallel.context": 2})
    alone = tiny_config(shards, tmp_path / "alone", changes)
    assert_same_step(ranks(2).run(one_step, shared)[0], ranks(1).run(one_step, alone)[0], relative=0.1)
