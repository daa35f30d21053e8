"""The gradient of a step is that of one big batch on a plain model, whatever parallelism and memory saving are used."""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.data.loader import batches, loaders
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.train import run
from llmtrain.train.parallel import checkpoint_activations
from tests.support.runs import observed_by
from tests.support.tiny import tiny_config
from tests.support.whole import whole_tensors

ONE_STEP = {"train.duration": "1 steps", "schedule.warmup": "0 steps", "train.clip_grad_norm": None}
DENSE_ATTENTION = {
    "model.blocks.a": {"type": "attention", "n_heads": 2, "mlp": {"type": "swiglu", "d_ff": 48}},
    "model.layers": "m (s+m)*2 a",
}

ATTENTION = {"type": "attention", "n_heads": 2, "position": {"type": "rotary", "fraction": 0.5}}
NORM = {"type": "rmsnorm", "zero_centered": True}
WIRED = {
    "model.norm": NORM,
    "model.embedding_multiplier": 4.0,
    "model.logit_multiplier": 0.5,
    "model.blocks": {
        "both": ATTENTION
        | {"norm": NORM | {"place": "both"}, "qk_norm": "head", "mlp": {"type": "geglu_tanh", "d_ff": 48}},
        "after": ATTENTION
        | {"norm": NORM | {"place": "after"}, "qk_norm": "full", "mlp": {"type": "gelu_tanh", "d_ff": 48}},
        "parallel": ATTENTION | {"parallel": True, "residual_multiplier": 0.5, "mlp": {"type": "relu2", "d_ff": 48}},
    },
    "model.layers": "both after parallel",
}

SLOW = pytest.mark.slow


@dataclass
class Step:
    """One optimizer step: gradients by parameter, the global batch, and what the forward pass saw."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    loss: float = 0.0
    dtypes: set[tuple[str, torch.dtype]] = field(default_factory=set)


class Observer(LoggerDestination):
    """Fills a Step, in terms of whole tensors."""

    def __init__(self, look_inside: bool):
        self.step = Step()
        self.look_inside = look_inside

    def fit_start(self, state: State, logger: Logger) -> None:
        model = hybrid_of(state)
        self.step.weights = whole_tensors(model, lambda parameter: parameter)
        for mixer in [module for module in model.modules() if self.look_inside and hasattr(module, "ssm")]:
            # Called in the middle of the mixer's forward pass, where its parameters are what the kernels get.
            mixer.norm.register_forward_pre_hook(lambda *_, mixer=mixer: self.note_dtypes(mixer))  # pyright: ignore[reportAttributeAccessIssue]
        for attention in [module for module in model.modules() if self.look_inside and hasattr(module, "wqkv")]:
            attention.register_forward_pre_hook(lambda _, args: self.note_tables(args[1]))

    def note_dtypes(self, mixer: Any) -> None:
        parameters = [*mixer.ssm.named_parameters(), ("in_proj.weight", mixer.in_proj.weight)]
        self.step.dtypes |= {(name, parameter.dtype) for name, parameter in parameters}

    def note_tables(self, context: Any) -> None:
        self.step.dtypes |= {("rotary", table.dtype) for table in context.rotary or ()}

    def batch_start(self, state: State, logger: Logger) -> None:
        parts = dist.all_gather_object(dict(state.batch))
        self.step.batch = {
            key: torch.cat([part[key] for part in parts]) for key in ("input_ids", "labels", "sample_ids")
        }

    def batch_end(self, state: State, logger: Logger) -> None:
        model = hybrid_of(state)
        self.step.gradients = whole_tensors(model, lambda parameter: parameter.grad)
        self.step.loss = state.total_loss_dict["loss/train/total"]


def hybrid_of(state: State) -> HybridLM:
    composer_model: Any = state.model
    return composer_model.model.hybrid


def uneven(samples: list[dict[str, Any]]) -> batches.Batch:
    """Batches in which sample i has labels at its last few positions only, and every fifth has none."""
    batch = batches.collate(samples)
    for row, id in zip(batch["labels"], batch["sample_ids"].tolist(), strict=True):
        row[: 0 if id < 0 else 6 * (id % 5) + 7] = batches.IGNORED
    batch["label_counts"] = (batch["labels"] != batches.IGNORED).sum(1)
    return batch


def one_step(config: Config, compiled_by: str | Callable[..., Any] | None = None, labels: str = "all") -> Step:
    """A job: the first step of a run. labels: `all` or `uneven`."""
    observer = Observer(look_inside=config.train.precision != "fp32")
    with ExitStack() as stack:
        stack.enter_context(observed_by(observer))
        if compiled_by:
            torch._dynamo.reset()
            compiler = functools.partial(torch.compile, backend=compiled_by)
            stack.enter_context(patch.object(torch, "compile", compiler))
        if labels == "uneven":
            stack.enter_context(patch.object(loaders, "collate", uneven))
        run.train(config)
    return observer.step


def plain_step(config: Config, batch: dict[str, torch.Tensor]) -> Step:
    """Expected gradients: the same weights, one batch, neither sharding nor accumulation."""
    model = HybridLM(config.model)
    model.init_weights(config.seed)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    output = CausalLM(model, config.train.loss).loss(batch["input_ids"], batch["labels"])
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(gradients, weights, batch, output.loss.item())


def assert_same_step(step: Step, expected: Step, relative: float = 1e-4) -> None:
    """Same initial weights exactly; loss and every gradient within `relative` of the gradient's norm."""
    assert step.weights.keys() == expected.weights.keys() == step.gradients.keys() == expected.gradients.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(step.weights[name], weight), name
    assert step.loss == pytest.approx(expected.loss, rel=min(relative, 1e-2) / 10)
    for name, gradient in expected.gradients.items():
        assert distance(step.gradients[name], gradient) < relative, name


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture
def config(shards, tmp_path):
    """config(changes) -> the Config of a one-step run in a folder of its own."""

    def make(changes: dict[str, Any]) -> Config:
        return tiny_config(shards, Path(tmp_path) / "run", ONE_STEP | changes)

    return make


@pytest.mark.parametrize(
    ("size", "microbatch", "sync"),
    [
        *((1, 8, None), (1, 2, False), (2, 4, True), (2, 2, False)),
        *(pytest.param(*one, marks=SLOW) for one in ((1, 1, True), (2, 1, True))),
    ],
)
def test_unequal_numbers_of_labels_weigh_by_tokens(ranks, config, size, microbatch, sync):
    made = config({"train.microbatch_size": microbatch, "train.sharding.sync_every_microbatch": sync})
    steps = ranks(size).run(one_step, made, None, "uneven")
    counts = (steps[0].batch["labels"] != batches.IGNORED).sum(1)
    assert len(counts) == 8 and counts.min() == 0 and counts.max() > 20
    for step in steps:
        assert_same_step(step, plain_step(made, step.batch))


def test_weighing_samples_instead_of_tokens_would_be_seen(ranks, config):
    [step] = ranks(1).run(one_step, config({}), None, "uneven")
    rows = [{key: value[i : i + 1] for key, value in step.batch.items()} for i in range(8)]
    per_sample = [plain_step(config({}), row).gradients for row in rows if (row["labels"] != batches.IGNORED).any()]
    for name, gradient in step.gradients.items():
        assert distance(torch.stack([g[name] for g in per_sample]).mean(0), gradient) > 0.01, name


ACTIVATION_CHECKPOINTING = {
    "none": {},
    "full": {"train.activation_checkpointing": {"type": "full"}},
    "every_k": {"train.activation_checkpointing": {"type": "every_k", "k": 2}},
    "kernels": {"train.activation_checkpointing": {"type": "kernels"}},
    "selective": {"train.activation_checkpointing": {"type": "selective"}},
}
BY_DEFAULT = ("none", "selective")


@pytest.mark.parametrize(
    ("size", "compiled_by", "kind"),
    [
        *((2, None, kind) for kind in ACTIVATION_CHECKPOINTING),
        pytest.param(2, "aot_eager", "selective", marks=pytest.mark.ci),
        *(pytest.param(1, None, kind, marks=SLOW) for kind in ACTIVATION_CHECKPOINTING),
        *(pytest.param(2, "aot_eager", kind, marks=SLOW) for kind in ("none", "full", "every_k")),
        *(pytest.param(1, "inductor", kind, marks=SLOW) for kind in ACTIVATION_CHECKPOINTING),
    ],
)
def test_activation_checkpointing_and_compilation_leave_gradients_alone(ranks, config, kind, size, compiled_by):
    """aot_eager traces, and refuses graph breaks, as inductor does, but compiles nothing: that takes a minute here."""
    changes = {"train.microbatch_size": 8 // size, "train.compile": "on" if compiled_by else "off"}
    made = config(DENSE_ATTENTION | ACTIVATION_CHECKPOINTING[kind] | changes)
    step = ranks(size).run(one_step, made, compiled_by)[0]
    assert_same_step(step, plain_step(made, step.batch))


@pytest.mark.parametrize("compiled_by", [None, pytest.param("aot_eager", marks=SLOW)])
def test_inputs_of_recomputed_layers_may_wait_in_host_memory(ranks, config, compiled_by):
    recomputed = {"train.activation_checkpointing": {"type": "full", "offload": True}}
    changes = {"train.microbatch_size": 4, "train.compile": "on" if compiled_by else "off"}
    made = config(DENSE_ATTENTION | recomputed | changes)
    step = ranks(2).run(one_step, made, compiled_by)[0]
    assert_same_step(step, plain_step(made, step.batch))


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["selective", pytest.param("full", marks=SLOW), pytest.param("none", marks=SLOW)])
def test_they_also_do_whatever_surrounds_the_mixers(ranks, config, kind):
    changes = {"train.microbatch_size": 4, "train.compile": "on"}
    made = config(WIRED | ACTIVATION_CHECKPOINTING[kind] | changes)
    step = ranks(2).run(one_step, made, "aot_eager")[0]
    assert_same_step(step, plain_step(made, step.batch))


def test_bf16_leaves_weights_of_norms_near_one(ranks, config):
    made = config(WIRED | {"train.precision": "amp_bf16", "train.microbatch_size": 4})
    step = ranks(2).run(one_step, made)[0]
    assert all(gradient.dtype == torch.float32 for gradient in step.gradients.values())
    assert_same_step(step, plain_step(made, step.batch), relative=0.1)


class OpCounter(TorchDispatchMode):
    """Counts operators that are executed; a result that selective checkpointing kept does not get here."""

    def __init__(self):
        super().__init__()
        self.executed: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.executed[str(func)] += 1
        return func(*args, **(kwargs or {}))


def executed_operators(config: Config) -> Counter[str]:
    """Counts of each operator in one forward and backward pass."""
    model = HybridLM(config.model)
    checkpoint_activations(model, config.train.activation_checkpointing)
    model.init_weights(config.seed)
    tokens = torch.arange(64).reshape(2, 32)
    with OpCounter() as counter:
        CausalLM(model, config.train.loss).loss(tokens, tokens).loss.backward()
    return counter.executed


def test_what_each_kind_of_activation_checkpointing_computes_twice(config):
    counts = {
        kind: executed_operators(config(DENSE_ATTENTION | changes))
        for kind, changes in ACTIVATION_CHECKPOINTING.items()
    }
    attention = {
        kind: sum(n for op, n in count.items() if "_scaled_dot_product" in op and "backward" not in op)
        for kind, count in counts.items()
    }
    # Four layers, three with attention (two shared, the last one); every_k: 2 recomputes the first and the third.
    assert attention == {"none": 3, "full": 6, "every_k": 4, "kernels": 3, "selective": 3}
    products = {kind: count["aten.mm.default"] for kind, count in counts.items()}
    assert products["none"] < products["selective"] < products["kernels"] == products["full"]
    again = products["full"] - products["none"]
    assert products["selective"] - products["none"] == pytest.approx(again / 2, abs=2)  # layers of odd counts round


@pytest.mark.parametrize(
    ("size", "sharding"),
    [
        (2, {"strategy": "full"}),
        (2, {"strategy": "grad_op"}),
        pytest.param(2, {"strategy": "hybrid", "shard_size": 1}, marks=SLOW),
        (4, {"strategy": "hybrid", "shard_size": 2}),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(map(str, value.values())),
)
def test_sharding_leaves_gradients_alone(ranks, config, size, sharding):
    made = config(DENSE_ATTENTION | {"train.microbatch_size": 2, "train.sharding": sharding})
    for step in ranks(size).run(one_step, made):
        assert_same_step(step, plain_step(made, step.batch))


@pytest.mark.parametrize(
    "kind",
    [
        *BY_DEFAULT,
        *(pytest.param(kind, marks=pytest.mark.ci) for kind in ACTIVATION_CHECKPOINTING if kind not in BY_DEFAULT),
    ],
)
@pytest.mark.parametrize(("size", "microbatch"), [pytest.param(1, 8, marks=SLOW), (2, 2)])
def test_bf16_keeps_the_recurrence_and_positions_in_fp32(ranks, config, kind, size, microbatch):
    changes = {"train.precision": "amp_bf16", "train.microbatch_size": microbatch}
    made = config(DENSE_ATTENTION | ACTIVATION_CHECKPOINTING[kind] | changes)
    for step in ranks(size).run(one_step, made):
        assert step.dtypes == {
            ("A_log", torch.float32),
            ("D", torch.float32),
            ("dt_bias", torch.float32),
            ("in_proj.weight", torch.bfloat16),
            ("rotary", torch.float32),
        }
        assert all(gradient.dtype == torch.float32 for gradient in step.gradients.values())
        # bf16 has 8 bits; sums of many such products in the smallest gradients lose a little more.
        assert_same_step(step, plain_step(made, step.batch), relative=0.1)
