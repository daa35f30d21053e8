"""A folder that is renamed or deleted while a run works in it."""

import shutil

import pytest

from llmtrain.checkpoint import local
from llmtrain.config.held_folder import hold_folder, make_folder, release_folder, require_in_place
from llmtrain.train.report.loggers import JSONLLogger


@pytest.fixture
def held(tmp_path):
    hold_folder(tmp_path / "run")
    yield tmp_path / "run"
    release_folder()


def test_makes_folders_in_it_and_elsewhere(held, tmp_path):
    make_folder(held / "a" / "b")
    make_folder(tmp_path / "elsewhere")
    local.clear(held / "checkpoints" / "step-00000001.partial", make=True)
    assert (held / "a" / "b").is_dir() and (held / "checkpoints" / "step-00000001.partial").is_dir()


@pytest.mark.parametrize("made_anew", [False, True])
def test_nothing_makes_the_name_of_a_renamed_folder_anew(held, tmp_path, made_anew):
    held.rename(tmp_path / "renamed")
    if made_anew:  # another folder has the name by now
        held.mkdir()
    for action in (
        lambda: make_folder(held / "icl"),
        lambda: require_in_place(held),
        lambda: local.clear(held / "checkpoints" / "step-00000001.partial", make=True),
        JSONLLogger(held / "metrics.jsonl", 1).open,
    ):
        with pytest.raises(OSError, match=f"was renamed to {tmp_path}/renamed .* give it its name back"):
            action()
    make_folder(tmp_path / "elsewhere")
    assert held.exists() == made_anew and (not made_anew or list(held.iterdir()) == [])
    if made_anew:
        held.rmdir()
    (tmp_path / "renamed").rename(held)
    make_folder(held / "icl")


def test_a_deleted_folder_stays_deleted_until_it_is_released(held):
    shutil.rmtree(held)
    with pytest.raises(OSError, match="renamed or deleted"):
        make_folder(held)
    release_folder()
    make_folder(held)
