"""A process of the loader hands every batch over, or ends with an error that the job sees; it does not outlive its job."""

import multiprocessing
import os
import signal
import tempfile

import pytest

from llmtrain.data.loader import loaders
from llmtrain.data.loader.workers import begin_worker

FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("length", [70, 90, 200])
def test_batches_come_with_a_temporary_folder_whose_path_is_too_long_for_sockets(data, tmp_path, monkeypatch, length):
    folder = tmp_path / ("x" * max(1, length - len(os.fsencode(tmp_path)) - 1))
    folder.mkdir()
    monkeypatch.delitem(multiprocessing.process.current_process()._config, "tempdir", raising=False)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    loader = loaders.build_train_loader(data({"a": 64}, num_workers=1), global_batch_size=8)
    loader.timeout = 60
    assert len(list(loader)) == 8


def test_a_batch_that_cannot_be_sent_ends_the_job_and_is_named(data, monkeypatch, capfd):
    monkeypatch.setattr(loaders, "collate", lambda samples: lambda: samples)
    loader = loaders.build_train_loader(data({"a": 64}, num_workers=1), global_batch_size=8)
    loader.timeout = 60
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iter(loader))
    assert "pickle" in capfd.readouterr().err


def test_a_process_whose_job_has_ended_before_it_begins_ends(capfd):
    worker = FORK.Process(target=begin_worker, args=(0, os.getppid()))
    worker.start()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
