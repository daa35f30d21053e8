"""Worker processes: killed at any moment they leave an error behind and nobody waiting, and end with whoever started them."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from llmtrain.data.partitions import workers
from llmtrain.data.partitions.cutting import Partition
from llmtrain.data.partitions.maker import MakeSettings
from llmtrain.data.partitions.prepared_folder import REPORTS, SPLITS
from llmtrain.data.partitions.workers import Task, make_partitions
from llmtrain.data.sources.files import PrepareError, list_files
from llmtrain.data.sources.records import whole
from llmtrain.data.tokenize.encode import DocumentMarks
from llmtrain.data.tokenize.engine_choice import EngineChoice
from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.errors import RunError


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """The processes that are started."""
    found = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(workers.subprocess, "Popen", Recorded)
    return found


@pytest.fixture
def tasks(corpus: Path) -> list[Task]:
    """A task for each of 40 files."""
    files = list_files([str(corpus)])
    return [Task(Partition(f"{number:02}", [whole(file)]), None, False) for number, file in enumerate(files)]


@pytest.fixture
def settings(tmp_path: Path) -> MakeSettings:
    for name in (*SPLITS, REPORTS):
        (tmp_path / "made" / name).mkdir(parents=True)
    return MakeSettings(
        folder=tmp_path / "made",
        tokenizer=train_bpe(["the quick brown fox"], 257).backend.to_str(),
        engine=EngineChoice(),
        marks=DocumentMarks(0),
        vocab_size=257,
        seq_len=32,
        packing="concatenate",
        compression="none",
        text_key="text",
        seed=17,
        validation_fraction=0.0,
    )


def test_a_worker_killed_before_it_has_read_anything(tasks, settings, started, monkeypatch):
    """Its settings are larger than what a pipe holds, so that writing them to it at its start would wait for ever."""
    start = subprocess.Popen.__init__

    def killed(self, *args, **kwargs) -> None:
        start(self, *args, **kwargs)
        self.kill()

    monkeypatch.setattr(subprocess.Popen, "__init__", killed)
    large = MakeSettings(**(vars(settings) | {"tokenizer": " " * (1 << 20)}))
    with pytest.raises(PrepareError, match="a worker process died"):
        list(make_partitions(tasks, large, 2, lambda nbytes: None))
    assert all(process.poll() is not None for process in started)


def test_a_worker_killed_at_work_ends_the_others_and_leaves_what_is_finished(tasks, settings, started):
    done = []

    def make() -> None:
        for number, _ in make_partitions(tasks, settings, 2, lambda nbytes: None):
            done.append(number)
            started[0].kill()

    with pytest.raises(PrepareError, match="a worker process died"):
        make()
    assert 1 <= len(done) < len(tasks)
    assert all((settings.folder / REPORTS / f"{number:02}.json").is_file() for number in done)
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2


def test_every_task_is_reported_once_and_the_bytes_read_add_up(tasks, settings, started):
    told = []
    reports = dict(make_partitions(tasks, settings, 2, told.append))
    assert {number: report and report.id for number, report in reports.items()} == {
        number: task.partition.id for number, task in enumerate(tasks)
    }
    assert sum(told) == sum(task.partition.stored_bytes for task in tasks)
    assert [process.poll() for process in started] == [0, 0]


def test_a_fault_of_a_partition_reaches_the_caller(tasks, settings, started):
    with open(tasks[3].partition.slices[0].file.path, "a") as file:
        file.write("more")
    with pytest.raises(PrepareError, match=r"\.txt has changed since the command began"):
        list(make_partitions(tasks, settings, 2, lambda nbytes: None))
    assert all(process.poll() is not None for process in started)


class _Unpicklable(PrepareError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}, {second}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PrepareError("x.txt is damaged"), PrepareError, "x.txt is damaged"),
        (OSError(28, os.strerror(28)), OSError, "[Errno 28] No space left on device"),
        (KeyError("a"), RunError, "KeyError: 'a'"),
        (_Unpicklable("a", "b"), RunError, "a, b"),
    ],
)
def test_errors_of_workers(error, kind, text):
    """What says all that a user needs comes as it is; a fault of the program with its traceback."""
    found = workers._sendable(error)
    assert type(found) is kind and str(found).endswith(text)
