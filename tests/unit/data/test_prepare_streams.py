"""One folder for each stream of a mixture, and the settings that train on them."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import ValidationError

from llmtrain.cli import main
from llmtrain.data.prepare import PreparedFolder
from llmtrain.data.prepare_problems import _folder_problems
from llmtrain.data.prepare_streams import DATA_YAML, hold_out, prepare_all, prepare_streams
from llmtrain.data.shards.checks import check_streams
from llmtrain.data.sources.files import PrepareError
from llmtrain.data.tokenize.end_of_document import check_documents
from llmtrain.data.tokenize.stored_tokenizer import run_tokenizer_path
from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.schema.data import DataConfig, PrepareConfig
from tests.support.prepared import digests, documents
from tests.unit.data.conftest import some_text


@pytest.fixture
def sources(tmp_path) -> dict[str, list[str]]:
    """A stream of two sources, and one of another format and size."""
    made = {}
    for number, count in enumerate((200, 100, 50)):
        made[number] = tmp_path / f"{number}.jsonl"
        made[number].write_text(
            "".join(json.dumps({"text": f"{number} " + some_text(i, 60)}) + "\n" for i in range(count))
        )
    return {"web": [str(made[0]), str(made[1])], "code": [str(made[2])]}


def config(tmp_path: Path, **changes) -> PrepareConfig:
    values = {"out": str(tmp_path / "out"), "vocab_size": 300, "seq_len": 32, "workers": 1}
    return PrepareConfig.model_validate(values | {"validation_fraction": 0.2} | changes)


def test_each_stream_has_its_folder_and_all_have_one_tokenizer(tmp_path, sources):
    made = prepare_streams(config(tmp_path, streams=sources), progress=False)
    assert set(made.folders) == {"web", "code"}
    tokenizers = {(tmp_path / "out" / name / "tokenizer/tokenizer.json").read_text() for name in sources}
    assert len(tokenizers) == 1
    for name, begins in (("web", {"0", "1"}), ("code", {"2"})):
        assert {text[:1] for text in documents(tmp_path / "out" / name, "train")[:-1] if text} >= begins
    counts = [made.folders[name].manifest["inputs"]["files"]["count"] for name in ("web", "code")]
    assert counts == [2, 1]


def test_the_yaml_is_the_data_of_a_run(tmp_path, sources):
    prepare_streams(config(tmp_path, streams=sources), progress=False)
    content = yaml.safe_load((tmp_path / "out" / DATA_YAML).read_text())
    data = DataConfig.model_validate(content["data"] | {"num_canonical_nodes": 1})
    assert check_streams(data, 4) == []
    shares = {name: stream.proportion for name, stream in data.train_streams().items()}
    assert sum(filter(None, shares.values())) == pytest.approx(1, abs=1e-5)
    assert (shares["web"] or 0) == pytest.approx(6 / 7, abs=0.05)
    assert set(data.validation_streams()) == {"web", "code"}


def test_the_same_command_finds_all_there_and_parts_of_a_change_are_reported(tmp_path, sources):
    first = prepare_streams(config(tmp_path, streams=sources), progress=False)
    before = digests(tmp_path / "out")
    again = prepare_streams(config(tmp_path, streams=sources), progress=False)
    assert [one.reused for one in first.folders.values()] == [False, False]
    assert [one.reused for one in again.folders.values()] == [True, True]
    assert digests(tmp_path / "out") == before
    with pytest.raises(PrepareError, match="seq_len: 32 then, 64 now"):
        prepare_streams(config(tmp_path, streams=sources, seq_len=64), progress=False)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt"])
def test_about_so_many_tokens_are_held_out(tmp_path, kind):
    """Whatever the format: other fields, compression and columns do not count."""
    texts = [some_text(seed, 80) for seed in range(1500)]
    train_bpe(texts[:20], 300).save(tmp_path / "tokenizer")
    source = tmp_path / f"source.{kind}"
    lines = "".join(json.dumps({"id": "x" * 300, "text": text}) + "\n" for text in texts).encode()
    if kind == "parquet":
        pq.write_table(
            pa.table({"text": texts, "other": [f"{n}" * 90 for n in range(1500)]}), source, row_group_size=500
        )
    elif kind == "txt":
        source = tmp_path / "texts"
        source.mkdir()
        for number, text in enumerate(texts):
            (source / f"{number}.txt").write_text(text)
    else:
        source.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    given = {"vocab_size": None, "tokenizer": str(tmp_path / "tokenizer"), "sources": [str(source)]}
    made = prepare_all(config(tmp_path, **given, validation_tokens=20_000), progress=False)
    assert isinstance(made, PreparedFolder)
    assert 14_000 < made.split("validation")["tokens"] < 32_000
    with pytest.raises(PrepareError, match="more than half"):
        hold_out(config(tmp_path, **given, validation_tokens=10_000_000))


def test_a_few_more_files_hold_out_the_same_documents(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(200):
        (folder / f"{number}.txt").write_text(some_text(number, 50))
    given = config(tmp_path, sources=[str(folder)], validation_tokens=1000)
    before = hold_out(given).validation_fraction
    (folder / "more.txt").write_text(some_text(1, 50))
    assert hold_out(given).validation_fraction == before


def test_streams_in_a_runs_yaml_are_its_streams(tmp_path, sources):
    """They count by their size until data.mixture names them; with tokens held out of each."""
    given = {
        "prepare": config(tmp_path, streams=sources, validation_tokens=500),
        "seq_len": 32,
        "num_canonical_nodes": 1,
    }
    data = DataConfig.model_validate(given)
    assert data.prepare is not None and check_streams(data, 4) == [] and list(check_documents(data)) == []
    prepare_all(data.prepare, progress=False)
    folders = {name: str(tmp_path / "out" / name) for name in sources}
    for split, streams in (("train", data.train_streams()), ("validation", data.validation_streams())):
        assert {name: (stream.local, stream.split) for name, stream in streams.items()} == {
            name: (folder, split) for name, folder in folders.items()
        }
    assert (
        check_streams(data, 4) == [] and list(_folder_problems(data.prepare, list(data.prepare.each().values()))) == []
    )
    assert run_tokenizer_path(data.model_dump(mode="json")) == str(tmp_path / "out" / "tokenizer")
    mixed = [{"proportions": {"web": 0.5, "code": 0.5}}]
    assert DataConfig.model_validate(given | {"mixture": mixed}).order_name == "mixed"
    with pytest.raises(ValidationError, match=r"is no stream of data\.train"):
        DataConfig.model_validate(given | {"mixture": [{"proportions": {"web": 1, "code": 1, "books": 1}}]})
    other = data.prepare.model_copy(update={"text_key": "body"})
    [problem] = _folder_problems(other, list(other.each().values()))
    assert problem.path == "text_key" and str(tmp_path / "out/web") in problem.message


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, "give either sources, or streams"),
        ({"sources": ["a"], "streams": {"b": ["c"]}}, "not both"),
        ({"streams": {"train": ["c"]}}, "is a folder of prepare's own"),
        ({"streams": {"a/b": ["c"]}}, "is no name of letters"),
        ({"streams": {"a": []}}, "at least 1 item"),
        ({"sources": ["a"], "validation_tokens": 5, "validation_fraction": 0.0}, "has no effect"),
    ],
)
def test_streams_that_cannot_be(tmp_path, changes, said):
    with pytest.raises(ValidationError, match=said):
        config(tmp_path, **changes)


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "give sources"),
        (["a.txt", "--stream", "b=c"], "not both"),
        (["--stream", "b=c", "--merge"], "one stream at a time"),
    ],
)
def test_streams_and_sources_exclude_each_other(tmp_path, capsys, words, said):
    assert main(["prepare", *words, "--out", str(tmp_path / "out"), "--vocab-size", "300"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["a", "=b", "a/b=c", "train=c", "a="])
def test_a_stream_has_a_name_and_a_source(tmp_path, capsys, wrong):
    with pytest.raises(SystemExit):
        main(["prepare", "--stream", wrong, "--out", str(tmp_path / "out"), "--vocab-size", "300"])
    assert "--stream" in capsys.readouterr().err


def test_the_command_prints_where_the_streams_are(tmp_path, sources, capsys):
    given = [word for name, some in sources.items() for one in some for word in ("--stream", f"{name}={one}")]
    assert main(["prepare", *given, "--out", str(tmp_path / "out"), "--vocab-size", "300", "--seq-len", "32"]) == 0
    out = capsys.readouterr().out
    assert "web: " in out and f"{tmp_path / 'out' / DATA_YAML}: the streams" in out
