"""The tokenizer that a run was trained with: its checkpoints hold it, whatever becomes of the data folder."""

import json
import shutil
from pathlib import Path

import pytest

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.cli import main
from llmtrain.data.tokenize import stored_tokenizer
from llmtrain.data.tokenize.tokenizer import TokenizerError, load_tokenizer, train_bpe
from llmtrain.eval.scoring.load import find_model, find_tokenizer
from tests.support.checkpoints import edit_manifest, flip_bit
from tests.support.project import Project, copy_of

GENERATE = ["--prompt", "the quick", "--max-new-tokens", "8", "--temperature", "0"]


@pytest.fixture
def moved(finished, tmp_path) -> tuple[Project, Path]:
    """A copy of a run whose checkpoint names a data folder of its own, and the folder of its newest checkpoint."""
    project = copy_of(finished, tmp_path)
    project.shards = tmp_path / "data"
    shutil.copytree(finished[0].shards, project.shards)
    project.write({})
    folder = project.run_dir / "checkpoints" / "step-00000006"
    config = manifests.read(folder).config
    for split in ("train", "validation"):
        config["data"][split]["streams"]["text"]["local"] = str(project.shards)
    edit_manifest(folder, config=config)
    return project, folder


def generated(capsys, *arguments: object) -> str:
    assert main(["generate", *map(str, arguments), *GENERATE]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def replace_tokenizer(project: Project) -> None:
    shutil.rmtree(project.shards / "tokenizer")
    train_bpe(["pack my box with five dozen liquor jugs " * 30], 270).save(project.shards / "tokenizer")


def test_generate_eval_and_export_read_the_runs_own(moved, tmp_path, capsys):
    project, folder = moved
    own = load_tokenizer(project.shards / "tokenizer").backend.to_str()
    before = generated(capsys, project.run_dir)
    replace_tokenizer(project)
    assert generated(capsys, project.run_dir) == before
    shutil.rmtree(project.shards)  # as where the run was copied to another machine
    assert generated(capsys, folder) == before
    assert main(["export", str(folder), str(tmp_path / "hf")]) == 0
    assert main(["checkpoint", "convert", "--to", "llmtrain", str(folder), str(tmp_path / "converted")]) == 0
    capsys.readouterr()
    assert generated(capsys, tmp_path / "converted") == before
    manifests.verify(tmp_path / "converted", manifests.read(tmp_path / "converted"))
    for place in (folder, tmp_path / "hf", tmp_path / "converted"):
        assert find_tokenizer(find_model(str(place))).backend.to_str() == own


def test_a_run_does_not_go_on_with_another_tokenizer(moved):
    project, _ = moved
    replace_tokenizer(project)
    status, text = project.llmtrain("train", "run.yaml", "train.duration=8 steps")
    assert status == 2
    assert (
        f"data: {project.shards}/tokenizer is another tokenizer (" in text
        and "than the one that the run was started" in text
    )


def test_weights_of_another_tokenizer_than_the_datas_are_reported(moved):
    project, _ = moved
    start = ("train", "run.yaml", "name=next", "run_dir=next", f"init_from={project.run_dir}", "train.duration=1 steps")
    said = "is another tokenizer ("
    assert said not in project.llmtrain(*start, "schedule.warmup=0 steps")[1]
    replace_tokenizer(project)
    status, text = project.llmtrain(*start, "schedule.warmup=0 steps", "--fresh")
    assert status == 0 and said in text and "than the one that the weights of init_from were trained with" in text


def test_another_template_or_layout_of_the_file_is_the_same_tokenizer(moved):
    project, folder = moved
    place, file = project.shards / "tokenizer", folder / stored_tokenizer.NAME
    content = file.read_bytes()
    assert stored_tokenizer.same_tokens(content, file, place)
    (place / "chat_template.jinja").write_text("{{ messages }}")
    (place / "tokenizer.json").write_text(" " + (place / "tokenizer.json").read_text())
    assert stored_tokenizer.same_tokens(content, file, place)
    config = (place / "tokenizer_config.json").read_text()
    (place / "tokenizer_config.json").write_text(config.replace("<|endoftext|>", "e"))
    assert not stored_tokenizer.same_tokens(content, file, place)


def test_a_damaged_one_is_named(moved, capsys):
    project, folder = moved
    flip_bit(folder / stored_tokenizer.NAME, 100)
    assert main(["generate", str(project.run_dir), *GENERATE]) == 2
    assert f"{stored_tokenizer.NAME} is not what was written" in capsys.readouterr().err


def test_a_checkpoint_from_before_reads_the_data_folders_and_then_needs_one_named(moved, tmp_path, capsys):
    project, folder = moved
    before = generated(capsys, project.run_dir)
    files = {name: record for name, record in manifests.read(folder).files.items() if name != stored_tokenizer.NAME}
    (folder / stored_tokenizer.NAME).unlink()
    edit_manifest_of_missing_file(folder, files)
    assert generated(capsys, project.run_dir) == before
    (project.shards / "tokenizer").rename(tmp_path / "elsewhere")
    for command in (["generate"], ["export"]):
        rest = GENERATE if command == ["generate"] else [str(tmp_path / "out")]
        assert main([*command, str(project.run_dir), *rest]) == 2
        assert "name one with --tokenizer" in capsys.readouterr().err
    assert generated(capsys, project.run_dir, "--tokenizer", tmp_path / "elsewhere") == before


def edit_manifest_of_missing_file(folder: Path, files: dict) -> None:
    text = (folder / manifests.NAME).read_bytes()
    manifest = manifests.parse(folder, text)
    manifests.write(folder, manifests.Manifest(**{**vars(manifest), "files": files}))


def test_a_packed_tokenizer_writes_nothing_elsewhere(tmp_path):
    for name in ("../x", "/tmp/x", "a/../../x"):
        content = json.dumps({name: "x"}).encode()
        with pytest.raises(TokenizerError, match="holds no tokenizer"):
            stored_tokenizer.unpack(content, tmp_path / "file")


def test_the_next_commands_ask_for_a_tokenizer_where_there_is_none(finished, tmp_path):
    assert "generate" in finished[1] and "--tokenizer" not in finished[1].partition("next:")[2]
    shards = tmp_path / "foundry"  # as LLM Foundry's scripts write them
    shutil.copytree(finished[0].shards, shards, ignore=shutil.ignore_patterns("tokenizer"))
    project = Project(tmp_path, shards)
    project.write({"eval.prompt": None})
    status, text = project.llmtrain("train", "run.yaml")
    assert status == 0, text
    assert text.partition("next:")[2].count("--tokenizer TOKENIZER") >= 1
    [folder] = (project.run_dir / "checkpoints").iterdir()
    assert stored_tokenizer.NAME not in manifests.read(folder).files
