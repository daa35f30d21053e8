"""Exact duplicates: the first document in the order of the sources stays, whatever the partitions, processes and parts."""

import gzip
import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from llmtrain.cli import main
from llmtrain.data.inspect.sample_documents import SourceDocument
from llmtrain.data.partitions import cutting as partitions
from llmtrain.data.partitions import dedup
from llmtrain.data.partitions.cutting import Partition
from llmtrain.data.partitions.dedup import DocumentHashes, find_duplicates
from llmtrain.data.prepare import Part, PartState, PreparedFolder, PrepareError, prepare, prepare_part
from llmtrain.data.prepare_streams import prepare_streams
from llmtrain.data.shards.stored_stream import open_place
from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.schema.data import PrepareConfig
from tests.support.prepared import digests, documents, small, text_of

SEQ_LEN = 16


@pytest.fixture
def config(tmp_path, monkeypatch) -> PrepareConfig:
    """Texts and records in files of several formats, each document up to four times."""
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 8000)
    train_bpe(["the quick brown fox"], 257).save(tmp_path / "tokenizer")
    rng = random.Random(0)

    def lines(count: int) -> str:
        return "".join(json.dumps({"text": text_of(rng.randint(0, 300))}) + "\n" for _ in range(count))

    (tmp_path / "a.jsonl").write_text(lines(300))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(80).encode()))
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(text_of(rng.randint(250, 330)))
    long = "\n".join(text_of(number) for number in range(1000, 1200))
    for name, content in (("long", long), ("long-again", long), ("long-other", f"{long}.")):
        (folder / f"{name}.txt").write_text(content)
    sources = (tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "texts"))
    return small(tmp_path, *sources, seq_len=SEQ_LEN, validation_fraction=0.1, dedup=True)


def originals(config: PrepareConfig) -> list[tuple[str, str]]:
    """(place, text) of every document, in the order of the sources."""
    found = []
    for source in map(Path, config.sources):
        if source.is_dir():
            found += [(str(path), path.read_text()) for path in sorted(source.iterdir())]
            continue
        content = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
        rows = content.decode().splitlines()
        found += [(f"{source}:{number}", json.loads(line)["text"]) for number, line in enumerate(rows, 1)]
    return found


def named(made: PreparedFolder) -> set[str]:
    """The documents that are in samples."""
    found: set[SourceDocument] = set()
    for split in ("train", "validation"):
        stream = open_place(str(made.out / split))
        assert stream is not None
        look_up = stream.documents(SEQ_LEN)
        for number in range(stream.index.samples):
            found.update(look_up.of(number) or ())
    return {str(one) for one in found}


def test_of_equal_documents_the_first_stays(config):
    made = prepare(config, progress=False)
    firsts: dict[str, str] = {}
    for place, content in originals(config):
        firsts.setdefault(content, place)
    kept = set(firsts.values())
    found = named(made)
    assert found <= kept and len(kept - found) <= 2  # what fills no sample at the end
    every = originals(config)
    left_out = made.manifest["duplicates"]
    assert left_out["count"] == len(every) - len(kept) > 100
    copies = [place for place, _ in every if place not in kept]
    assert left_out["first"] == copies[:20]
    texts = [one for split in ("train", "validation") for one in documents(made.out, split)]
    whole = Counter(texts) & Counter(content for _, content in every)
    assert max(whole.values()) == 1 and len(whole) > 150  # where partitions meet, documents are cut
    assert f"left out {left_out['count']:,} documents that equal earlier ones" in made.summary()
    assert sum(made.split(split)["documents"] for split in ("train", "validation")) == len(kept)


@pytest.mark.parametrize("compared", [1 << 22, 20])
def test_the_result_does_not_depend_on_processes_parts_or_ranges(config, tmp_path, monkeypatch, compared):
    whole = prepare(config, progress=False)
    monkeypatch.setattr(dedup, "MOST_COMPARED", compared)
    apart = config.model_copy(update={"out": str(tmp_path / "apart")})
    states = [prepare_part(apart, Part(number, 3), progress=False) for number in (3, 1, 2)]
    assert states == [PartState.HASHED, PartState.HASHED, PartState.MADE]
    with pytest.raises(PrepareError, match=r"partitions are not in .*apart.partial yet"):
        prepare(apart, progress=False, merge_only=True)
    assert {prepare_part(apart, Part(number, 3), progress=False) for number in (1, 3)} == {PartState.MADE}
    merged = prepare(apart, progress=False, merge_only=True)
    assert digests(merged.out) == digests(whole.out)
    assert not list((merged.out / "partitions").glob("*.hashes*"))
    assert prepare(apart, progress=False).reused
    assert prepare_part(apart, Part(1, 3), progress=False) is PartState.MERGED


@pytest.mark.slow
def test_two_processes_give_the_same(config, tmp_path):
    """Spawned processes do not see small partitions, so that each has more to do."""
    whole = prepare(config, progress=False)
    several = prepare(config.model_copy(update={"out": str(tmp_path / "apart"), "workers": 2}), progress=False)
    assert digests(several.out) == digests(whole.out)


def test_without_it_all_documents_stay_and_the_setting_distinguishes_folders(config):
    plain = config.model_copy(update={"dedup": False})
    made = prepare(plain, progress=False)
    assert "duplicates" not in made.manifest
    assert sum(made.split(split)["documents"] for split in ("train", "validation")) == len(originals(config))
    with pytest.raises(PrepareError, match="dedup: False then, True now"):
        prepare(config, progress=False)


def test_partitions_without_duplicates_are_those_without_the_setting(config, tmp_path):
    (tmp_path / "unique.jsonl").write_text("".join(json.dumps({"text": text_of(n)}) + "\n" for n in range(400)))
    with_it = config.model_copy(update={"sources": [str(tmp_path / "unique.jsonl")]})
    made = prepare(with_it, progress=False)
    plain = prepare(with_it.model_copy(update={"dedup": False, "out": str(tmp_path / "plain")}), progress=False)
    assert made.manifest["partitions"] == plain.manifest["partitions"]
    assert made.manifest["duplicates"] == {"count": 0, "first": []}


def test_a_damaged_file_is_no_ones_original(config, tmp_path):
    """Its documents are in no shard, so that copies of them must stay."""
    lines = "".join(json.dumps({"text": text_of(n)}) + "\n" for n in range(60))
    (tmp_path / "damaged.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-30])
    (tmp_path / "whole.jsonl").write_text(lines)
    sources = [str(tmp_path / name) for name in ("damaged.jsonl.gz", "whole.jsonl")]
    made = prepare(config.model_copy(update={"sources": sources, "max_bad": 0.9}), progress=False)
    assert made.manifest["duplicates"]["count"] == 0
    assert sum(made.split(split)["documents"] for split in ("train", "validation")) == 60


def test_documents_of_token_files_are_compared(config, tmp_path):
    rows = [[5, 6, 7, 0], [8, 9, 0], [5, 6, 7, 0], [5, 6, 0]] * 30
    (tmp_path / "file.npy").write_bytes(b"".join(np.array(row, np.uint16).tobytes() for row in rows))
    update = {"sources": [str(tmp_path / "file.npy")], "validation_fraction": 0.0, "seq_len": 4}
    made = prepare(config.model_copy(update=update), progress=False)
    assert made.split("train")["documents"] == 3 and made.manifest["duplicates"]["count"] == 117
    assert made.manifest["duplicates"]["first"][0] == f"{tmp_path}/file.npy:8"


def test_max_bytes_counts_what_stays(config):
    made = prepare(config.model_copy(update={"max_bytes": 20_000}), progress=False)
    firsts = list(dict.fromkeys(content for _, content in originals(config)))
    read = np.cumsum([len(content.encode()) for content in firsts])
    wanted = int(np.searchsorted(read, 20_000)) + 1
    assert sum(made.split(split)["documents"] for split in ("train", "validation")) == wanted


def test_copies_are_named_by_their_source_and_line_in_every_partition_and_format(config, tmp_path):
    """Of two sources that both hold a part.jsonl, of which the second's is of several partitions and full of copies."""
    lines = [json.dumps({"text": text_of(number)}) + "\n" for number in range(300)]
    for name, content in (
        ("one", lines),
        ("two", lines[:2] + [f'{{"text": "{n} {text_of(n)}"}}\n' for n in range(280)] + lines),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.jsonl").write_text("".join(content))
    (tmp_path / "texts/again.txt").write_text(text_of(7))
    sources = [f"{tmp_path}/one/part.jsonl", f"{tmp_path}/tw*/*.jsonl", f"{tmp_path}/texts/again.txt"]
    made = prepare(config.model_copy(update={"sources": sources}), progress=False)
    assert len(made.manifest["partitions"]) > 5
    assert made.manifest["duplicates"] == {
        "count": 303,
        "first": [f"{tmp_path}/two/part.jsonl:{line}" for line in (1, 2, *range(283, 301))],
    }
    alone = prepare(config.model_copy(update={"sources": sources[::2], "out": str(tmp_path / "alone")}), progress=False)
    assert alone.manifest["duplicates"] == {"count": 1, "first": [f"{tmp_path}/texts/again.txt"]}
    assert "documents that equal earlier ones:\n    " + sources[2] in alone.summary()


def test_each_stream_is_compared_with_itself_alone(config, tmp_path):
    lines = [json.dumps({"text": text_of(number % 90)}) + "\n" for number in range(100)]
    (tmp_path / "same.jsonl").write_text("".join(lines))
    streams = {name: [str(tmp_path / "same.jsonl")] for name in ("web", "code")}
    made = prepare_streams(config.model_copy(update={"sources": [], "streams": streams}), progress=False)
    assert made.summary().count("left out 10 documents that equal earlier ones") == 2


def test_the_memory_to_compare_is_bounded(tmp_path, monkeypatch):
    each, parts = 20_000, [Partition(f"{number}", []) for number in range(10)]
    rng = np.random.default_rng(0)
    for part in parts:
        hashes = DocumentHashes()
        for at in range(each):
            hashes.add_text(str(rng.integers(0, 1 << 40)))
            hashes.end(at)
        hashes.write(tmp_path, part.id)
    assert (tmp_path / "0.hashes.npy").stat().st_size < 25 * each
    peaks = []
    for compared in (1 << 22, each):
        monkeypatch.setattr(dedup, "MOST_COMPARED", compared)
        tracemalloc.start()
        find_duplicates(tmp_path, parts)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 120 * each * len(parts) and peaks[1] < 150 * each


def test_the_command(config, tmp_path, capsys):
    words = ["prepare", config.sources[0], "--out", config.out, "--tokenizer", str(tmp_path / "tokenizer")]
    words += ["--seq-len", "16", "--workers", "1", "--dedup"]
    assert main([*words, "--part", "1/2"]) == 0
    assert "once all parts have come so far, give the same command again" in capsys.readouterr().out
    assert main(words) == 0
    assert "documents that equal earlier ones" in capsys.readouterr().out
