"""`llmtrain checkpoint ls | show | verify | rm`, on folders and on a store."""

import json
import os
import shutil
from pathlib import Path

import pytest

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.stores.mounted import MountedStore
from llmtrain.checkpoint.upload import upload
from llmtrain.cli import main
from tests.support.processes import modules_after
from tests.support.project import Project
from tests.support.stores import flip, make_checkpoint


def checkpoint(capsys, *arguments: object) -> tuple[int, list[str], str]:
    """(exit status, lines printed, errors)."""
    capsys.readouterr()
    status = main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


@pytest.fixture
def run(tmp_path) -> Path:
    """Steps 1 to 6: 3 lacks a file, 4 is of a newer format, 5 of the first one, 6 is half written."""
    root = tmp_path / "run" / "checkpoints"
    folders = [make_checkpoint(root, step) for step in range(1, 7)]
    (folders[2] / "__0_1.distcp").unlink()
    for folder, number in ((folders[3], 99), (folders[4], 1)):
        content = json.loads((folder / "manifest.json").read_text())
        del content["xxh3_128"]
        (folder / "manifest.json").write_text(json.dumps(content | {"format": number}))
    folders[5].rename(root / "step-00000006.partial")
    return tmp_path / "run"


def three_steps(folder: Path) -> tuple[str, str]:
    """A folder and a store of three good steps, 10, 20 and 30."""
    bucket = MountedStore(folder / "mounted")
    for step in (10, 20, 30):
        upload(bucket, make_checkpoint(folder / "run", step))
    return str(folder / "run"), bucket.url


@pytest.fixture(params=["folder", "store"])
def place(request, tmp_path) -> str:
    return three_steps(tmp_path)[request.param == "store"]


def test_ls_states_the_health_of_each(run, capsys):
    status, lines, _ = checkpoint(capsys, "ls", run)
    assert status == 0
    title, *rows = [line.split(maxsplit=1) for line in lines]
    assert title[1].split() == ["STEP", "TOKENS", "SIZE", "AGE", "HEALTH"]
    assert [row[0] for row in rows] == [f"step-0000000{i}" for i in range(1, 6)] + ["step-00000006.partial"]
    found = dict(rows)
    assert found["step-00000002"].split()[:3] == ["2", "200", "101"] and found["step-00000002"].endswith("  complete")
    assert found["step-00000003"].endswith("damaged: __0_1.distcp is missing")
    assert "newer format" in found["step-00000004"] and "format 1" in found["step-00000005"]
    assert "partial" in found["step-00000006.partial"]


def test_ls_of_a_store(place, capsys):
    status, lines, _ = checkpoint(capsys, "ls", place)
    assert status == 0
    assert [line.split()[:2] for line in lines[1:]] == [[f"step-000000{i}", str(i)] for i in (10, 20, 30)]
    assert all(line.endswith("complete") for line in lines[1:])


def test_verify_reads_every_byte_and_names_what_is_wrong(place, capsys):
    status, lines, _ = checkpoint(capsys, "verify", place)
    assert status == 0 and [line.split(": ")[1].split()[0] for line in lines] == ["good"] * 3
    path = Path(place.removeprefix("file://")) / "step-00000020" / "__0_3.distcp"
    flip(path)
    assert checkpoint(capsys, "ls", place)[1][2].endswith("complete")
    status, lines, _ = checkpoint(capsys, "verify", place)
    assert status == 1
    assert [line.split()[1] for line in lines] == ["good", "WRONG:", "good"]
    assert "step-00000020 is damaged: __0_3.distcp is not what was written" in lines[1]
    assert checkpoint(capsys, "verify", f"{place}/step-00000010")[0] == 0
    assert checkpoint(capsys, "verify", f"{place}/step-00000020")[0] == 1


def test_verify_of_what_is_not_whole(run, capsys):
    status, lines, _ = checkpoint(capsys, "verify", run)
    assert status == 1
    assert [line.split(maxsplit=2)[1] for line in lines] == ["good", "good", "WRONG:", "WRONG:", "WRONG:", "partial"]


def test_verify_of_one_that_has_lost_its_manifest(place, capsys):
    (Path(place.removeprefix("file://")) / "step-00000020" / "manifest.json").unlink()
    status, lines, _ = checkpoint(capsys, "verify", place)
    assert status == 1 and [line.split()[1] for line in lines] == ["good", "WRONG:", "good"]
    assert "step-00000020 is not a complete checkpoint: it has no manifest.json" in lines[1]


def test_verify_of_one_under_the_name_of_another(place, capsys):
    root = Path(place.removeprefix("file://"))
    shutil.rmtree(root / "step-00000030")
    shutil.copytree(root / "step-00000020", root / "step-00000030")
    status, lines, _ = checkpoint(capsys, "verify", place)
    assert status == 1 and lines[2].startswith("step-00000030: WRONG: ") and "holds step 20" in lines[2]
    assert checkpoint(capsys, "verify", f"{place}/step-00000030")[0] == 1


def test_verify_of_a_pipe_does_not_hang(place, capsys):
    manifest = Path(place.removeprefix("file://")) / "step-00000020" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    status, lines, said = checkpoint(capsys, "verify", place)
    if place.startswith("file://"):
        assert status == 2 and "step-00000020/manifest.json is not a regular file" in said
    else:
        assert status == 1 and [line.split()[1] for line in lines] == ["good", "WRONG:", "good"]


def steps(place: str, capsys) -> list[int]:
    return [int(line.split()[1]) for line in checkpoint(capsys, "ls", place)[1][1:]]


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--step", 20], [10, 30]),
        (["--before", 30], [30]),
        (["--keep-last", 2], [20, 30]),
        (["--keep-last", 5], [10, 20, 30]),
        (["--before", 20, "--dry-run"], [10, 20, 30]),
        (["--before", 31], None),
        (["--before", 31, "--force"], []),
        (["--step", 11], None),
        (["--keep-last", 0], None),
    ],
)
def test_rm(place, capsys, arguments, left):
    before = steps(place, capsys)
    status, lines, error = checkpoint(capsys, "rm", place, *arguments)
    if left is None:
        assert status == 2 and not lines and error
        assert steps(place, capsys) == before
        return
    assert status == 0
    verb = "would remove" if "--dry-run" in arguments else "removed"
    gone = 1 if "--dry-run" in arguments else len(before) - len(left)
    assert [line.startswith(verb) for line in lines] == [True] * gone or lines == ["nothing to remove"]
    assert not any("(0 B" in line for line in lines)
    if left:
        assert steps(place, capsys) == left
    else:
        assert checkpoint(capsys, "ls", place)[0] == 2


def test_rm_counts_only_what_is_good(run, capsys):
    """Damaged ones that are newer neither count as kept, nor make the last good one expendable."""
    status, _, error = checkpoint(capsys, "rm", run, "--before", 3)
    assert status == 2 and "step-00000002 is the last good checkpoint" in error and "--force" in error
    status, lines, _ = checkpoint(capsys, "rm", run, "--keep-last", 1)
    assert status == 0 and len(lines) == 1 and "step-00000001" in lines[0]
    assert checkpoint(capsys, "rm", run, "--step", 3)[0] == 0


def test_show_reports_what_a_checkpoint_is(finished, tmp_path, capsys):
    project, _ = finished
    status, lines, _ = checkpoint(capsys, "show", project.run_dir)
    text = "\n".join(lines)
    assert status == 0
    assert lines[0].startswith(f"{project.run_dir}/checkpoints/step-00000006: format 2, save ")
    assert "step       6" in lines and "tokens     1,536" in lines
    assert "fingerprint" in text and "torch 2." in text
    [model] = [line for line in lines if line.startswith("model ")]
    manifest = manifests.read(project.run_dir / "checkpoints" / "step-00000006")
    assert "F32" in model and "numbers" in model
    assert "  optimizer.lr: 0.003" in lines and "  model.blocks.m.d_state: 8" in lines
    assert not any(line.startswith("  model.blocks.m.expand") for line in lines)  # at its default
    assert lines.count("  model.blocks.s.type: shared_attention") == 1
    bucket = MountedStore(tmp_path / "mounted")
    upload(bucket, project.run_dir / "checkpoints" / "step-00000006")
    remote = checkpoint(capsys, "show", bucket.url)[1]
    assert remote[0].startswith(f"{bucket.url}/step-00000006: format 2, save {manifest.save_id}")
    assert remote[1:] == lines[1:]


def test_show_beside_a_config(finished, tmp_path, capsys):
    project = Project(tmp_path, finished[0].shards)
    project.write({"optimizer.lr": 0.1, "train.microbatch_size": 1})
    _, lines, _ = checkpoint(capsys, "show", finished[0].run_dir, "--config", tmp_path / "run.yaml")
    [row] = lines[lines.index(next(line for line in lines if line.startswith("config "))) + 1 :]
    assert row == "  optimizer.lr: 0.003 -> 0.1"


@pytest.mark.parametrize("action", ["ls", "show", "verify"])
def test_where_there_is_nothing(tmp_path, capsys, action):
    for place, message in ((tmp_path, "holds no checkpoint"), (tmp_path / "absent", "no such folder")):
        status, lines, error = checkpoint(capsys, action, place)
        assert status == 2 and not lines and message in error


def test_nothing_but_convert_needs_torch(finished, tmp_path):
    shutil.copytree(finished[0].run_dir / "checkpoints" / "step-00000006", tmp_path / "one")
    program = (
        "from llmtrain.cli import main\n"
        f"assert main(['checkpoint', 'show', {str(tmp_path / 'one')!r}]) == 0\n"
        f"for place in {list(three_steps(tmp_path))!r}:\n"
        "    for words in (['ls', place], ['verify', place], ['rm', place, '--step', '10']):\n"
        "        assert main(['checkpoint', *words]) == 0\n"
    )
    assert "torch" not in modules_after(program)
