"""Exit statuses: mistakes of the user and failures on the way by their message alone, faults with their traceback."""

import ast
import errno
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import llmtrain
from llmtrain.config.output_folder import replace_file, write_synced
from llmtrain.config.regular_file import read_bytes
from llmtrain.errors import Preempted, RunError, UserError, exit_status, without_credentials
from llmtrain.logs import copied_to, log
from llmtrain.schema.load import load_config


def test_what_is_wrong_with_a_config_is_its_report_alone(capsys):
    assert exit_status(lambda: load_config("nowhere.yaml", []) and None) == 2
    err = capsys.readouterr().err
    assert "nowhere.yaml" in err and "Traceback" not in err


def test_prints_no_user_or_password_of_a_url(capsys, tmp_path):
    """As urllib3 and botocore name S3_ENDPOINT_URL in their errors."""
    text = "Could not connect to 'http://mary:s3cret@host:9000/x', https://a:b@c@d/e and s3://bucket/k@y"

    def fails():
        with copied_to(tmp_path / "log.txt"):
            log.warning(text)
        raise RuntimeError(text)

    assert exit_status(fails) == 1
    captured = capsys.readouterr()
    everything = captured.out + captured.err + (tmp_path / "log.txt").read_text()
    assert "s3cret" not in everything and "mary" not in everything and "a:b" not in everything
    assert everything.count("http://***@host:9000/x', https://***@d/e and s3://bucket/k@y") == 3
    assert without_credentials("mail me@host, see https://host/a@b") == "mail me@host, see https://host/a@b"


def test_a_library_s_value_error_is_a_fault(capsys):
    assert exit_status(lambda: json.loads("{")) == 1
    assert "JSONDecodeError" in capsys.readouterr().err


PROGRAM = """
import sys
from llmtrain.errors import UserError, exit_with
def main():
    print("answer")
    if sys.argv[1:]:
        raise UserError("wrong")
exit_with(main)
"""


def in_shell(program: str, rest: str, unbuffered: str = "") -> tuple[int, str, str]:
    """(exit status, output, errors) of `python -c PROGRAM REST` in bash."""
    command = ["bash", "-c", f"set -o pipefail; $0 -c '{program}' {rest}", sys.executable]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_or_that_cannot_be_written(unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    unread = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (unread.returncode, unread.stderr) == (141, b"")
    assert in_shell(PROGRAM, "| grep -c answer", unbuffered) == (0, "1\n", "")
    assert in_shell(PROGRAM, "wrong 2> /dev/full", unbuffered) == (2, "answer\n", "")
    status, _, errors = in_shell(PROGRAM, "> /dev/full", unbuffered)
    assert status == 1 and "No space left on device" in errors and "Traceback" not in errors


def test_ctrl_c_while_commands_are_read_is_no_fault(monkeypatch, capsys):
    monkeypatch.setattr("llmtrain.cli.parser", lambda: signal.raise_signal(signal.SIGINT))
    assert runpy.run_module("llmtrain.__main__", run_name="llmtrain")["main"]() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_files_do_not_take_the_place_of_closed_streams(tmp_path):
    file = tmp_path / "file"
    program = f"""
from llmtrain.cli import main
try:
    main(["--version"])
finally:
    opened = open("{file}", "w")
    print("nowhere", flush=True)
    opened.write(str(opened.fileno()))
"""
    in_shell(program, "<&- >&- 2>&-")
    assert file.read_text() == "3"


def test_what_the_terminals_encoding_has_not_is_printed_by_its_number():
    program = r"""
import sys
from llmtrain.errors import exit_with, open_streams
open_streams()
print("caf\u00e9", "\udcff.txt", file=sys.stderr)
exit_with(lambda: print("caf\u00e9", "\udcff.txt"))
"""
    for encoding, printed in (("ascii", r"caf\xe9 \udcff.txt"), ("utf-8", r"café \udcff.txt")):
        environment = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, encoding="utf-8")
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{printed}\n", f"{printed}\n")


def test_processes_of_ours_import_this_package_and_nothing_from_the_working_folder(monkeypatch):
    package = Path(llmtrain.__file__).parent
    begun = "".join(path.read_text() for path in package.rglob("*.py"))
    assert begun.count('sys.executable, "-P", "-m"') == 8 and 'sys.executable, "-m"' not in begun
    monkeypatch.setattr(sys, "argv", ["llmtrain", "--version"])
    monkeypatch.setenv("PYTHONPATH", "theirs")
    with pytest.raises(SystemExit):
        runpy.run_module("llmtrain", run_name="__main__")
    assert os.environ["PYTHONPATH"] == f"{package.parent}{os.pathsep}theirs"


@pytest.mark.parametrize("answer, status", [(None, 0), (0, 0), (1, 1)])
def test_otherwise_main_states_the_status(answer, status):
    assert exit_status(lambda: answer) == status


@pytest.mark.parametrize(
    "error, status",
    [(UserError("m"), 2), (RunError("m"), 1), (Preempted(3, Path("step-3")), 143), (KeyboardInterrupt(), 130)],
)
def test_an_expected_error_is_its_message_and_its_status(error, status, capsys):
    def fails():
        raise error

    assert exit_status(fails) == status
    assert capsys.readouterr().err == ("interrupted\n" if status == 130 else f"{error}\n")


def test_every_error_of_the_package_carries_a_status():
    """By the source: a class that ends in Error derives, perhaps through others, from one of errors.py."""
    known, found = {"UserError", "RunError", "Preempted"}, {}
    for file in Path(llmtrain.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                found[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    for _ in found:
        known |= {name for name, bases in found.items() if bases & known}
    assert found.keys() - known == set()


def test_errors_for_the_user_are_user_errors():
    """A plain ValueError is a fault of a library: none is raised by the package itself."""
    files = [
        *Path(llmtrain.__file__).parent.rglob("*.py"),
        *(Path(llmtrain.__file__).parents[1] / "benchmarks").rglob("*.py"),
    ]
    assert [file.name for file in files if "raise ValueError" in file.read_text(encoding="utf-8")] == []


def test_every_program_ends_so():
    root = Path(llmtrain.__file__).parents[1]
    files = [*root.glob("benchmarks/*.py"), root / "scripts/gpu/moving_checkpoint.py"]
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    programs = {name: text for name, text in texts.items() if 'if __name__ == "__main__":' in text}
    assert len(programs) >= 3
    assert [name for name, text in programs.items() if not text.endswith(":\n    exit_with(main)\n")] == []


def refuse(number: int, file: Path | None) -> None:
    raise OSError(number, os.strerror(number), *([] if file is None else [str(file)]))


@pytest.mark.parametrize(
    "command, status, said",
    [
        (lambda folder: (folder / ("n" * 300)).stat(), 2, "n…: File name too long"),
        (lambda folder: (folder / "loop").resolve(strict=True), 2, "loop"),
        (lambda folder: (folder / "loop").open(), 2, "loop: Too many levels of symbolic links"),
        (lambda folder: refuse(errno.EACCES, folder / "a"), 1, "a: Permission denied"),
        (lambda folder: refuse(errno.ENOSPC, folder / "a"), 1, "a: No space left on device"),
        (lambda folder: refuse(errno.EDQUOT, None), 1, "^Disk quota exceeded: the disk is full"),
        (lambda folder: Path("/dev/full").write_text("x"), 1, "^No space left on device: the disk is full"),
        (lambda folder: write_synced(Path("/dev/full"), b"x"), 1, "/dev/full: No space left on device"),
        (lambda folder: refuse(errno.EIO, folder / "a"), 1, "a: Input/output error"),
        (lambda folder: replace_file(folder / "folder", b""), 2, "folder: Is a directory"),
        (lambda folder: read_bytes(folder / "pipe"), 2, "pipe: not a regular file"),
        (lambda folder: read_bytes("/dev/zero"), 2, "/dev/zero: not a regular file"),
        (lambda folder: (folder / "file" / "a").stat(), 2, "a: Not a directory"),
    ],
    ids=[
        "long",
        "loop resolved",
        "loop opened",
        "no permission",
        "full",
        "quota unnamed",
        "full unnamed",
        "full named",
        "broken",
        "folder",
        "pipe",
        "device",
        "no folder",
    ],
)
def test_a_file_whose_name_or_place_is_not_allowed_is_named_without_a_traceback(
    tmp_path, capsys, command, status, said
):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    assert exit_status(lambda: command(tmp_path) and None) == status
    error = capsys.readouterr().err
    assert re.search(said, error) and "Traceback" not in error
