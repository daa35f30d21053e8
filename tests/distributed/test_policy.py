"""Runs of a policy: any number of ranks, resumption within a rollout, rewards that fail, full disks, references."""

from __future__ import annotations

import contextlib
import errno
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.schema.config import Config
from llmtrain.train import run
from llmtrain.train.report.loggers import read_metrics
from llmtrain.train.rollouts.answers import Answer
from llmtrain.train.rollouts.copied_weights import CopiedWeights
from llmtrain.train.rollouts.store import RolloutFiles
from tests.support import runs
from tests.support.policy import GROUP, PROMPTS, policy_config, sums_data
from tests.support.ranks import RankFailed

NAMES = ("loss/train/total", "train/grad_norm", "policy/answers", "policy/entropy", "policy/kl", "policy/clipped")
OF_ROLLOUTS = ("rollout/reward", "rollout/set_aside", "rollout/length", "tokens/trained", "policy/mismatch")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sums_data(tmp_path_factory.mktemp("policy"))


def train(
    config: Config, stop_before: int | None = None, full_before: int | None = None, stale: bool = False
) -> dict[str, dict[int, float]]:
    """A job: metrics of a run by name and step. full_before: no rollout can be written from this step on, from 0. stale: the copied
    weights stay those of the first rollout."""
    recorder = runs.Recorder(stop_before)
    with runs.observed_by(recorder), contextlib.suppress(runs.Interrupted), pytest.MonkeyPatch.context() as patch:
        if full_before is not None:
            write = RolloutFiles.write

            def full(self: RolloutFiles, step: int, answers: list[Answer]) -> None:
                if step >= full_before:
                    raise OSError(errno.ENOSPC, "No space left on device")
                write(self, step, answers)

            patch.setattr(RolloutFiles, "write", full)
        if stale:
            refresh, copied = CopiedWeights.refresh, set[int]()

            def once(self: CopiedWeights) -> None:
                if id(self) not in copied:
                    copied.add(id(self))
                    refresh(self)

            patch.setattr(CopiedWeights, "refresh", once)
        run.train(config)
    torch.distributed.barrier()
    file = Path(config.run_dir) / "metrics.jsonl"
    return {name: dict(zip(*read_metrics(file, name), strict=True)) for name in (*NAMES, *OF_ROLLOUTS)}


def rollout(config: Config, step: int) -> list[Answer]:
    """The answers of a step, from 1."""
    data = config.data
    found = RolloutFiles(Path(config.run_dir), config.model.vocab_size, data.seq_len, None, None).read(step - 1)
    assert found is not None
    return found


@pytest.mark.parametrize("loss", ["dapo", pytest.param("grpo", marks=pytest.mark.ci)])
def test_ranks_and_microbatches_do_not_change_a_run(loss: str, data: Path, tmp_path: Path, ranks):
    changes: dict[str, Any] = {"objective.loss": loss}
    one = policy_config(data, tmp_path / "one", changes | {"train.microbatch_size": 8})
    two = policy_config(data, tmp_path / "two", changes | {"train.microbatch_size": 2})
    [expected] = ranks(1).run(train, one)
    found = ranks(2).run(train, two)[0]
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    assert len(expected["loss/train/total"]) == 4 and expected["policy/answers"][1] == PROMPTS * GROUP
    first = rollout(one, 1)
    assert [answer.ids for answer in first] == [answer.ids for answer in rollout(two, 1)]
    assert len({tuple(answer.ids) for answer in first}) > GROUP
    assert any(grad > 0 for grad in expected["train/grad_norm"].values())


@pytest.mark.ci
def test_a_run_is_the_same_with_copied_weights_and_with_gathered_ones(data: Path, tmp_path: Path, ranks):
    found = {}
    for weights in ("copied", "gathered"):
        changes = {"objective.rollout": {"weights": weights}, "train.precision": "amp_bf16", "optimizer.lr": 0.05}
        config = policy_config(data, tmp_path / weights, changes)
        found[weights] = ranks(2).run(train, config)[0], [rollout(config, step) for step in range(1, 5)]
    assert found["copied"] == found["gathered"]


@pytest.mark.ci
@pytest.mark.parametrize("stale", [False, True])
def test_copied_weights_that_are_not_of_the_last_step_show(stale: bool, data: Path, tmp_path: Path, ranks):
    config = policy_config(data, tmp_path / "run", {"objective.rollout": {"weights": "copied"}, "optimizer.lr": 0.05})
    [found] = ranks(1).run(train, config, None, None, stale)
    mismatch = found["policy/mismatch"]
    assert mismatch[1] < 1e-6 and (mismatch[4] > 1e-3 if stale else mismatch[4] < 1e-6), mismatch


@pytest.mark.ci
@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_that_is_resumed_within_a_rollout_is_the_same_to_the_bit(stop: int, data: Path, tmp_path: Path, ranks):
    changes = {
        "objective.steps_per_rollout": 4,
        "objective.epochs": 2,
        "train.duration": "6 steps",
        "checkpoint.interval": "1 steps",
    }
    whole, halves = (policy_config(data, tmp_path / name, changes) for name in ("whole", "halves"))
    [expected] = ranks(1).run(train, whole)
    ranks(1).run(train, halves, stop)
    assert ranks(1).run(train, halves) == [expected]
    for step in (1, 5):
        assert rollout(whole, step) == rollout(halves, step)
    # The last steps of a rollout are off its policy.
    assert expected["policy/clipped"][1] == 0
    assert len({answer.sample for answer in rollout(whole, 1)}) >= 4 * PROMPTS // 2 - 2


@pytest.mark.ci
def test_prompts_are_the_same_after_a_stop_on_other_ranks(data: Path, tmp_path: Path, ranks):
    changes = {"checkpoint.interval": "1 steps"}
    whole, halves = (policy_config(data, tmp_path / name, changes) for name in ("whole", "halves"))
    [expected] = ranks(1).run(train, whole)
    ranks(2).run(train, halves, 2)
    [found] = ranks(1).run(train, halves)
    for step in range(1, 5):
        assert [one.prompt for one in rollout(whole, step)] == [one.prompt for one in rollout(halves, step)]
    assert found["rollout/reward"] == pytest.approx(expected["rollout/reward"], abs=1e-4)


@pytest.mark.ci
def test_groups_without_rewards_are_set_aside_and_counted(data: Path, tmp_path: Path, ranks):
    reward = {"name": "function", "function": "tests.support.policy:low_bytes_at_times", "allow_code": True}
    config = policy_config(data, tmp_path / "run", {"objective.rewards": [reward | {"seconds": 60.0}]})
    [found] = ranks(1).run(train, config)
    for step in range(1, 5):
        groups = [list(some) for _, some in itertools.groupby(rollout(config, step), key=lambda one: one.sample)]
        failing = [group for group in groups if chr(group[0].prompt[0]) in "01" or not group[0].valid]
        assert found["rollout/set_aside"][step] == sum(len(group) for group in failing) / GROUP
        assert found["policy/answers"][step] == sum(one.valid for group in groups for one in group)
    assert sum(found["rollout/set_aside"].values()) > 0


@pytest.mark.ci
def test_a_full_disk_ends_a_run_that_then_goes_on(data: Path, tmp_path: Path, ranks):
    changes = {"checkpoint.interval": "1 steps"}
    whole, halves = (policy_config(data, tmp_path / name, changes) for name in ("whole", "halves"))
    [expected] = ranks(1).run(train, whole)
    with pytest.raises(RankFailed, match=r"answers of step 3 cannot be written: No space left on device\. Make room"):
        ranks(1).run(train, halves, None, 2)
    assert ranks(1).run(train, halves) == [expected]


@pytest.mark.ci
def test_adapters_learn_beside_a_reference_without_them(data: Path, tmp_path: Path, ranks):
    base = policy_config(data, tmp_path / "base", {"train.duration": "1 steps", "schedule.warmup": "0 steps"})
    ranks(1).run(train, base)
    changes = {
        "objective.kl": {"beta": 0.1},
        "adapt": {"lora": {"rank": 4}},
        "init_from": str(base.run_dir),
        "optimizer.lr": 0.05,
        "schedule.warmup": "0 steps",
    }
    config = policy_config(data, tmp_path / "lora", changes)
    [found] = ranks(1).run(train, config)
    assert found["policy/kl"][1] == pytest.approx(0, abs=1e-6) and found["policy/kl"][4] > 1e-6
    named = {"objective.kl": {"beta": 0.1, "reference": str(base.run_dir)}}
    [other] = ranks(1).run(train, policy_config(data, tmp_path / "named", changes | named))
    for name in ("loss/train/total", "policy/kl"):
        assert other[name] == pytest.approx(found[name], rel=1e-3, abs=1e-6), name
