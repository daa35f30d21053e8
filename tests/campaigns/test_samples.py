"""A few mistyped commands, damages and kills of the campaigns, in one file: what they begin with takes long to make."""

import pytest

from tests.campaigns import test_command_mutants, test_corruptions, test_kills


@pytest.mark.ci
@pytest.mark.parametrize(
    "campaign, count",
    [(test_command_mutants, 20), (test_corruptions, 20), (test_kills, 10)],
    ids=["mistyped commands", "damages", "kills"],
)
def test_a_few_are_refused_named_or_lose_nothing(scene, tmp_path, campaign, count):
    campaign.draw(scene, tmp_path / "copy", count)
