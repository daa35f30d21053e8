"""The `objective` section: names alone, its union, and what it refuses."""

import pytest

from llmtrain.config.report import ConfigError
from llmtrain.schema.config import Config
from llmtrain.schema.differences import differences
from llmtrain.schema.load import load_config

PREFERENCE = "data.mask_documents=true"


def of(*overrides: str) -> Config:
    return load_config("quickstart", overrides)


def test_a_run_without_an_objective_predicts_each_next_token():
    old = of().model_dump(mode="json")
    del old["objective"]
    assert of().objective.type_name == "next_token"
    assert differences(old, of("objective=next_token")) == []
    assert "objective.type: next_token -> preference" in differences(old, of("objective=preference", PREFERENCE))


@pytest.mark.parametrize(
    "given,expected",
    [
        ("preference", {"sigmoid": 1.0}),
        ("{type: preference, loss: ipo_sum}", {"ipo_sum": 1.0}),
        ("{type: preference, loss: {sigmoid: 1, sft: 0.2}}", {"sigmoid": 1.0, "sft": 0.2}),
    ],
)
def test_losses_are_named_alone_or_with_weights(given: str, expected: dict[str, float]):
    config = of(f"objective={given}", PREFERENCE)
    assert config.model_dump()["objective"]["loss"] == expected
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "given,found",
    [
        ("foo", "objective.type .*unknown type; expected one of: .*preference"),
        ("3", "objective .*expected a mapping, found 3"),
        ("{type: preference, loss: ip}", "objective.loss .*expected one of sigmoid, ipo, "),
        ("{type: preference, loss: {}}", "objective.loss .*expected one of sigmoid, ipo, "),
        ("{type: preference, loss: {ipo: 0}}", "objective.loss .*expected weights above 0"),
        ("{type: preference, loss: {kto: 1, sft: 1}}", "objective.loss .*kto is of single answers"),
        ("{type: preference, loss: ipo, gamma: 1.0}", "objective.gamma .*no effect on ipo; it is of simpo"),
        ("{type: preference, loss: robust, label_smoothing: 0.5}", "objective.label_smoothing .*below 0.5"),
        ("preference train.cuda_graphs=on", "train.cuda_graphs .*number of answers differs"),
        ("preference train.parallel.context=2", "train.parallel.context .*product over all of its tokens"),
        ("preference data.mask_documents=false", "data.mask_documents .*must not see each other"),
        ("preference train.loss.z_loss=0.1", "train.loss.z_loss .*no effect"),
    ],
)
def test_rejects_settings_without_a_meaning(given: str, found: str):
    objective, *more = given.split(" ") if given.startswith("preference") else [given]
    with pytest.raises(ConfigError, match=found):
        of(PREFERENCE, f"objective={objective}", *more)
