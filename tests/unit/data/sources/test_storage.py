"""Sources in an S3-compatible store, read by ranges, from a server on this machine."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.spec import AbstractBufferedFile

from llmtrain.cli import main
from llmtrain.data.partitions import cutting as partitions
from llmtrain.data.prepare import prepare
from llmtrain.data.sources import storage
from llmtrain.data.sources.files import PassedOver, PrepareError, list_files
from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.errors import RunError
from tests.support.prepared import digests
from tests.support.stores import BUCKET, S3, serving


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving() as made:
        yield made


def put(server: S3, key: str, content: bytes) -> None:
    server.client.put_object(Bucket=BUCKET, Key=key, Body=content)


def test_an_address_is_an_object_a_folder_or_a_glob(server):
    for name in ("a/1.jsonl", "a/b/2.jsonl", "a/3.txt", "a/picture.png", "a/.hidden/4.txt"):
        put(server, f"listed/{name}", b"x")
    root = f"s3://{BUCKET}/listed"
    left_out = PassedOver()
    assert [file.name for file in list_files([root], left_out)] == ["a/1.jsonl", "a/3.txt", "a/b/2.jsonl"]
    assert left_out.lines() == ["1 hidden: a/.hidden/4.txt", "1 of another kind (.png): a/picture.png"]
    assert [file.name for file in list_files([f"{root}/a/*.jsonl"])] == ["1.jsonl"]
    assert [file.name for file in list_files([f"{root}/**/*.jsonl"])] == ["a/1.jsonl", "a/b/2.jsonl"]
    assert [(file.name, file.size) for file in list_files([f"{root}/a/3.txt"])] == [("3.txt", 1)]


def test_a_place_without_objects_is_an_error(server):
    with pytest.raises(PrepareError, match=f"s3://{BUCKET}/nothing: "):
        list_files([f"s3://{BUCKET}/nothing"])
    with pytest.raises(PrepareError, match="gs://bucket/x: is no address that is read here; give s3:// or hf://"):
        list_files(["gs://bucket/x"])


def test_shards_are_those_of_the_same_files_on_this_machine(server, corpus, records, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 10_000)
    table = io.BytesIO()
    texts = [json.loads(line)["text"] for line in records.read_text("utf-8").splitlines()]
    pq.write_table(pa.table({"text": texts}), table, row_group_size=20)
    (corpus / "rows.parquet").write_bytes(table.getvalue())
    records.rename(corpus / "records.jsonl")
    for file in corpus.rglob("*.*"):
        put(server, f"corpus/{file.relative_to(corpus).as_posix()}", file.read_bytes())
    here = prepare(settings(corpus), progress=False)
    there = prepare(settings(f"s3://{BUCKET}/corpus", out=str(tmp_path / "there")), progress=False)
    found, expected = digests(there.out), digests(here.out)
    for name in ("manifest.json", "partitions/sources"):  # which name the sources
        del found[name], expected[name]
    assert found == expected
    assert len(here.manifest["partitions"]) > 10


class HubFile(AbstractBufferedFile):
    """A file as the hub's client gives it, with `content` behind it."""

    content = b""

    def _fetch_range(self, start, end):
        return self.content[start:end]


@pytest.fixture
def hub(monkeypatch) -> type[HubFile]:
    """A hub of one file, datasets/a/b/records.jsonl."""

    class File(HubFile):
        pass

    def find(root, detail):
        return {"datasets/a/b/records.jsonl": {"size": len(File.content), "blob_id": "0123456789abcdef"}}

    def open(path, mode, block_size):
        return File(SimpleNamespace(), path, mode, block_size, size=len(File.content))

    monkeypatch.setattr(storage, "_hub", lambda: SimpleNamespace(find=find, open=open))
    return File


def test_data_sets_of_the_hub_are_read_as_files_are(hub, records, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 10_000)
    hub.content = records.read_bytes()
    here = prepare(settings(records), progress=False)
    there = prepare(settings("hf://datasets/a/b", out=str(tmp_path / "there")), progress=False)
    assert there.manifest["splits"] == here.manifest["splits"]
    assert len(there.manifest["partitions"]) > 2


class HttpError(Exception):
    """An error of an HTTP library: no OSError."""


def test_a_store_that_fails_is_no_damaged_file(hub, records, settings, monkeypatch):
    hub.content = records.read_bytes()
    fetch = hub._fetch_range
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 10_000)
    monkeypatch.setattr("llmtrain.data.partitions.prepared_folder.HASHED_BYTES", 0)
    monkeypatch.setattr(storage, "_BUFFER_BYTES", 1000)

    def failing(self, start, end):
        if start > 15_000:
            raise HttpError("503")
        return fetch(self, start, end)

    config = settings("hf://datasets/a/b", max_bad=1.0, vocab_size=None, tokenizer=str(_tokenizer(records.parent)))
    hub._fetch_range = failing
    with pytest.raises(RunError, match=r"records\.jsonl could not be read from its store \(HttpError: 503\)"):
        prepare(config, progress=False)
    hub._fetch_range = fetch
    assert prepare(config, progress=False).manifest["skipped"]["count"] == 0


def _tokenizer(folder: Path) -> Path:
    train_bpe(["the quick brown fox"], 257).save(folder / "tokenizer")
    return folder / "tokenizer"


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch):
    def find(root, detail):
        raise HttpError("no route")

    monkeypatch.setattr(storage, "_hub", lambda: SimpleNamespace(find=find))
    with pytest.raises(PrepareError, match="hf://datasets/a/b: HttpError: no route"):
        list_files(["hf://datasets/a/b"])


def test_shards_in_a_store_are_shown_and_verified(server, corpus, settings, monkeypatch, capsys):
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 10_000)
    out = prepare(settings(corpus), progress=False).out
    for file in out.rglob("*"):
        if file.is_file():
            put(server, f"prepared/{file.relative_to(out).as_posix()}", file.read_bytes())
    address = f"s3://{BUCKET}/prepared"
    assert main(["data", "show", address, "--ids", "3"]) == 0
    shown = capsys.readouterr().out
    assert main(["data", "show", str(out), "--ids", "3"]) == 0
    assert shown.splitlines()[-1] in capsys.readouterr().out
    assert main(["data", "verify", address]) == 0
    assert capsys.readouterr().out.count(": good (") == 2
    first, second = sorted((out / "train").glob("*.mds"))[:2]
    server.flip(f"prepared/train/{first.name}")
    server.client.delete_object(Bucket=BUCKET, Key=f"prepared/train/{second.name}")
    put(server, "prepared/train/stray.00000.mds", b"x")
    assert main(["data", "verify", address]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 3 and any(first.name in line for line in wrong) and "stray" in wrong[2]
    assert any(f"{second.name}: missing" in line for line in wrong)
    assert main(["data", "verify", f"s3://{BUCKET}/nothing"]) == 2
