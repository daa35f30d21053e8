"""Files of rollouts: what is written is read again, shown, and trained on; damaged ones are left alone."""

import errno
import math
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.train.rollouts.answers import Answer
from llmtrain.train.rollouts.store import RolloutFiles

SEQ_LEN = 16


def answers(step: int = 0) -> list[Answer]:
    return [
        Answer(3, step, [1, 2], [5, 0], [-0.5, -0.25], reward=1.0, advantage=0.75, old=[-0.5, -0.125]),
        Answer(3, step, [1, 2], [6] * 14, [-1.5] * 14, over_long=True, reward=0.0, advantage=-0.75, old=[-1.5] * 14),
        Answer(4, step + 1, [7], [8], [math.inf * -1], reward=0.5, advantage=0.0),
    ]


def files(folder: Path, keep: int | None = None) -> RolloutFiles:
    return RolloutFiles(folder, 300, SEQ_LEN, None, keep)


def test_a_rollout_is_read_as_it_was_written(tmp_path: Path):
    files(tmp_path).write(4, answers(4))
    for step in (4, 5, 9):
        assert files(tmp_path).read(step) == answers(4)
    assert files(tmp_path).read(3) is None
    files(tmp_path).write(6, answers(6)[:1])
    assert files(tmp_path).read(6) == answers(6)[:1] and files(tmp_path).read(5) == answers(4)


def test_answers_of_groups_that_were_set_aside_have_no_reward(tmp_path: Path):
    files(tmp_path).write(0, [Answer(1, 0, [1], [2], [-1.0]), Answer(2, 0, [])])
    read = files(tmp_path).read(0)
    assert read is not None and [one.valid for one in read] == [False, False]
    assert (read[0].ids, read[1].prompt, read[1].ids) == ([2], [], [])


def test_older_rollouts_than_are_kept_are_removed(tmp_path: Path):
    for step in range(4):
        files(tmp_path, keep=2).write(step, answers(step))
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["rollout-00000003", "rollout-00000004"]


def test_a_damaged_rollout_counts_as_none(tmp_path: Path):
    files(tmp_path).write(0, answers())
    [shard] = (tmp_path / "rollouts" / "rollout-00000001").glob("*.mds")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert files(tmp_path).read(0) is None
    (shard.parent / "index.json").unlink()
    assert files(tmp_path).read(0) is None


def test_a_full_disk_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llmtrain.train.rollouts.store.write_index", full)
    with pytest.raises(OSError, match="No space left"):
        files(tmp_path).write(0, answers())
    assert files(tmp_path).read(0) is None


def test_data_show_prints_answers_with_their_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files(tmp_path).write(0, answers())
    assert main(["data", "show", str(tmp_path / "rollouts" / "rollout-00000001")]) == 0
    out = capsys.readouterr().out
    assert "reward 1, sample 3, step 0" in out and "1 2 ⟦5 0⟧" in out and "over_long 1" in out
