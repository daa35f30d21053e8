"""The command line of benchmarks loader."""

import pytest

from benchmarks.programs.data.loader import arguments


def test_settings_stand_anywhere_behind_the_config():
    words = ["wait", "run.yaml", "--steps", "6", "model.d_model=64", "--batch", "8", "train.precision=fp32"]
    args = arguments(words)
    assert (args.config, args.steps, args.batch) == ("run.yaml", 6, 8)
    assert args.set == ["model.d_model=64", "train.precision=fp32"]


@pytest.mark.parametrize(
    "words", [["wait", "run.yaml", "--step-count=6"], ["wait", "a.yaml", "b.yaml"], ["speed", "a.b=c"]]
)
def test_what_is_neither_an_option_nor_a_setting_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        arguments(words)
    assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err
