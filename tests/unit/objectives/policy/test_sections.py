"""The section of a policy: what it refuses before anything heavy, and what a step reads and trains."""

from typing import Any

import pytest

from llmtrain.config.report import ConfigError
from llmtrain.objectives.policy.sections import PolicySection
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config


def of(*overrides: str, ranks: int = 1) -> Config:
    return load_config("quickstart-rl", ("objective.group_size=8", *overrides), world_size=ranks)


def test_a_step_reads_as_many_prompts_as_it_trains_groups():
    config = of("train.global_batch_size=64", "train.microbatch_size=8")
    assert (config.samples_per_step, config.global_groups) == (8, 8)
    config = of(
        "train.global_batch_size=64", "train.microbatch_size=8", "objective.steps_per_rollout=4", "objective.epochs=2"
    )
    assert (config.samples_per_step, config.global_groups) == (4, 8)
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_rewards_are_named_alone_or_as_mappings():
    rewards = of('objective.rewards=[exact, {name: regex, pattern: "(.*)", weight: 0.5}]').model_dump()["objective"]
    assert [(one["name"], one["weight"]) for one in rewards["rewards"]] == [("exact", 1.0), ("regex", 0.5)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("objective.loss=ppo", "objective.loss"),
        ("objective.temperatur=1", "temperature"),
        ("objective.rewards=[]", "objective.rewards"),
        ("objective.rewards=[exat]", "exact"),
        ("objective.rewards=[regex]", "is missing"),
        ("objective.rewards=[code]", "true allows it"),
        ("objective.rewards=[{name: exact, weight: .nan}]", "objective.rewards"),
        ("objective.group_size=1", "objective.group_size"),
        ("objective.group_size=3", "multiple of 3"),
        ("objective.temperature=0", "objective.temperature"),
        ("objective.max_new_tokens=16", "leaves no room for a prompt"),
        ("objective.clip_low=2", "objective.clip_low"),
        ("objective.over_long=penalty", "over_long_margin"),
        ("objective.over_long_margin=3", "only then"),
        ("objective.epochs=2", "must divide steps_per_rollout"),
        ("init_from=null", "name a checkpoint"),
        ("objective.kl={beta: -1}", "objective.kl.beta"),
        ("data.prepare.packing=best_fit", "needs padded"),
        ("train.parallel.tensor=2", "each rank draws answers of its own"),
        ("train.parallel.context=2", "each rank draws answers of its own"),
        ("train.cuda_graphs=on", "the length of answers differs"),
        ("train.loss.z_loss=1e-4", "has no effect on objective: policy"),
        ("objective.rollout={type: openai}", "url"),
        ("objective.rollout={type: openai, url: 'ftp://x'}", "objective.rollout"),
        ("objective.rollout={type: vllm}", "openai"),
        ("objective.rollout={rows: 0}", "objective.rollout"),
    ],
)
def test_rejects_settings_that_do_not_fit(overrides: str, message: str):
    with pytest.raises(ConfigError) as caught:
        of(overrides)
    assert message in str(caught.value)


def test_rejects_temperatures_at_which_servers_report_other_probabilities():
    url = "objective.rollout={type: openai, url: 'http://localhost:1/v1'}"
    objective = of(url, "objective.temperature=1").objective
    assert isinstance(objective, PolicySection) and objective.rollout.type == "openai"
    with pytest.raises(ConfigError, match="at temperature 1"):
        of(url, "objective.temperature=0.7")


@pytest.mark.parametrize(("ranks", "batch", "good"), [(2, 48, True), (4, 48, False), (3, 72, True)])
def test_ranks_share_whole_groups(ranks: int, batch: int, good: bool):
    settings: list[Any] = [f"train.global_batch_size={batch}", "train.microbatch_size=4"]
    if good:
        assert of(*settings, ranks=ranks).samples_per_step == batch // 8
    else:
        with pytest.raises(
            ConfigError, match="groups of 8 sequences, which 4 ranks cannot share; use a multiple of 32"
        ):
            of(*settings, ranks=ranks)
