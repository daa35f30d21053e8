"""The documents behind each sample: the file and the line that its tokens were made from, wherever partitions are cut."""

import gzip
import json
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llmtrain.data.inspect.sample_documents import summarise
from llmtrain.data.partitions import cutting as partitions
from llmtrain.data.partitions.provenance import DocumentRecorder, documents_path, read_documents, write_documents
from llmtrain.data.prepare import Part, prepare, prepare_part
from llmtrain.data.shards.stored_stream import StoredStream, open_place
from llmtrain.data.sources.files import SourceFile
from llmtrain.data.sources.records import Slice
from llmtrain.data.tokenize.tokenizer import load_tokenizer, train_bpe
from llmtrain.schema.data import PrepareConfig
from tests.support.prepared import digests, small, text_of

SEQ_LEN = 32


@pytest.fixture
def sources(tmp_path) -> list[str]:
    """Small files, one that is cut into partitions, records of three formats, blank and bad lines among them."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(text_of(number))
    (folder / "long.txt").write_text("\n".join(text_of(number) for number in range(100, 250)))
    lines = [json.dumps({"text": text_of(number)}) for number in range(1000, 1200)]
    lines[3:3] = ["", "oops", '{"text": ""}']
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[:20]).encode()))
    (tmp_path / "table.csv").write_text("id,text\n" + "".join(f"1,{text_of(number)}\n" for number in range(3000, 3040)))
    return [f"{tmp_path}/{name}" for name in ("texts/", "many.jsonl", "packed.jsonl.gz", "**/*.csv")]


@pytest.fixture
def config(tmp_path, sources, monkeypatch) -> PrepareConfig:
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 10_000)
    train_bpe(["the quick brown fox"], 257).save(tmp_path / "tokenizer")
    return small(tmp_path, *sources, seq_len=SEQ_LEN, validation_fraction=0.2, max_bad=0.1)


def original(place: str, number: int | None) -> str:
    """A document, as the file has it."""
    path = Path(place)
    if number is None:
        return path.read_text()
    if path.suffix == ".csv":
        return path.read_text().splitlines()[number].split(",")[1]
    content = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return json.loads(content.split("\n")[number - 1])["text"]


def stream(out: Path, split: str) -> StoredStream:
    found = open_place(str(out / split))
    assert found is not None
    return found


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_token_of_every_sample_is_from_the_document_that_is_named(config, split, packing):
    out = prepare(config.model_copy(update={"packing": packing}), progress=False).out
    tokenizer, stored = load_tokenizer(out / "tokenizer"), stream(out, split)
    look_up, number, named = stored.documents(SEQ_LEN), 0, set()
    for shard in range(len(stored.index.shards)):
        for tokens in stored.tokens(shard):
            documents = look_up.of(number)
            assert documents is not None
            borders = [0, *(one.end for one in documents)]
            assert [one.begin for one in documents] == borders[:-1]
            assert borders[-1] == SEQ_LEN or packing == "best_fit"
            assert (tokens[borders[-1] :] == tokenizer.eod_id).all()
            for one in documents:
                part, whole = tokens[one.begin : one.end].tolist(), original(one.place, one.number)
                ends = part[-1] == tokenizer.eod_id
                found = tokenizer.decode(part[:-1] if ends else part)
                assert found in whole
                assert not one.first or whole.startswith(found)
                cut = packing == "best_fit" and one.place.endswith("long.txt")  # by a partition, which closes it
                assert not ends or cut or whole.endswith(found)
                named.add(str(one))
            number += 1
    assert number == stored.index.samples
    if split == "train":
        assert {name.rpartition("/")[2].partition(":")[0] for name in named} > {
            "many.jsonl",
            "packed.jsonl.gz",
            "table.csv",
        }
    for place, last in (("many.jsonl", 203), ("table.csv", 40)):
        lines = [int(name.rpartition(":")[2]) for name in named if f"/{place}:" in name]
        assert lines and max(lines) <= last and min(lines) >= 1


def test_the_record_is_the_same_from_parts_and_processes_and_after_an_overwrite(config, tmp_path):
    whole = prepare(config, progress=False).out
    apart = config.model_copy(update={"out": str(tmp_path / "apart")})
    for number in (2, 1):
        prepare_part(apart, Part(number, 2), progress=False)
    merged = prepare(apart, progress=False, merge_only=True).out
    assert digests(merged) == digests(whole)
    assert digests(prepare(config, progress=False, overwrite=True).out) == digests(merged)


def test_a_folder_without_the_record_is_made_anew_by_overwrite(config):
    out = prepare(config, progress=False).out
    before = digests(out)
    for file in (out / "partitions").glob("*documents*"):
        file.unlink()
    (out / "partitions/sources").unlink()
    assert stream(out, "train").documents(SEQ_LEN).of(0) is None
    assert prepare(config, progress=False).reused
    assert digests(prepare(config, progress=False, overwrite=True).out) == before


def test_a_document_costs_few_bytes_of_memory_and_of_the_disk(tmp_path):
    count, rng = 10_000, random.Random(0)
    lengths = [rng.randint(20, 3000) for _ in range(count)]
    file = SourceFile("/a.jsonl", "a.jsonl", 1, 0, False)
    tracemalloc.start()
    recorder = DocumentRecorder(["train", "validation"])
    number = recorder.begin(Slice(file, 0, 1))
    for record, tokens in enumerate(lengths):
        recorder.add("train", *(np.array([value]) for value in (number, record, tokens, 4 * tokens)))
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert memory < 30 * count
    documents = recorder.documents({})
    write_documents(tmp_path, "one", documents)
    assert documents_path(tmp_path, "one").stat().st_size < 3 * count
    read = read_documents(tmp_path, "one")
    assert read is not None and read.slices == documents.slices
    assert read.tables["train"].tokens.tolist() == lengths and read.tables["train"].records.tolist() == list(
        range(count)
    )


def test_documents_may_be_noted_one_by_one_or_many_together(tmp_path):
    """Pieces of a document that follow one another are one document, also where they are noted apart."""
    rng = np.random.default_rng(3)
    numbers = np.sort(rng.integers(0, 5, 400))
    records = np.concatenate([np.sort(rng.integers(0, 60, int(count))) for count in np.bincount(numbers)])
    tokens, sizes = rng.integers(0, 9, (2, 400))
    found = []
    for borders in ([], [1, 7, 8, 120, 399], list(range(1, 400))):
        recorder = DocumentRecorder(["train", "validation"])
        for number in range(5):
            recorder.begin(Slice(SourceFile("/a", str(number), 1, 0, False), 0, 1))
        for part in np.split(np.arange(400), borders):
            recorder.add("train", numbers[part], records[part], tokens[part], sizes[part])
        found.append(recorder.documents({}))
    one_by_one = DocumentRecorder(["train", "validation"])
    for number in range(5):
        one_by_one.begin(Slice(SourceFile("/a", str(number), 1, 0, False), 0, 1))
    for row in zip(numbers.tolist(), records.tolist(), tokens.tolist(), sizes.tolist(), strict=True):
        one_by_one.add("train", *(np.array([value]) for value in row))
    for reports, documents in enumerate([*found, one_by_one.documents({})]):
        write_documents(tmp_path, str(reports), documents)
    contents = {documents_path(tmp_path, str(reports)).read_bytes() for reports in range(4)}
    assert len(contents) == 1


def test_neighbouring_records_are_named_together(config):
    out = prepare(config, progress=False).out
    stored = stream(out, "train")
    found = [stored.documents(256).of(number) or [] for number in range(8)]
    assert any("-" in summarise(documents).rpartition("/")[2] or len(documents) < 3 for documents in found)
