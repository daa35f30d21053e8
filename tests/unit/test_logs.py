"""The logger: streams, ranks, and the file of rank 0."""

import contextlib
import logging
import re

import pytest

from llmtrain.logs import copied_to, file_log, log, run_log

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def write() -> None:
    log.info("downloading")
    log.warning("WARNING: slow")
    run_log.info("step 1/2")


@pytest.mark.parametrize("rank", [None, "0"])
def test_rank_0_shows_the_messages_alone(rank, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
    write()
    assert capsys.readouterr() == ("step 1/2\n", "downloading\nWARNING: slow\n")


def test_other_ranks_show_time_and_rank_and_leave_the_run_to_rank_0(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    write()
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"{TIME} rank 3  downloading\n{TIME} rank 3  WARNING: slow\n", err)


def test_a_file_gets_everything_with_time_and_rank(tmp_path):
    file = tmp_path / "logs" / "rank0.txt"
    for _ in range(2):  # a resumed run continues the file
        with copied_to(file):
            write()
    write()
    lines = file.read_text().splitlines()
    assert len(lines) == 6 and all(re.match(rf"{TIME} rank 0  ", line) for line in lines)
    assert lines[2].endswith("step 1/2")


def test_what_is_for_the_file_alone_is_not_shown(tmp_path, capsys):
    with copied_to(tmp_path / "rank0.txt"):
        file_log.error("Preempted: saved step 3")
    assert "Preempted: saved step 3" in (tmp_path / "rank0.txt").read_text()
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_written_is_no_failure(tmp_path, capsys):
    (tmp_path / "logs").touch()
    with copied_to(tmp_path / "logs" / "rank0.txt"):
        run_log.info("step 1/2")
    assert capsys.readouterr().out == "step 1/2\n"


def test_a_full_disk_is_reported_once_and_again_when_it_is_over(tmp_path, capsys):
    """/dev/full stands for the disk: every write to it fails."""
    with copied_to(tmp_path / "rank0.txt"):
        handler = next(one for one in log.handlers if getattr(one, "baseFilename", "").endswith("rank0.txt"))
        assert isinstance(handler, logging.FileHandler)
        good, handler.stream = handler.stream, open("/dev/full", "w")  # noqa: SIM115
        for _ in range(3):
            write()
        full, handler.stream = handler.stream, good
        err = capsys.readouterr().err
        assert err.count("cannot be written") == 1 and "No space left" in err
        write()
        assert f"{tmp_path / 'rank0.txt'} is written again" in capsys.readouterr().err
        handler.stream = full
        write()
    assert (tmp_path / "rank0.txt").read_text().count("step 1/2") == 1


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        run_log.info("step 1/2")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
