"""Partitions: the same folder whatever made them, in whatever order, after whatever went wrong."""

import contextlib
import gzip
import json
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import xxhash
from pydantic import ValidationError
from streaming import MDSWriter

from llmtrain.cli import main
from llmtrain.data.partitions import cutting as partitions
from llmtrain.data.partitions.cutting import cut
from llmtrain.data.partitions.maker import PartitionMaker
from llmtrain.data.partitions.prepared_folder import MANIFEST
from llmtrain.data.prepare import Part, PrepareError, prepare, prepare_part
from llmtrain.data.shards.mds_writer import ShardWriter
from llmtrain.data.sources.files import SourceFile, list_files
from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.schema.data import PrepareConfig
from tests.support.prepared import digests, documents, stored_samples
from tests.unit.data.conftest import some_text

Settings = Callable[..., PrepareConfig]


@pytest.fixture
def small(monkeypatch) -> None:
    """Partitions of some 10 kB."""
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 10_000)


@pytest.fixture
def with_tokenizer(settings, tmp_path) -> Settings:
    """`settings` with a tokenizer that exists, on which added files have no effect."""
    train_bpe(["the quick brown fox"], 257).save(tmp_path / "tokenizer")
    return lambda source, **changes: settings(source, vocab_size=None, tokenizer=str(tmp_path / "tokenizer"), **changes)


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """Ids of the partitions that this process makes."""
    ids: list[str] = []
    call = PartitionMaker.__call__

    def counting(self, partition, *args, **kwargs):
        ids.append(partition.id)
        return call(self, partition, *args, **kwargs)

    monkeypatch.setattr(PartitionMaker, "__call__", counting)
    return ids


def contents(out: Path) -> dict[str, str]:
    return {name: digest for name, digest in digests(out).items() if name != MANIFEST}


@pytest.mark.parametrize("held_out, compression", [(False, "zstd"), (True, "zstd"), (True, "zstd:1"), (False, "none")])
def test_shards_are_those_of_mdswriter(tmp_path, held_out, compression, monkeypatch):
    monkeypatch.setattr("llmtrain.data.shards.mds_writer.SIZE_LIMIT", 1000)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, (100, 16)).astype(np.uint16)
    sizes = rng.integers(0, 60, (100, 1))
    columns = {"text_bytes": ("int", 8)} if held_out else {}
    ours = ShardWriter(tmp_path, "shard", columns | {"tokens": ("ndarray:uint16:16", 32)}, compression)
    rows = np.concatenate([sizes.view(np.uint8), tokens.view(np.uint8)], 1) if held_out else tokens.view(np.uint8)
    for part in np.split(rows, [1, 40, 41]):
        ours.write(part)
    theirs = MDSWriter(
        columns={name: encoding for name, (encoding, _) in columns.items()} | {"tokens": "ndarray:uint16:16"},
        out=str(tmp_path / "theirs"),
        compression=None if compression == "none" else compression,
        hashes=["xxh64"],
        size_limit=1000,
    )
    for sample, size in zip(tokens, sizes, strict=True):
        theirs.write({"tokens": sample} | ({"text_bytes": int(size[0])} if held_out else {}))
    theirs.finish()
    expected = json.loads((tmp_path / "theirs/index.json").read_text())["shards"]
    found = json.loads(json.dumps(ours.finish()))
    assert len(found) > 3
    for entry in found:
        part = entry["zip_data"] or entry["raw_data"]
        content = (tmp_path / part["basename"]).read_bytes()
        assert len(content) == part["bytes"] and xxhash.xxh64_hexdigest(content) == part["hashes"]["xxh64"]
    for entries in (found, expected):
        for entry in entries:  # another build of zstd may compress otherwise
            entry["zip_data"] = entry["zip_data"] and entry["zip_data"]["basename"]
    assert found == expected


@pytest.mark.parametrize("compression", ["zstd", "zstd:1"])
def test_shards_may_be_stored_otherwise(small, corpus, settings, tmp_path, compression):
    """The same samples; finished parts are kept, and what another compression made is not taken for them."""
    usual = prepare(settings(corpus), progress=False)
    config = settings(corpus, out=str(tmp_path / "apart"), compression=compression)
    prepare_part(settings(corpus, out=str(tmp_path / "apart")), Part(1, 1), progress=False)
    prepare_part(config, Part(2, 2), progress=False)
    made = prepare(config, progress=False)
    assert made.manifest["splits"] == usual.manifest["splits"]
    tokens = [[sample["tokens"].tolist() for sample in stored_samples(one.out, "train")] for one in (usual, made)]
    assert tokens[0] == tokens[1]
    for folder, suffix in ((usual.out, ".mds"), (made.out, ".zstd")):
        assert {file.suffix for file in (folder / "train").iterdir()} == {".json", suffix}
    assert prepare(config, progress=False).reused
    before = contents(made.out)
    assert contents(prepare(config, progress=False, overwrite=True).out) == before
    with pytest.raises(PrepareError, match=f"compression: '{compression}' then, 'none' now"):
        prepare(settings(corpus, out=str(tmp_path / "apart")), progress=False)


@pytest.mark.parametrize("written", ["gzip", "zstd:0", "zstd:23", "", "zstd:", "None"])
def test_a_compression_that_is_not_known_is_reported(settings, written):
    with pytest.raises(ValidationError, match="zstd:LEVEL"):
        settings("x", compression=written)


def files_of(sizes: dict[str, int]) -> list[SourceFile]:
    return [SourceFile(f"/{name}", name, size, 0, True) for name, size in sorted(sizes.items())]


def test_a_file_that_is_added_changes_one_partition():
    rng = random.Random(1)
    sizes = {f"{rng.random():.6f}.txt": rng.randint(100, 3000) for _ in range(500)}
    before = [tuple(part.file.name for part in slices) for slices in cut(files_of(sizes), "text", 10_000)]
    after = [
        tuple(part.file.name for part in slices) for slices in cut(files_of(sizes | {"0.5.txt": 500}), "text", 10_000)
    ]
    assert 40 < len(before) < 200
    assert len(set(after) - set(before)) <= 4
    assert sum(after, ()) == tuple(file.name for file in files_of(sizes | {"0.5.txt": 500}))


def test_a_large_file_is_cut_where_its_format_allows_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 3000)
    (tmp_path / "b.csv").write_text("text,other\n" + "x,y\n" * 10_000)
    found = list(cut(list_files([str(tmp_path / "a.jsonl"), str(tmp_path / "b.csv")]), "text", 10_000))
    assert [(part.file.name, part.begin) for [part] in found] == [
        *(("a.jsonl", begin) for begin in range(0, 42_000, 10_000)),
        ("b.csv", 0),
    ]


def test_a_file_that_is_named_twice_is_read_twice(small, records, settings):
    once = prepare(settings(records), progress=False)
    config = settings(records, sources=[str(records)] * 2)
    twice = prepare(config, progress=False, overwrite=True)
    assert len(set(twice.manifest["partitions"])) == 2 * len(once.manifest["partitions"]) > 4
    assert twice.split("train")["documents"] == 2 * once.split("train")["documents"]
    assert prepare(config, progress=False).reused


def test_parts_and_a_merge_give_what_one_process_gives(small, corpus, settings, tmp_path):
    whole = prepare(settings(corpus), progress=False)
    config = settings(corpus, out=str(tmp_path / "apart"))
    prepare_part(config, Part(2, 3), progress=False)
    with pytest.raises(PrepareError, match=r"\d+ of \d+ partitions are not in .*apart.partial yet.*--part"):
        prepare(config, progress=False, merge_only=True)
    prepare_part(config, Part(3, 3), progress=False)
    prepare_part(config, Part(1, 3), progress=False)
    merged = prepare(config, progress=False, merge_only=True)
    assert digests(merged.out) == digests(whole.out)
    assert len(whole.manifest["partitions"]) > 4


def kept_partitions(partial: Path) -> int:
    """Number of finished partitions in a folder, which is renamed at the end."""
    with contextlib.suppress(FileNotFoundError):
        return len(list(partial.glob("*.json")))
    return 0


def test_the_folder_is_the_same_after_any_number_of_kills(small, corpus, records, settings, tmp_path):
    sources = {"sources": [str(corpus), str(records)], "seq_len": 16}
    whole = prepare(settings("", **sources), progress=False)
    config = settings("", **sources, out=str(tmp_path / "killed"))
    partial, rng, kept = tmp_path / "killed.partial/partitions", random.Random(0), [0]
    while not Path(config.out).exists():
        process = get_context("fork").Process(target=prepare, args=(config, False))
        process.start()
        deadline = time.monotonic() + 60
        while process.is_alive() and kept_partitions(partial) <= kept[-1] and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.join()
        kept.append(kept_partitions(partial))
        if len(kept) > 30:
            prepare(config, progress=False)
    assert kept[1:-1] == sorted(kept[1:-1])  # what is finished stays
    assert digests(tmp_path / "killed") == digests(whole.out)


@pytest.mark.slow
def test_thirty_kills_of_two_workers_leave_the_folder_of_one_process(with_tokenizer, tmp_path, monkeypatch):
    """Every other one by the time that a worker takes to start, the others once a partition was made; every third one of a worker
    alone, where there is one, and else of the command, with which its workers end."""
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 20_000)
    source = tmp_path / "records.jsonl"
    source.write_text("".join(json.dumps({"text": some_text(i, 60)}) + "\n" for i in range(18000)))
    whole = prepare(with_tokenizer(source), progress=False)
    assert len(whole.manifest["partitions"]) > 270
    config = with_tokenizer(source, out=str(tmp_path / "killed"), workers=2)
    partial, rng, kept = tmp_path / "killed.partial/partitions", random.Random(0), [0]
    for number in range(30):
        process = get_context("fork").Process(target=prepare, args=(config, False))
        process.start()
        deadline = time.monotonic() + (60 if number % 2 else 2 * rng.random())
        while process.is_alive() and kept_partitions(partial) <= kept[-1] and time.monotonic() < deadline:
            time.sleep(0.002)
        assert process.is_alive()
        workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        os.kill(rng.choice(workers) if workers and number % 3 == 2 else process.pid or 0, signal.SIGKILL)
        process.join(20)
        assert not process.is_alive()
        kept.append(kept_partitions(partial))
    assert kept == sorted(kept) and 15 <= kept[-1] < len(whole.manifest["partitions"])
    assert digests(prepare(config, progress=False).out) == digests(whole.out)


def test_only_what_has_changed_is_made_anew(small, corpus, with_tokenizer, tmp_path, made):
    prepare(with_tokenizer(corpus), progress=False)
    first = list(made)
    made.clear()
    (corpus / "a/00.txt").write_text("one more file " * 99)
    again = prepare(with_tokenizer(corpus), progress=False, overwrite=True)
    assert 0 < len(made) <= 3 < len(first)
    scratch = prepare(with_tokenizer(corpus, out=str(tmp_path / "scratch")), progress=False)
    assert digests(again.out) == digests(scratch.out)


def test_a_damaged_shard_is_made_anew_by_overwrite(small, corpus, with_tokenizer, made):
    out = prepare(with_tokenizer(corpus), progress=False).out
    before = contents(out)
    shard = sorted((out / "train").glob("*.mds"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.unlink()  # not in place: a link to it may be elsewhere
    shard.write_bytes(content)
    made.clear()
    assert contents(prepare(with_tokenizer(corpus), progress=False, overwrite=True).out) == before
    assert made == [shard.name.split(".")[0]]


def test_a_file_that_changed_after_a_kill_is_reported_and_made_anew(small, corpus, with_tokenizer, tmp_path, caplog):
    prepare_part(with_tokenizer(corpus), Part(1, 1), progress=False)
    (corpus / "a/01.txt").write_text("other words " * 150)
    with caplog.at_level("INFO", logger="llmtrain"):
        found = prepare(with_tokenizer(corpus), progress=False)
    assert "partitions of other settings, or of files that have changed since" in caplog.text
    scratch = prepare(with_tokenizer(corpus, out=str(tmp_path / "scratch")), progress=False)
    assert digests(found.out) == digests(scratch.out)


def test_bad_records_up_to_a_share_are_set_aside(small, records, with_tokenizer, made):
    lines = records.read_bytes().splitlines()
    lines[4] = lines[150] = b"oops" * 100
    records.write_bytes(b"\n".join(lines))
    with pytest.raises(PrepareError, match=r"are \d\.\d+% of the text; max_bad allows 0\.500%:\n.*jsonl:5: not JSON"):
        prepare(with_tokenizer(records, max_bad=0.005), progress=False)
    result = prepare(with_tokenizer(records, max_bad=0.05), progress=False)
    assert sorted(made) == sorted(result.manifest["partitions"])  # each once: what was finished is kept
    assert [line.split(":")[1] for line in result.manifest["skipped"]["first"]] == ["5", "151"]
    assert result.manifest["skipped"]["count"] == 2


def test_parts_are_merged_only_with_as_much_set_aside_as_is_allowed(small, records, with_tokenizer):
    lines = records.read_bytes().splitlines()
    lines[4] = lines[150] = b"oops" * 100
    records.write_bytes(b"\n".join(lines))
    prepare_part(with_tokenizer(records, max_bad=0.05), Part(1, 1), progress=False)
    with pytest.raises(PrepareError, match=r"2 unreadable .* max_bad allows 0\.500%"):
        prepare(with_tokenizer(records, max_bad=0.005), progress=False, merge_only=True)
    assert prepare(with_tokenizer(records, max_bad=0.05), progress=False).manifest["skipped"]["count"] == 2


def test_a_damaged_file_is_set_aside_whole(corpus, with_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("llmtrain.data.partitions.maker.BATCH_CHARACTERS", 1000)
    monkeypatch.setattr("llmtrain.data.partitions.maker._SMALL_FILE", 0)
    lines = "".join(json.dumps({"text": f"{i} {random.Random(i).random()}"}) + "\n" for i in range(2000))
    (corpus / "cut.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-1000])
    found = prepare(with_tokenizer(corpus, max_bad=0.5), progress=False)
    assert found.manifest["skipped"]["count"] == 1
    (corpus / "cut.jsonl.gz").unlink()
    without = prepare(with_tokenizer(corpus, out=str(tmp_path / "without")), progress=False)
    assert found.manifest["splits"] == without.manifest["splits"]


def test_a_damaged_archive_counts_by_its_share_of_what_is_stored(corpus, with_tokenizer, tmp_path):
    """One of ten archives, each of text that compresses well: a tenth of all, not the few bytes of it beside the others' text."""
    folder = tmp_path / "archives"
    folder.mkdir()
    lines = "".join(json.dumps({"text": f"{number} {'the quick brown fox ' * 20}"}) + "\n" for number in range(200))
    for number in range(10):
        content = gzip.compress(lines.encode())
        (folder / f"{number}.jsonl.gz").write_bytes(content[:-9] if number == 4 else content)
    with pytest.raises(PrepareError, match=r"are (9\.9|10\.0)\d+% of the text; max_bad allows 5.000%"):
        prepare(with_tokenizer(folder, max_bad=0.05), progress=False)
    assert prepare(with_tokenizer(folder, max_bad=0.11), progress=False).manifest["skipped"]["count"] == 1


def _of_equal_records(kind: str, bad: int) -> bytes:
    """A hundred records of equal size, with far more of other fields than of text; one of them has no text."""
    if kind == "csv":
        rows = [f"{i:03} short text here,{'u' * 2000}" + ",more" * (i == bad) for i in range(100)]
        return "\n".join(["text,meta", *rows]).encode()
    lines = [json.dumps({"txt_" if i == bad else "text": f"{i:03} short", "meta": "u" * 2000}) for i in range(100)]
    return gzip.compress("\n".join(lines).encode()) if kind == "jsonl.gz" else "\n".join(lines).encode()


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv"])
@pytest.mark.parametrize("bad", [4, 99])
def test_one_of_a_hundred_equal_records_is_one_percent(with_tokenizer, tmp_path, kind, bad):
    (tmp_path / f"records.{kind}").write_bytes(_of_equal_records(kind, bad))
    source = tmp_path / f"records.{kind}"
    with pytest.raises(PrepareError, match=r"1 unreadable .* are 1\.000% of the text; max_bad allows 0\.990%"):
        prepare(with_tokenizer(source, max_bad=0.0099), progress=False)
    assert prepare(with_tokenizer(source, max_bad="1%"), progress=False).manifest["skipped"]["count"] == 1


@pytest.mark.parametrize(("written", "meant"), [("0.1 %", 0.001), ("2%", 0.02), ("0.5", 0.5), (0.25, 0.25)])
def test_max_bad_may_be_a_percentage(settings, written, meant):
    assert settings("x", max_bad=written).max_bad == meant


@pytest.mark.parametrize("written", ["lots", "101 %", "-1 %", "%", "nan"])
def test_max_bad_is_a_share(settings, written):
    with pytest.raises(ValidationError):
        settings("x", max_bad=written)


def test_what_fills_no_sample_in_its_partition_is_not_lost(small, corpus, settings):
    config = settings(corpus, seq_len=1024, validation_fraction=0.0)
    found = prepare(config, progress=False)
    split = found.split("train")
    assert split["tokens"] - split["samples"] * 1024 < 1024
    texts = {file.read_text("utf-8") for file in corpus.rglob("*.txt")}
    whole = sum(text in texts for text in documents(found.out, "train"))
    assert whole >= len(texts) - 2 * len(found.manifest["partitions"])  # two meet where one's samples end


def test_a_folder_of_the_earlier_format_is_used_as_it_is(corpus, settings):
    out = prepare(settings(corpus), progress=False).out
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["inputs"]["format"] = 1
    manifest["fingerprint"] = "another"
    (out / MANIFEST).write_text(json.dumps(manifest))
    assert prepare(settings(corpus), progress=False).reused


def test_a_folder_that_holds_its_source_is_refused(corpus, settings):
    with pytest.raises(PrepareError, match="lies inside a source"):
        prepare(settings(corpus, out=str(corpus)), progress=False, overwrite=True)


def test_a_folder_inside_of_its_source_is_no_part_of_it(corpus, settings):
    prepare(settings(corpus, out=str(corpus / "out")), progress=False)
    assert prepare(settings(corpus, out=str(corpus / "out")), progress=False).reused


def test_the_command_takes_shares_and_parts(small, records, tmp_path, capsys):
    train_bpe(["the quick brown fox"], 257).save(tmp_path / "tokenizer")
    records.write_text(records.read_text() + "oops\n")
    command = ["prepare", str(records), "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tokenizer")]
    command += ["--seq-len", "32", "--workers", "1", "--max-bad", "0.1%"]
    assert main([*command, "--part", "1/2"]) == 0
    assert main([*command, "--merge"]) == 2
    assert "give --merge in place of --part" in capsys.readouterr().out
    assert main([*command, "--part", "2/2"]) == 0
    assert main([*command, "--merge"]) == 0
    assert "records.jsonl:201: not JSON" in capsys.readouterr().out
    assert main([*command, "--part", "1/2"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'} is complete: its parts are merged")
    assert main([*command, "--part", "1/2", "--max-bytes", "1000"]) == 2
    for wrong in (["--part", "3/2"], ["--part", "x"], ["--max-bad", "lots"], ["--merge", "--part", "1/2"]):
        with pytest.raises(SystemExit, match="2"):
            main([*command, *wrong])
