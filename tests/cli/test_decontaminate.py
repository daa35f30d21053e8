"""`llmtrain decontaminate`: its table and refusals."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter

from llmtrain.cli import main
from llmtrain.schema.data import PrepareConfig
from tests.support.icl import byte_level, some_sentence
from tests.support.pickled import Bomb


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """prepared/: shards of which two hold the first and the third document of task mine; eval.yaml: tasks mine, other."""
    from llmtrain.data.prepare import prepare

    folder, rng = tmp_path_factory.mktemp("overlap"), random.Random(5)
    for name in ("mine", "other"):
        records = [{"context": some_sentence(rng, 30), "continuation": some_sentence(rng, 2)} for _ in range(6)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        task = {"name": name, "type": "language_modeling", "source": {"path": f"{name}.jsonl"}}
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    run = {"name": "try", "tasks": [str(folder / "mine.yaml"), str(folder / "other.yaml")]}
    (folder / "eval.yaml").write_text(json.dumps(run | {"out": str(folder / "results")}))
    lines = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    leaks = [f"{one['context']} {one['continuation']}" for one in (lines[0], lines[2])]
    text = [some_sentence(rng, 200), leaks[0], some_sentence(rng, 200), leaks[1], some_sentence(rng, 200)]
    (folder / "text.txt").write_text("\n".join(text))
    byte_level().save(folder / "tokenizer")
    made = {"sources": [str(folder / "text.txt")], "out": str(folder / "prepared"), "seq_len": 512}
    settings = made | {"tokenizer": str(folder / "tokenizer"), "validation_fraction": 0.0, "workers": 1}
    prepare(PrepareConfig.model_validate(settings), progress=False)
    return folder


def hits(out: Path) -> dict[str, list[int]]:
    content = json.loads((out / "overlap.json").read_text())
    return {
        one["task"]: sorted(int(hit["document"].rpartition(":")[2]) for hit in one["hits"]) for one in content["tasks"]
    }


@pytest.mark.parametrize("data", ["prepared", "prepared/train", "text.txt"])
def test_leaks_are_counted_by_task(place, tmp_path, capsys, data):
    tokenizer = ["--tokenizer", str(place / "tokenizer")] if data == "text.txt" else []
    assert main(["decontaminate", str(place / "eval.yaml"), str(place / data), *tokenizer, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert hits(tmp_path) == {"mine": [1, 3], "other": []}
    assert "| mine | 6 | 6 | 2 | 33.33 | 2 |" in said and "| other | 6 | 6 | 0 | 0.00 | 0 |" in said
    assert (tmp_path / "overlap.md").read_text() in said


def test_several_sources_and_few_documents(place, tmp_path):
    leak = json.loads((place / "other.jsonl").read_text().splitlines()[1])["context"]
    (tmp_path / "more.jsonl").write_text(json.dumps({"body": leak}) + "\n")
    command = ["decontaminate", str(place / "eval.yaml"), str(place / "prepared"), str(tmp_path / "more.jsonl")]
    assert main([*command, "--text-key", "body", "--out", str(tmp_path / "a")]) == 0
    assert hits(tmp_path / "a") == {"mine": [1, 3], "other": [2]}
    assert main([*command, "--text-key", "body", "--limit", "1", "--out", str(tmp_path / "b")]) == 0
    assert hits(tmp_path / "b") == {"mine": [1], "other": []}


def test_tasks_without_documents_are_named_and_the_others_compared(place, tmp_path, capsys):
    run = json.loads((place / "eval.yaml").read_text()) | {"out": str(tmp_path / "out")}
    for name in ("gone", "broken"):
        task = {"name": name, "type": "language_modeling", "source": {"path": f"{name}.jsonl"}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    (tmp_path / "broken.jsonl").write_text("{\n")
    missing = [str(tmp_path / "gone.yaml"), str(tmp_path / "broken.yaml")]

    (tmp_path / "eval.yaml").write_text(json.dumps(run | {"tasks": [missing[0], *run["tasks"], missing[1]]}))
    assert main(["decontaminate", str(tmp_path / "eval.yaml"), str(place / "prepared")]) == 2
    said = capsys.readouterr()
    assert hits(tmp_path / "out") == {"mine": [1, 3], "other": []}
    for text in (said.err, (tmp_path / "out" / "overlap.md").read_text()):
        assert "gone" in text and "gone.jsonl" in text and "broken" in text and "broken.jsonl" in text
    failed = json.loads((tmp_path / "out" / "overlap.json").read_text())["failed"]
    assert [one["task"] for one in failed] == ["gone", "broken"]

    (tmp_path / "eval.yaml").write_text(json.dumps(run | {"tasks": missing, "out": str(tmp_path / "none")}))
    assert main(["decontaminate", str(tmp_path / "eval.yaml"), str(place / "prepared")]) == 2
    said = capsys.readouterr().err
    assert "gone: not compared: " in said and "broken: not compared: " in said and not (tmp_path / "none").exists()


def test_what_cannot_be_compared_is_refused(place, tmp_path, capsys):
    def refused(*arguments: object) -> str:
        assert (
            main(["decontaminate", str(place / "eval.yaml"), *map(str, arguments), "--out", str(tmp_path / "x")]) == 2
        )
        assert not (tmp_path / "x").exists()
        return capsys.readouterr().err

    assert "none: no such file or folder" in refused(tmp_path / "none")
    assert "no tokenizer beside the data; name the one it was made with by --tokenizer" in refused(place / "text.txt")
    assert "n-grams of 4000 tokens: the longest document has" in refused(place / "prepared", "--n", 4000)
    assert "give at least 2" in refused(place / "prepared", "--n", 1)
    byte_level(bos=True).save(tmp_path / "other")
    assert "which is another tokenizer than" in refused(place / "prepared", "--tokenizer", tmp_path / "other")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "index.json").write_text('{"shards": [], "version": 2}')
    command = [tmp_path / "empty", "--tokenizer", place / "tokenizer"]
    assert f"{tmp_path / 'empty'} is empty: there is nothing to compare" in refused(*command)
    (tmp_path / "splits" / "validation").mkdir(parents=True)
    (tmp_path / "splits" / "validation" / "index.json").write_text('{"shards": [], "version": 2}')
    assert f"did you mean {tmp_path / 'splits' / 'validation'}?" in refused(tmp_path / "splits")


def test_ids_that_the_tokenizer_lacks_are_another_tokenizers(place, tmp_path, capsys):
    from llmtrain.data.tokenize.tokenizer import train_bpe

    train_bpe(["abc"], 257).save(tmp_path / "small")
    (tmp_path / "shards").symlink_to(place / "prepared" / "train")
    command = ["decontaminate", str(place / "eval.yaml"), str(tmp_path / "shards")]
    assert main([*command, "--tokenizer", str(tmp_path / "small")]) == 2
    assert "but the tokenizer has 257: it is not the one the shards were made with" in capsys.readouterr().err


def test_a_pickled_column_is_refused_unread(place, tmp_path, capsys):
    """StreamingDataset's decoder would unpickle it, and so run what it holds."""
    mark = tmp_path / "was-run"
    with MDSWriter(columns={"tokens": "ndarray:uint16:8", "more": "pkl"}, out=str(tmp_path / "shards")) as writer:
        writer.write({"tokens": np.zeros(8, np.uint16), "more": Bomb(mark)})
    command = ["decontaminate", str(place / "eval.yaml"), str(tmp_path / "shards")]
    assert main([*command, "--tokenizer", str(place / "tokenizer"), "--out", str(tmp_path / "out")]) == 2
    assert "is a pickle, which may run any code" in capsys.readouterr().err and not mark.exists()


def test_a_damaged_shard_is_not_compared(place, tmp_path, capsys):
    shutil.copytree(place / "prepared", tmp_path / "prepared")
    index = tmp_path / "prepared/train/index.json"
    content = json.loads(index.read_text())
    content["shards"][0]["samples"] -= 1
    index.write_text(json.dumps(content))
    assert main(["decontaminate", str(place / "eval.yaml"), str(tmp_path / "prepared"), "--out", str(tmp_path)]) == 2
    assert "is damaged: it holds" in capsys.readouterr().err
