"""A loss or gradient that is not finite, or a spike: all ranks end the run or drop the step, which is named."""

import re
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from composer.core import State
from composer.loggers import Logger, LoggerDestination

from llmtrain.logs import run_log
from llmtrain.models.slices import boxes, local_of, shards_of
from llmtrain.objectives.next_token import NextToken
from llmtrain.schema.config import Config
from llmtrain.train import run
from llmtrain.train.callbacks.stability import NonFiniteError, _not_finite
from llmtrain.train.ranks import tensor_gradients
from tests.support.ranks import RankFailed
from tests.support.runs import observed_by
from tests.support.tiny import tiny_config


@dataclass
class Seen:
    """Record of one rank. ids: its sample ids by step; changed: True for a step that changed weights or moments."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    changed: dict[int, bool] = field(default_factory=dict)
    skipped: float = 0.0
    spikes: float = 0.0
    warnings: list[str] = field(default_factory=list)
    error: str = ""


class Watch(LoggerDestination):
    def __init__(self):
        self.seen = Seen()
        self.before: list[torch.Tensor] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.seen.ids[state.timestamp.batch.value + 1] = state.batch["sample_ids"].tolist()
        self.before = self.snapshot(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        after = self.snapshot(state)
        same = len(after) == len(self.before) and all(
            torch.equal(a, b) for a, b in zip(after, self.before, strict=True)
        )
        self.seen.changed[state.timestamp.batch.value] = not same

    def log_metrics(self, metrics, step=None) -> None:
        self.seen.skipped = metrics.get("train/skipped_steps", self.seen.skipped)
        self.seen.spikes = metrics.get("train/spikes", self.seen.spikes)

    @staticmethod
    def snapshot(state: State) -> list[torch.Tensor]:
        moments = [value for entry in state.optimizers[0].state.values() for value in entry.values()]
        tensors = [*state.model.parameters(), *moments]
        return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]


def train_with_nan(config: Config, bad_steps: list[int], bad_rank: int, what: str = "loss") -> Seen:
    """A job: on `bad_rank`, the loss (or only its gradient) of `bad_steps` is NaN, or three times as high. Errors come back as
    text."""
    watch, true_loss = Watch(), NextToken.loss

    def loss(self, outputs, batch):
        found = true_loss(self, outputs, batch)
        if max(watch.seen.ids) in bad_steps and torch.distributed.get_rank() == bad_rank and torch.is_grad_enabled():
            if what == "loss":
                found.loss = found.loss * torch.nan
            elif what == "spike":
                found.loss = found.loss * 3
            else:
                found.loss.register_hook(lambda gradient: gradient * torch.inf)
        return found

    warnings = patch.object(run_log, "warning", watch.seen.warnings.append)
    with observed_by(watch), patch.object(NextToken, "loss", loss), warnings:
        try:
            run.train(config)
        except RuntimeError as error:
            watch.seen.error = f"{type(error).__name__}: {error}"
    return watch.seen


@pytest.fixture
def config(shards, tmp_path):
    def make(**train) -> Config:
        changes = {f"train.{name}": value for name, value in train.items()}
        return tiny_config(shards, tmp_path / "run", {"train.duration": "6 steps"} | changes)

    return make


@pytest.mark.parametrize(("size", "bad_rank"), [(1, 0), (2, 0), (2, 1)])
def test_stop_names_the_step_and_the_samples(ranks, config, size, bad_rank):
    seen = ranks(size).run(train_with_nan, config(), [3], bad_rank)
    culprits = ", ".join(map(str, seen[bad_rank].ids[3]))
    for rank in seen:
        assert rank.error.startswith(
            f"NonFiniteError: the loss is not finite at step 3; sample ids of rank {bad_rank}: {culprits}; "
            "gradients not finite: all. Nothing of this"
        )
        assert rank.changed == {1: True, 2: True}


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    return parameter.grad


def train_with_broken_expert(config: Config, what: str) -> str:
    """A job: before the second step expert 3 of the second layer has a weight of infinity, or its gradient gets one. Returns the
    error."""

    class Break(LoggerDestination):
        def batch_start(self, state: State, logger: Logger) -> None:
            if what == "weight" and state.timestamp.batch.value == 1:
                self.put(state, lambda parameter: parameter)

        def after_backward(self, state: State, logger: Logger) -> None:
            if what == "gradient" and state.timestamp.batch.value == 1:
                self.put(state, gradient_of)

        @torch.no_grad()
        def put(self, state: State, of: Any) -> None:
            hybrid: Any = state.model.model.hybrid  # type: ignore[union-attr]
            parameter = hybrid.blocks[1].mlp.experts.w_out
            tensor, slices = of(parameter), shards_of(hybrid.blocks[1].mlp.experts).get("w_out")
            for box in boxes(tensor, slices):
                if box.begin[0] <= 3 < box.begin[0] + box.sizes[0]:
                    local_of(tensor)[box.at][3 - box.begin[0], 0, 0] = torch.inf

    with observed_by(Break()), pytest.raises(NonFiniteError) as error:
        run.train(config)
    return str(error.value)


EXPERT = {
    "model.blocks": {
        "a": {"type": "attention", "n_heads": 2, "mlp": {"type": "experts", "n_experts": 6, "top_k": 2, "d_ff": 8}}
    },
    "model.layers": "a*3",
}


@pytest.mark.parametrize(("size", "expert"), [(1, 1), (2, 1), (2, 2)])
def test_an_expert_that_is_not_finite_is_named_with_its_layer(ranks, shards, tmp_path, size, expert):
    config = tiny_config(shards, tmp_path / "run", EXPERT | {"train.parallel.expert": expert})
    for error in ranks(size).run(train_with_broken_expert, config, "weight"):
        assert (
            "weights not finite: 1 of 23, the last of which is blocks.1.mlp.experts.w_out, of expert 3; gradients"
            in error
        )
    for error in ranks(size).run(train_with_broken_expert, config, "gradient"):
        assert "gradients not finite: 1 of 23, the last of which is blocks.1.mlp.experts.w_out, of expert 3." in error
        assert "weights" not in error


def test_the_layer_where_gradients_stop_being_finite_is_the_last_that_has_them():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert _not_finite(model, gradient_of) == "none"
    for name in ("0.weight", "0.bias", "2.weight"):
        model.get_parameter(name).grad[0] = torch.nan  # type: ignore[index]
    assert _not_finite(model, gradient_of) == "3 of 8, the last of which is 2.weight"
    norm = clip_shards_of(model)
    assert torch.isnan(norm) and _not_finite(model, gradient_of) == "3 of 8, the last of which is 2.weight"


def clip_shards_of(model: torch.nn.Module) -> torch.Tensor:
    """The norm of clipping, of one rank without a process group."""
    with patch.object(tensor_gradients.dist, "all_reduce"), patch.object(tensor_gradients, "_replicas", lambda _: 1):
        return tensor_gradients.clip_shards(list(model.parameters()), 1.0)


def test_a_gradient_that_overflows_is_distinguished_from_a_loss(ranks, config):
    [seen] = ranks(1).run(train_with_nan, config(), [2], 0, "gradient")
    assert re.match(r"NonFiniteError: the gradient norm \((nan|inf)\) is not finite at step 2; sample ids", seen.error)


@pytest.mark.parametrize(("size", "bad_rank"), [(1, 0), (2, 1)])
def test_skip_leaves_weights_and_moments_alone_and_goes_on(ranks, config, size, bad_rank):
    for seen in ranks(size).run(train_with_nan, config(nonfinite="skip"), [1, 3], bad_rank):
        assert seen.error == ""
        assert seen.changed == {1: False, 2: True, 3: False, 4: True, 5: True, 6: True}
        assert seen.skipped == 2


def test_too_many_skipped_in_a_row_stop_the_run(ranks, config):
    made = config(nonfinite="skip", max_skipped_steps=2)
    for seen in ranks(2).run(train_with_nan, made, [1, 3, 4, 5], 1):
        assert seen.error.startswith("NonFiniteError: the loss is not finite at step 5")
        assert "2 steps in a row were skipped before it (train.max_skipped_steps)" in seen.error
        assert max(seen.changed) == 4


def test_finite_runs_are_not_touched(ranks, config):
    [seen] = ranks(1).run(train_with_nan, config(nonfinite="skip"), [], 0)
    assert all(seen.changed.values()) and seen.skipped == 0


def test_a_spike_on_one_rank_is_skipped_by_all(ranks, config):
    guarded = config(duration="8 steps", spike={"window": 8, "deviations": 6.0})
    for seen in ranks(2).run(train_with_nan, guarded, [6], 1, "spike"):
        assert seen.error == "" and seen.spikes == seen.skipped == 1
        assert [step for step, changed in seen.changed.items() if not changed] == [6]
        [warning] = seen.warnings
        assert re.match(r"skipped: the loss \d.* standard deviations above the mean 5\.\d+ of 5 steps", warning)
        assert "at step 6; sample ids of rank 0:" in warning and "rank 1:" in warning


def test_spikes_are_trained_on_without_the_guard(ranks, config):
    [seen] = ranks(1).run(train_with_nan, config(), [5], 0, "spike")
    assert all(seen.changed.values())


def gradient_norms(config: Config) -> list[float]:
    """A job: the norm of the gradient that the optimizer was given, by step."""
    norms: list[float] = []

    class Norms(LoggerDestination):
        def batch_end(self, state: State, logger: Logger) -> None:
            parameters: Any = state.model.parameters()
            gradients = [p.grad.full_tensor() for p in parameters]
            norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))

    with observed_by(Norms()):
        run.train(config)
    return norms


@pytest.mark.parametrize("size", [1, 2])
def test_clipping_bounds_the_norm_over_all_ranks(ranks, config, size):
    for norms in ranks(size).run(gradient_norms, config(clip_grad_norm=0.5)):
        assert norms == pytest.approx([0.5] * 6, rel=1e-4)


def test_without_clipping_the_norm_is_larger(ranks, config):
    [norms] = ranks(1).run(gradient_norms, config(clip_grad_norm=None))
    assert min(norms) > 0.6


def test_rank_failures_reach_the_test(ranks):
    with pytest.raises(RankFailed, match=r"(?s)rank 0: .*ZeroDivisionError"):
        ranks(1).run(divmod, 1, 0)
