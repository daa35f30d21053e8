"""Layers of experts over several ranks, also where ranks divide the experts (train.parallel.expert), compute what one rank does."""

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llmtrain.models.feed_forward import routers
from llmtrain.schema.config import Config
from llmtrain.train.report.loggers import read_metrics
from tests.distributed.test_context_parallel import EXACT, assert_exact, assert_same_run
from tests.distributed.test_gradients import ONE_STEP, assert_same_step, one_step, plain_step
from tests.distributed.test_muon import plain, sharded
from tests.distributed.test_tensor_parallel import move
from tests.support.runs import Run, read_tensors, train
from tests.support.shared_sequences import Case, differences
from tests.support.tiny import tiny_config

SLOW, CI = pytest.mark.slow, pytest.mark.ci
UNBALANCED: dict[str, Any] = {"balance": {"weight": 0.0}}
BALANCED: dict[str, Any] = {"balance": {"weight": 0.5}, "z_loss": 0.1}
POOLED: dict[str, Any] = {"balance": {"weight": 0.5, "over": "model"}, "z_loss": 0.1}
BESIDE: dict[str, Any] = {"shared": {"d_ff": 8}, "shared_gate": True, "latent": 8, "bias": True}


def experts(*settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    made = {"type": "experts", "n_experts": 4, "top_k": 2, "d_ff": 24, **more}
    for one in settings:
        made |= one
    return made


def model(*settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A layer of attention and one of Mamba-2."""
    mlp = experts(*settings, **more)
    attention = {"type": "attention", "n_heads": 4, "head_dim": 4, "position": {"type": "rotary"}, "mlp": mlp}
    mamba = {"type": "mamba2", "d_state": 4, "head_dim": 4, "chunk_size": 8, "mlp": mlp}
    return {"blocks": {"a": attention, "m": mamba}, "layers": "a m"}


def case(
    settings: dict[str, Any], recompute: str = "none", sharding: Any = None, compile: str = "off", **parallel: int
) -> Case:
    """Packed documents. Losses of layers are those of one rank where a group of ranks reads all samples, of which a third of the
    labels is missing."""
    train = {"parallel": parallel, "activation_checkpointing": {"type": recompute}, "sharding": sharding or {}}
    train |= {"compile": compile}
    return Case(settings, 16, borders=0.1, train=train)


OVER_TWO = [
    case(model(UNBALANCED)),
    case(model(BALANCED, BESIDE), context=2),
    case(model(POOLED), recompute="full", context=2),
    case(model(UNBALANCED, BESIDE), recompute="full", expert=2),
    case(model(POOLED, BESIDE), recompute="kernels", context=2, expert=2),
    case(model(BALANCED, BESIDE), recompute="selective", tensor=2, expert=2),
]
HYBRID = {"strategy": "hybrid", "shard_size": 2}
OVER_FOUR = [
    case(model(UNBALANCED, BESIDE), expert=2),
    case(model(UNBALANCED), sharding={"strategy": "grad_op"}, expert=4),
    case(model(UNBALANCED, n_experts=12, top_k=3), sharding=HYBRID, expert=2),
    case(model(UNBALANCED), sharding=HYBRID, tensor=2, expert=2),
    case(model(BALANCED, BESIDE), context=2, tensor=2, expert=4),
    case(model(POOLED, BESIDE), recompute="full", context=2, tensor=2, expert=2),
    case(model(POOLED, top_k=4), recompute="selective", context=4, expert=4),
    case(model(BALANCED, top_k=1, activation="relu2"), tensor=4, expert=4),
]


def unlike(size: int) -> list[Case]:
    """Layers of every kind, divided by as many ranks as there are."""

    def over(
        blocks: dict[str, Any], layers: str, seq_len: Any = 16, samples: Any = 2, borders: Any = 0.1, **train: Any
    ) -> Case:
        train = {"parallel": {"expert": size}, "activation_checkpointing": {"type": "none"}, **train}
        return Case({"blocks": blocks, "layers": layers}, seq_len, samples, borders, train)

    def block(*settings: dict[str, Any], **more: Any) -> dict[str, Any]:
        mlp = experts(UNBALANCED, {"n_experts": 2 * size}, *settings, **more)
        return {"type": "attention", "n_heads": 4, "head_dim": 4, "position": {"type": "rotary"}, "mlp": mlp}

    full, state = {"activation_checkpointing": {"type": "full"}}, {"mlp": {"width": 8, "previous": True}}
    dense = block() | {"mlp": {"type": "gelu", "d_ff": 8}}
    grouped = {"type": "sigmoid", "choice_bias": True, "groups": 2, "top_groups": 1, "scale": 2.5}
    chunks = {"activation_checkpointing": {"type": "full", "mlp_tokens": 5}}
    return [
        over({"a": block(top_k=1)}, "a*2"),
        over({"a": block(n_experts=size, top_k=size)}, "a*2"),
        over({"a": block(router=grouped)}, "a*2", **full),
        over({"a": block(top_k=1, router={"skip": True})}, "a*2", **full),
        over({"a": block(router={"mlp": {"width": 8}}), "b": block(BESIDE, router=state)}, "a b b", **full),
        over({"a": block()}, "a", seq_len=2, samples=1, borders=None),
        over({"a": block(BESIDE)}, "a", seq_len=5, samples=3, borders="everywhere"),
        over({"a": block(BESIDE)}, "a*2", **chunks),
        over({"a": block(), "b": block(BESIDE, n_experts=3 * size, top_k=3), "d": dense}, "a b d a"),
        over({"a": block()}, "a*2", sharding={"sync_every_microbatch": False}),
        over({"a": block(activation="swiglu_clamped", bias=True)}, "a*2", activation_checkpointing={"type": "kernels"}),
        over({"a": block(activation="relu2", latent=4, router={"type": "top_k_softmax", "bias": True})}, "a*2"),
    ]


@pytest.mark.parametrize("size", [pytest.param(3, marks=CI), pytest.param(2, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_layers_of_every_kind_may_be_divided(ranks, size):
    assert_exact(ranks, size, unlike(size))


@CI
@pytest.mark.parametrize("first", [0, 5, 6])
def test_two_of_three_ranks_may_get_no_row(ranks, first):
    """All tokens to the first expert, to the last, or with a router that may choose none, to none at all."""
    router = {"skip": True} if first == 6 else {}
    cases = [
        case(model(UNBALANCED, one, n_experts=6, top_k=1, router=router), recompute=kind, expert=3)
        for one, kind in (({}, "none"), (BESIDE, "full"), ({}, "selective"))
    ]
    for one, (loss, gradient, name) in zip(cases, ranks(3).run(extreme, cases, first)[0], strict=True):
        assert loss < EXACT and gradient < EXACT, (one, loss, gradient, name)


@pytest.mark.parametrize(("size", "cases"), [(2, OVER_TWO), pytest.param(4, OVER_FOUR, marks=CI)], ids=["2", "4"])
def test_loss_and_gradients_are_those_of_one_rank(ranks, size, cases):
    assert_exact(ranks, size, cases)


def extreme(cases: list[Case], first: int) -> list[tuple[float, float, str]]:
    """A job: `differences` where every token meets the experts from `first` on."""

    def choose(section: Any, ranked: torch.Tensor, top_k: int, bias: Any) -> torch.Tensor:
        return torch.arange(first, first + top_k).expand(len(ranked), top_k).clone()

    with patch.object(routers, "_choose", choose):
        return differences(cases)


@pytest.mark.parametrize("first", [0, 3])
def test_all_tokens_may_meet_one_expert_and_none_the_others(ranks, first):
    """The first rank's, or the last one's; a rank gets no row."""
    cases = [
        case(model(UNBALANCED, top_k=1)),
        case(model(BALANCED, top_k=1), context=2),
        case(model(UNBALANCED, BESIDE, top_k=1), recompute="full", expert=2),
        case(model(POOLED, top_k=1), tensor=2, expert=2),
    ]
    for one, (loss, gradient, name) in zip(cases, ranks(2).run(extreme, cases, first)[0], strict=True):
        assert loss < EXACT and gradient < EXACT, (one, loss, gradient, name)


MIXTURE = {
    "model.blocks": {
        "m": {"type": "mamba2", "d_state": 8, "head_dim": 16, "chunk_size": 16, "mlp": experts(BALANCED, BESIDE)},
        "a": {
            "type": "attention",
            "n_heads": 2,
            "mlp": experts(router={"type": "sigmoid", "choice_bias": True, "bias_rate": 0.01}),
        },
    },
    "model.layers": "m a",
    "train.microbatch_size": 2,
}
TWENTY_STEPS = {"train.duration": "20 steps", "eval.interval": "10 steps", "train.ema": {}, "optimizer.lr": 1e-3}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "shards": (2, {}),
    "experts": (2, {"train.parallel": {"expert": 2}}),
    "context": (2, {"train.parallel": {"context": 2}}),
    "tensor and experts": (2, {"train.parallel": {"tensor": 2, "expert": 2}}),
    "shards and experts": (4, {"train.parallel": {"expert": 2}}),
    "context, tensor and experts": (4, {"train.parallel": {"context": 2, "tensor": 2, "expert": 4}}),
    "stages and experts": (4, {"train.parallel": {"pipeline": 2, "expert": 2}}),
    "replicas": (4, {"train.parallel": {"expert": 2}, "train.sharding": HYBRID}),
}


@pytest.mark.parametrize(
    "layouts", [pytest.param(["experts"], marks=CI), pytest.param([*LAYOUTS][1:], marks=SLOW)], ids=["two", "all"]
)
def test_twenty_steps_have_the_losses_of_one_rank(ranks, shards, tmp_path, layouts):
    """Balance by losses and by biases, clipping, averages; microbatches of the same samples."""
    changes = MIXTURE | TWENTY_STEPS
    whole = ranks(1).run(train, tiny_config(shards, tmp_path / "whole", changes))[0]
    for name in layouts:
        size, layout = LAYOUTS[name]
        run = ranks(size).run(train, tiny_config(shards, tmp_path / name, changes | layout))[0]
        assert len(run.losses) == 20 and run.losses == pytest.approx(whole.losses, rel=1e-5), name
        assert run.validation == pytest.approx(whole.validation, rel=1e-5), name


@CI
def test_ranks_that_divide_experts_drop_what_one_rank_does_beyond_a_capacity(ranks, shards, tmp_path):
    """It counts the tokens of a microbatch, whichever ranks hold the experts."""
    changes = MIXTURE | {"train.duration": "5 steps", "optimizer.lr": 1e-3}
    changes |= {"model.blocks": {"m": MIXTURE["model.blocks"]["m"] | {"mlp": experts(BALANCED, capacity=0.7)}}}
    changes |= {"model.layers": "m m"}
    found = {}
    for name in ("one", "shards", "experts"):
        size, layout = LAYOUTS[name]
        config = tiny_config(shards, tmp_path / name, changes | layout)
        losses = ranks(size).run(train, config)[0].losses
        found[name] = [*losses.values(), *read_metrics(tmp_path / name / "metrics.jsonl", "blocks.1.mlp/dropped")[1]]
    assert len(found["one"]) == 10 and min(found["one"]) > 0.1
    for name in ("shards", "experts"):
        assert found[name] == pytest.approx(found["one"], rel=1e-5), name


@pytest.mark.parametrize(
    "names", [["experts", "one", "shards"], pytest.param([*LAYOUTS], marks=SLOW)], ids=["three layouts", "all"]
)
def test_a_checkpoint_keeps_every_bit_through_other_layouts(ranks, shards, tmp_path, names):
    folder, first = None, {}
    for step, name in enumerate([*names, names[0]], start=1):
        size, layout = LAYOUTS[name]
        config = tiny_config(shards, tmp_path / "run", MIXTURE | {"model.tie_embeddings": False} | layout)
        folder = ranks(size).run(move, config, folder, tmp_path, step)[0]
        tensors = {name: value for name, value in read_tensors(folder).items() if isinstance(value, torch.Tensor)}
        first = first or tensors
        assert tensors.keys() == first.keys() and any("experts.w_in.exp_avg" in name for name in tensors)
        assert all(torch.equal(tensors[name], value) for name, value in first.items()), layout


@CI
def test_adapters_of_divided_experts_are_trained_as_on_one_rank(ranks, shards, tmp_path):
    changes = MIXTURE | {
        "train.duration": "4 steps",
        "adapt": {"lora": {"rank": 2, "targets": ["*.experts.*", "*.wo"]}},
    }
    whole = ranks(1).run(train, tiny_config(shards, tmp_path / "whole", changes))[0]
    for name in ("experts", "shards"):
        size, layout = LAYOUTS[name]
        run = ranks(size).run(train, tiny_config(shards, tmp_path / name, changes | layout))[0]
        assert len(run.losses) == 4 and run.losses == pytest.approx(whole.losses, rel=1e-5), name


@CI
def test_upcycled_experts_are_those_of_one_rank(ranks, shards, tmp_path):
    """Copies with noise and fresh channels, whichever ranks hold them."""
    block = MIXTURE["model.blocks"]["m"]
    steps = {"train.duration": "5 steps", "optimizer.lr": 1e-3, "model.layers": "m m m", "train.microbatch_size": 2}
    dense = steps | {"model.blocks": {"m": block | {"mlp": {"type": "swiglu", "d_ff": 24}}}}
    ranks(1).run(train, tiny_config(shards, tmp_path / "dense", dense))
    wanted = {"path": str(tmp_path / "dense"), "upcycle": True, "upcycle_noise": 0.1, "upcycle_drop": 0.5}
    beside = {"shared": {"d_ff": 8}, "shared_gate": True}  # adds nothing at first
    changes = steps | {"model.blocks": {"m": block | {"mlp": experts(BALANCED, beside)}}, "init_from": wanted}
    whole = ranks(1).run(train, tiny_config(shards, tmp_path / "whole", changes))[0]
    stages = {"stages of two layers and of one": (2, {"train.parallel": {"pipeline": 2}})}
    for name, (size, layout) in ({one: LAYOUTS[one] for one in ("experts", "shards")} | stages).items():
        run = ranks(size).run(train, tiny_config(shards, tmp_path / name, changes | layout))[0]
        assert len(run.losses) == 5 and run.losses == pytest.approx(whole.losses, rel=1e-5), name


@SLOW
def test_a_run_moves_between_layouts(ranks, shards, tmp_path):
    changes = MIXTURE | {"train.duration": "4 steps", "eval.interval": "2 steps", "checkpoint.interval": "1 steps"}
    whole = ranks(1).run(train, tiny_config(shards, tmp_path / "whole", changes))[0]
    for name, stop_before in (("experts", 1), ("one", 2), ("context, tensor and experts", 3), ("shards", None)):
        size, layout = LAYOUTS[name]
        run = ranks(size).run(train, tiny_config(shards, tmp_path / "run", changes | layout), stop_before)[0]
    assert_same_run(run, whole)


@pytest.mark.parametrize("optimizer", ["muon", "adamw_8bit"])
@pytest.mark.parametrize(("size", "layout"), [LAYOUTS["experts"], pytest.param(*LAYOUTS["replicas"], marks=SLOW)])
def test_optimizers_of_matrices_step_divided_experts_as_one_rank_does(ranks, shards, tmp_path, size, layout, optimizer):
    """Gradients of the same batch on all ranks; losses of layers count one microbatch."""
    config = tiny_config(shards, tmp_path / "run", MIXTURE | layout | {"optimizer.type": optimizer})
    expected = plain(config)
    for found in ranks(size).run(sharded, config):
        for name, weight in expected.items():
            if found[name].shape == weight.shape:
                torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=2e-5, msg=name)
            else:
                assert ".experts." in name and len(found[name]) == 2
    together = [rank["blocks.0.mlp.experts.w_in"] for rank in ranks(size).run(sharded, config)[:2]]
    torch.testing.assert_close(torch.cat(together), expected["blocks.0.mlp.experts.w_in"], rtol=1e-5, atol=2e-5)


COMPILED = [
    case(model(BALANCED), compile="on", context=2, expert=2),
    case(model(POOLED, BESIDE), "full", compile="on", context=2, expert=2),
    case(model(BALANCED, BESIDE), "selective", compile="on", tensor=2, expert=2),
]


def differences_compiled(cases: list[Case]) -> list[tuple[float, float, str]]:
    """A job: `differences` of layers that AOTAutograd compiles."""
    torch._dynamo.reset()
    with patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        return differences(cases)


@pytest.mark.parametrize("cases", [COMPILED[:1], pytest.param(COMPILED[1:], marks=SLOW)], ids=["one", "more"])
def test_compiled_layers_keep_their_losses_and_counts_beside_the_exchange(ranks, cases):
    """Of which nothing depends but gradients."""
    for one, (loss, gradient, name) in zip(cases, ranks(2).run(differences_compiled, cases)[0], strict=True):
        assert loss < EXACT and gradient < EXACT, (one, loss, gradient, name)


COMPILED_RUNS: dict[str, dict[str, Any]] = {
    "balance over the step": {"mlp": experts(BESIDE, balance={"weight": 0.5, "tokens": "step"})},
    "capacity": {"mlp": experts(BALANCED, capacity=0.7)},
    "biases alone": {"mlp": experts(UNBALANCED, router={"type": "sigmoid", "choice_bias": True, "bias_rate": 0.1})},
    "float8": {
        "mlp": experts(BALANCED, d_ff=32),
        "train": {"float8": {"experts": True, "emulate": True}, "precision": "amp_bf16"},
    },
    "adapters": {"mlp": experts(BALANCED), "adapt": {"lora": {"rank": 2, "targets": ["*.experts.*"]}}},
}


def train_compiled(config: Config) -> Run:
    """A job: `train` with layers that AOTAutograd compiles."""
    torch._dynamo.reset()
    with patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        return train(config)


@pytest.mark.parametrize(
    "kind", [one if one == "biases alone" else pytest.param(one, marks=CI) for one in COMPILED_RUNS]
)
def test_compiled_runs_have_the_losses_of_uncompiled_ones(ranks, shards, tmp_path, kind):
    """And their checkpoints the same biases, which a rate has moved."""
    case = COMPILED_RUNS[kind]
    changes = {"model.blocks": {"m": MIXTURE["model.blocks"]["m"] | {"mlp": case["mlp"]}}, "model.layers": "m m"}
    changes |= {"train.duration": "4 steps", "train.microbatch_size": 2, "train.parallel": {"expert": 2}}
    changes |= {f"train.{name}": value for name, value in case.get("train", {}).items()}
    changes |= {"adapt": case["adapt"]} if "adapt" in case else {}
    found = []
    for compile, job in (("off", train), ("on", train_compiled)):
        config = tiny_config(shards, tmp_path / compile, changes | {"train.compile": compile})
        losses = ranks(2).run(job, config)[0].losses
        tensors = read_tensors(tmp_path / compile / "checkpoints" / "step-00000004")
        found.append((losses, {name: one for name, one in tensors.items() if name.endswith("choice_bias")}))
    (eager, biases), (compiled, same) = found
    assert len(eager) == 4 and compiled == pytest.approx(eager, rel=1e-5)
    assert any(one.any() for one in biases.values()) == (kind == "biases alone")
    assert all(torch.equal(one, same[name]) for name, one in biases.items())


@SLOW
@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_compiled_layers_send_tokens_outside_of_their_graphs(ranks, shards, tmp_path, kind):
    parallel = {"train.parallel.expert": 2, "train.activation_checkpointing": {"type": kind}, "train.compile": "on"}
    mlp = {"model.blocks.m.mlp": experts(UNBALANCED, BESIDE), "model.layers": "m s+m"}
    config = tiny_config(shards, tmp_path / "run", ONE_STEP | mlp | parallel)
    step = ranks(2).run(one_step, config, "aot_eager")[0]
    assert_same_step(step, plain_step(config, step.batch))


@SLOW
def test_in_bf16_a_step_is_close_to_that_of_one_rank(ranks, shards, tmp_path):
    changes = ONE_STEP | MIXTURE | {"train.precision": "amp_bf16"}
    divided = tiny_config(shards, tmp_path / "divided", changes | {"train.parallel.expert": 2})
    alone = tiny_config(shards, tmp_path / "alone", changes)
    assert_same_step(ranks(2).run(one_step, divided)[0], ranks(1).run(one_step, alone)[0], relative=0.2)
