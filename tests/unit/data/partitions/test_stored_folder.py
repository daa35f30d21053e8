"""A prepared folder in a store: made by several machines, which share nothing else, it is what one makes on its disk."""

import json
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.data.partitions import cutting as partitions
from llmtrain.data.partitions import stored_folder
from llmtrain.data.partitions.maker import PartitionMaker
from llmtrain.data.prepare import Part, PartState, PrepareError, prepare, prepare_part
from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.errors import RunError
from tests.support.prepared import digests
from tests.support.stores import BUCKET, S3
from tests.unit.data.sources.test_storage import put, server

__all__ = ["server"]


@pytest.fixture
def here(tmp_path, corpus, records, settings, monkeypatch) -> Path:
    """What one machine makes on its own disk, in some seven partitions."""
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 25_000)
    train_bpe(["the quick brown fox"], 257).save(tmp_path / "tokenizer")
    records.rename(corpus / "records.jsonl")
    return prepare(given(settings, corpus), progress=False).out


def given(settings, corpus, **changes):
    root = corpus.parent
    return settings(corpus, vocab_size=None, tokenizer=str(root / "tokenizer"), **changes)


def fetched(server: S3, prefix: str, folder: Path) -> Path:
    for name in server.names(prefix):
        if name.endswith("/"):  # a mark that pyarrow leaves where it has removed something
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.client.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}")["Body"].read())
    return folder


@pytest.mark.ci
def test_parts_of_several_machines_meet_in_a_store(server, here, corpus, settings, tmp_path):
    for file in corpus.rglob("*.*"):
        put(server, f"texts/{file.relative_to(corpus).as_posix()}", file.read_bytes())
    address, source = f"s3://{BUCKET}/made/parts", f"s3://{BUCKET}/texts"

    def machine(name: str):
        return given(settings, corpus, sources=[source], out=str(tmp_path / name / "scratch"))

    assert prepare_part(machine("a"), Part(2, 3), progress=False, address=address) is PartState.MADE
    assert not list((tmp_path / "a").rglob("*.mds*"))  # a disk holds what is being made alone
    with pytest.raises(PrepareError, match="partitions are not in"):
        prepare(machine("b"), progress=False, merge_only=True, address=address)
    assert prepare_part(machine("b"), Part(1, 3), progress=False, address=address) is PartState.MADE
    assert prepare_part(machine("c"), Part(3, 3), progress=False, address=address) is PartState.MADE
    put(server, "made/parts/train/stray.00000.mds", b"of other settings")
    made = prepare(machine("d"), progress=False, merge_only=True, address=address)
    assert address in made.summary() and not list((tmp_path / "d").rglob("*.mds*"))
    assert prepare_part(machine("a"), Part(2, 3), progress=False, address=address) is PartState.MERGED
    found, expected = digests(fetched(server, "made/parts", tmp_path / "fetched")), digests(here)
    for name in ("manifest.json", "partitions/sources"):  # which name the sources
        del found[name], expected[name]
    assert found == expected
    assert prepare(machine("e"), progress=False, address=address).reused
    with pytest.raises(PrepareError, match=r"s3://.*made/parts holds shards made otherwise:\n  seq_len"):
        prepare(machine("e").model_copy(update={"seq_len": 16}), progress=False, address=address)


def test_a_machine_that_dies_loses_what_was_not_brought(server, here, corpus, settings, tmp_path, monkeypatch):
    address, made, failures = f"s3://{BUCKET}/made/killed", [], [3, 4]
    write, call = stored_folder.write_remote, PartitionMaker.__call__

    def failing(to: str, content: bytes) -> None:
        if to.endswith(".json") and len(made) in failures:
            failures.remove(len(made))
            raise RunError("the network is gone")
        write(to, content)

    def counting(self, *args):
        made.append(args[0].id)
        return call(self, *args)

    monkeypatch.setattr(stored_folder, "write_remote", failing)
    monkeypatch.setattr(PartitionMaker, "__call__", counting)
    for name in ("a", "b"):  # another machine, which has nothing
        with pytest.raises(RunError, match="gone"):
            prepare(given(settings, corpus, out=str(tmp_path / name)), progress=False, address=address)
    prepare(given(settings, corpus, out=str(tmp_path / "b")), progress=False, address=address)
    assert len(made) == 1 + len(set(made))  # b's own is brought without making it again
    assert digests(fetched(server, "made/killed", tmp_path / "fetched")) == digests(here)


@pytest.mark.parametrize(
    ("changes", "out", "said"),
    [
        ({"vocab_size": 300, "tokenizer": None}, f"s3://{BUCKET}/x", "name it with --tokenizer"),
        ({"dedup": True}, f"s3://{BUCKET}/x", "--dedup compares"),
        ({}, "gs://bucket/x", "expected a folder on this machine, or s3://BUCKET/FOLDER"),
        ({}, f"s3://{BUCKET}", "expected a folder on this machine, or s3://BUCKET/FOLDER"),
        ({}, "hf://datasets/a/b", "expected a folder on this machine, or s3://BUCKET/FOLDER"),
    ],
)
def test_what_a_store_cannot_have_is_reported(settings, changes, out, said):
    with pytest.raises(PrepareError, match=said):
        prepare(settings("x", **({"tokenizer": "t", "vocab_size": None} | changes)), progress=False, address=out)


def test_the_command_takes_an_address(server, here, corpus, tmp_path, capsys, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    address = f"s3://{BUCKET}/made/command"
    command = ["prepare", str(corpus), "--out", address, "--tokenizer", str(tmp_path / "tokenizer"), "--seq-len", "32"]
    command += ["--workers", "1", "--validation-fraction", "0.2"]
    assert main([*command, "--part", "1/2"]) == main([*command, "--part", "2/2"]) == main([*command, "--merge"]) == 0
    assert f"{address}: made" in capsys.readouterr().out
    assert main(["data", "verify", address]) == 0
    manifest = json.loads(server.client.get_object(Bucket=BUCKET, Key="made/command/manifest.json")["Body"].read())
    assert manifest["splits"] == json.loads((here / "manifest.json").read_text())["splits"]
    assert main(["prepare", "--stream", f"a={corpus}", *command[2:]]) == 2
    assert main(["prepare", f"s3://{BUCKET}/made", *command[2:]]) == 2  # of which it would become a part
