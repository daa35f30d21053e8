import gzip
import json
import os
import signal
import threading
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import zstandard
from pydantic import ValidationError
from tokenizers import Tokenizer

from llmtrain.config import locks
from llmtrain.data.partitions import cutting as partitions
from llmtrain.data.partitions import folder_maker
from llmtrain.data.partitions.prepared_folder import MANIFEST, lock_folder
from llmtrain.data.prepare import Part, PrepareError, prepare, prepare_part
from llmtrain.data.shards.packing import is_held_out
from llmtrain.data.tokenize.tokenizer import TokenizerError, load_tokenizer, train_bpe
from tests.support.prepared import digests, documents, stored_samples


def test_documents_are_concatenated_in_order_and_come_back_unchanged(corpus, settings):
    result = prepare(settings(corpus), progress=False)
    names = sorted(str(file.relative_to(corpus)) for file in corpus.rglob("*.txt"))
    for split, held_out in (("train", False), ("validation", True)):
        expected = [(corpus / n).read_text("utf-8") for n in names if is_held_out(n, 17, 0.2) == held_out]
        found = documents(result.out, split)
        assert result.split(split)["documents"] == len(expected)
        assert found[: len(expected) - 1] == expected[:-1]
        assert expected[len(found) - 1].startswith(found[-1].rstrip("\ufffd"))


def test_manifest_counts_bytes_of_validation_exactly(corpus, settings):
    result = prepare(settings(corpus), progress=False)
    split = result.split("validation")
    tokenizer = load_tokenizer(result.out / "tokenizer")
    texts = documents(result.out, "validation")
    data = stored_samples(result.out, "validation")
    # The tokenizer is byte-level: a token is as many bytes as its spelling has characters.
    spelling = {i: 0 if i == tokenizer.eod_id else len(token) for token, i in tokenizer.backend.get_vocab().items()}
    per_token = [[spelling[token] for token in data[i]["tokens"].tolist()] for i in range(len(data))]
    assert split["samples"] == len(data)
    assert abs(split["bytes_covered"] - sum(map(sum, per_token))) <= 3  # a character cut by the very last token
    assert abs(split["bytes_covered"] - sum(len(text.encode()) for text in texts)) <= 3
    assert split["bytes_scored"] == sum(data[i]["text_bytes"] for i in range(len(data)))
    assert split["bytes_scored"] < split["bytes_covered"] <= split["bytes"]


def test_same_bytes_whatever_the_number_of_workers(corpus, records, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 10_000)
    sources = [str(corpus), str(records)]
    made = [
        prepare(settings("", sources=sources, out=str(tmp_path / f"out{n}"), workers=n), progress=False).out
        for n in (1, 2)
    ]
    assert digests(made[0]) == digests(made[1])
    assert len(documents(made[0], "train")) > 150


def test_second_run_returns_the_same_folder_at_once(corpus, settings):
    first = prepare(settings(corpus), progress=False)
    before = {file: file.stat().st_mtime_ns for file in first.out.rglob("*")}
    os.utime(corpus / "a/01.txt")  # small corpora are compared by content
    second = prepare(settings(corpus, workers=2), progress=False)
    assert (first.reused, second.reused) == (False, True)
    assert first.manifest == second.manifest
    assert before == {file: file.stat().st_mtime_ns for file in first.out.rglob("*")}


@pytest.mark.parametrize(
    ("change", "said"), [({"seq_len": 64}, "seq_len: 32 then, 64 now"), ({"seed": 3}, "seed: 17 then, 3 now")]
)
def test_other_settings_are_refused_with_what_differs(corpus, settings, change, said):
    prepare(settings(corpus), progress=False)
    with pytest.raises(PrepareError, match=said) as error:
        prepare(settings(corpus, **change), progress=False)
    assert "--overwrite" in str(error.value)


def test_changed_sources_are_refused_and_overwrite_replaces(corpus, settings):
    first = prepare(settings(corpus), progress=False)
    (corpus / "a/99.txt").write_text("one more file " * 99)
    with pytest.raises(PrepareError, match=r"source files: 40 files, \d+ bytes then, 41 files, \d+ bytes now"):
        prepare(settings(corpus), progress=False)
    second = prepare(settings(corpus), progress=False, overwrite=True)
    assert not second.reused
    assert second.manifest["fingerprint"] != first.manifest["fingerprint"]
    assert sorted(file.name for file in second.out.parent.glob("out*")) == ["out"]


def test_a_folder_of_someone_else_is_never_touched(corpus, settings, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(PrepareError, match="was not made by `llmtrain prepare`"):
            prepare(settings(corpus), progress=False, overwrite=overwrite)
    assert (tmp_path / "out/thesis.tex").read_text() == "precious"


def test_a_missing_shard_is_noticed(corpus, settings):
    out = prepare(settings(corpus), progress=False).out
    next((out / "train").glob("*.mds")).unlink()
    with pytest.raises(PrepareError, match="missing or cut short"):
        prepare(settings(corpus), progress=False)


def test_samples_that_were_lowered_in_an_index_are_noticed(corpus, settings):
    out = prepare(settings(corpus), progress=False).out
    index = json.loads((out / "train/index.json").read_text())
    index["shards"][0]["samples"] -= 1
    (out / "train/index.json").write_text(json.dumps(index))
    with pytest.raises(PrepareError, match=r"train/index.json counts .* samples, manifest.json .*--overwrite"):
        prepare(settings(corpus), progress=False)


def test_a_killed_run_leaves_nothing_that_passes_for_whole(corpus, settings, monkeypatch):
    config = settings(corpus)
    out = Path(config.out)
    with monkeypatch.context() as patch:
        # Called once the shards are written, just before the manifest is.
        patch.setattr(folder_maker, "token_dtype", lambda vocab_size: os.kill(os.getpid(), signal.SIGKILL))
        process = get_context("fork").Process(target=prepare, args=(config, False))
        process.start()
        process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists() and (out.parent / "out.partial/train/index.json").exists()
    result = prepare(config, progress=False)
    assert not result.reused and (out / MANIFEST).exists()
    assert not (out.parent / "out.partial").exists()


def test_bad_settings_and_sources_leave_no_trace(settings, tmp_path):
    with pytest.raises(PrepareError, match="nowhere: No such file"):
        prepare(settings(tmp_path / "nowhere"), progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{not json}", "not JSON"),
        (b'{"body": "x"}', r"has no key 'text' \(keys: body\)"),
        (b'{"text": 3}', "'text' is a number, not a string"),
        (b'["text"]', "expected an object"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
@pytest.mark.parametrize("partition_bytes", [5000, 1 << 20])
def test_a_bad_record_is_named_with_file_and_line(records, settings, monkeypatch, line, why, partition_bytes):
    monkeypatch.setattr(partitions, "PARTITION_BYTES", partition_bytes)
    lines = records.read_bytes().splitlines()
    lines[122] = line
    records.write_bytes(b"\n".join(lines))
    with pytest.raises(PrepareError, match=f"records.jsonl:123: .*{why}"):
        prepare(settings(records), progress=False)
    assert not Path(settings(records).out).exists()


def test_a_wrong_key_is_reported_before_a_tokenizer_is_trained_on_nothing(records, settings):
    with pytest.raises(PrepareError, match=r"records\.jsonl:1: has no key 'body'"):
        prepare(settings(records, text_key="body", vocab_size=400), progress=False)


def test_bad_records_can_be_skipped_and_are_named(records, settings):
    lines = records.read_bytes().splitlines()
    lines[4] = lines[150] = b"oops"
    records.write_bytes(b"\n".join(lines))
    result = prepare(settings(records, skip_bad_records=True), progress=False)
    assert result.manifest["skipped"]["count"] == 2
    assert [record.split(":")[1] for record in result.manifest["skipped"]["first"]] == ["5", "151"]
    assert sum(result.split(name)["documents"] for name in ("train", "validation")) == 198
    assert "skipped 2" in result.summary()


def test_undecodable_files_of_a_folder_are_skipped_and_named_but_not_a_named_file(corpus, settings):
    bad = corpus / "a/99.txt"
    bad.write_bytes(b"fine\n\xff\xfe\n")
    result = prepare(settings(corpus), progress=False)
    assert result.manifest["skipped"]["first"] == [f"{bad}:2: not UTF-8: invalid start byte at byte 5"]
    with pytest.raises(PrepareError, match=r"99.txt:2: not UTF-8"):
        prepare(settings("", sources=[str(corpus), str(bad)], out=str(corpus.parent / "other")), progress=False)


def _in_latin_1(corpus: Path, count: int) -> None:
    for file in sorted(corpus.rglob("*.txt"))[:count]:
        file.write_bytes(b"na\xefve " * (file.stat().st_size // 6))


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize("count", [8, 40])
def test_more_than_a_tenth_of_a_folder_in_another_encoding_is_an_error(
    corpus, settings, tmp_path, count, with_tokenizer
):
    changes = {}
    if with_tokenizer:
        train_bpe(["the quick brown fox"], 257).save(tmp_path / "tokenizer")
        changes = {"vocab_size": None, "tokenizer": str(tmp_path / "tokenizer")}
    _in_latin_1(corpus, count)
    said = rf"{count} files that are not UTF-8 text are \d+\.\d% of .*up to 10% .*:\n(  .*/\d+.txt:1: not UTF-8.*\n){{3}}  \.\.\.\n"
    with pytest.raises(PrepareError, match=said + ".*iconv.*--max-bad"):
        prepare(settings(corpus, **changes), progress=False)


def test_files_in_another_encoding_count_against_max_bad_where_it_is_given(corpus, settings):
    _in_latin_1(corpus, 2)
    assert prepare(settings(corpus, out=f"{corpus}.1"), progress=False).manifest["skipped"]["count"] == 2
    with pytest.raises(PrepareError, match=r"01.txt:1: not UTF-8: .*\nmend it"):
        prepare(settings(corpus, max_bad=0), progress=False)
    with pytest.raises(PrepareError, match=r"2 unreadable files or records are \d\.\d+% .* allows 1\.000%"):
        prepare(settings(corpus, max_bad=0.01), progress=False)
    assert prepare(settings(corpus, max_bad=0.5), progress=False).manifest["skipped"]["count"] == 2


def test_what_was_passed_over_before_is_refused_by_a_later_max_bad_of_0(corpus, settings, tmp_path):
    _in_latin_1(corpus, 2)
    train_bpe(["the quick brown fox"], 257).save(tmp_path / "tokenizer")
    changes = {"vocab_size": None, "tokenizer": str(tmp_path / "tokenizer")}
    prepare_part(settings(corpus, **changes), Part(1, 1), progress=False)
    with pytest.raises(PrepareError, match=r"01.txt:1: not UTF-8"):
        prepare(settings(corpus, max_bad=0, **changes), progress=False)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_records_give_the_same_samples_as_plain_ones(records, settings, tmp_path, kind):
    data = records.read_bytes()
    packed = tmp_path / f"{records.name}.{kind}"
    packed.write_bytes(gzip.compress(data) if kind == "gz" else zstandard.compress(data))
    plain = prepare(settings(records), progress=False)
    unpacked = prepare(settings(packed, out=str(tmp_path / "packed")), progress=False)
    assert plain.manifest["splits"] == unpacked.manifest["splits"]
    for split in ("train", "validation"):
        hashes = [
            [shard["raw_data"]["hashes"] for shard in json.loads((out / split / "index.json").read_text())["shards"]]
            for out in (plain.out, unpacked.out)
        ]
        assert hashes[0] == hashes[1]


@pytest.mark.parametrize("partition_bytes", [5000, 1 << 20])
def test_max_bytes_stops_at_the_document_that_reaches_it(records, settings, monkeypatch, partition_bytes):
    monkeypatch.setattr(partitions, "PARTITION_BYTES", partition_bytes)
    texts = [len(json.loads(line)["text"].encode()) for line in records.read_text("utf-8").splitlines()]
    expected = next(n for n in range(1, 201) if sum(texts[:n]) >= 30_000)
    result = prepare(settings(records, max_bytes=30_000), progress=False)
    assert sum(result.split(name)["documents"] for name in ("train", "validation")) == expected
    assert sum(result.split(name)["bytes"] for name in ("train", "validation")) == sum(texts[:expected])


def test_a_large_text_file_stays_one_document(tmp_path, settings, monkeypatch):
    file = tmp_path / "big.txt"
    file.write_text("".join(f"line {i} of a long file\n" for i in range(2000)))
    whole = prepare(settings(file, validation_fraction=0.0), progress=False)
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 10_000)
    parts = prepare(settings(file, validation_fraction=0.0, out=str(tmp_path / "parts")), progress=False)
    assert whole.split("train")["documents"] == parts.split("train")["documents"] == 1
    # What filled no sample in its partition follows at the end.
    assert file.read_text().startswith(documents(whole.out, "train")[0])
    assert sum(map(len, documents(parts.out, "train"))) > 0.999 * len(file.read_text())


@pytest.mark.parametrize(
    ("text", "fraction", "said"),
    [("tiny", 0.0, "train part"), ("a fair amount of text " * 400, 0.5, "(train|validation) part has 0 documents")],
)
def test_too_little_text_is_an_error_that_names_the_place(tmp_path, settings, text, fraction, said):
    file = tmp_path / "one.txt"
    file.write_text(text)
    tokenizer = tmp_path / "tokenizer"
    train_bpe(["some words of text"], 257).save(tokenizer)
    with pytest.raises(PrepareError, match=said):
        prepare(settings(file, vocab_size=None, tokenizer=str(tokenizer), validation_fraction=fraction), progress=False)


def test_a_given_tokenizer_is_used_and_copied(corpus, settings, tmp_path):
    train_bpe(["hello there"], 257).save(tmp_path / "given")
    result = prepare(settings(corpus, vocab_size=None, tokenizer=str(tmp_path / "given")), progress=False)
    assert result.manifest["tokenizer"]["vocab_size"] == 257
    assert Tokenizer.from_file(str(result.out / "tokenizer/tokenizer.json")).get_vocab_size() == 257


def test_text_that_spells_the_end_of_document_does_not_end_it(tmp_path, settings):
    file = tmp_path / "a.jsonl"
    text = "before <|endoftext|> after " * 40
    file.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(10)))
    result = prepare(settings(file, validation_fraction=0.0, vocab_size=260), progress=False)
    assert documents(result.out, "train")[0] == text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_place_is_a_clear_error(corpus, settings, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(PrepareError, match=r"cannot write to .*locked"):
        prepare(settings(corpus, out=str(locked / "out")), progress=False)


def test_a_file_in_the_way_is_a_clear_error(corpus, settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PrepareError, match=r"cannot write to .*file"):
        prepare(settings(corpus, out=str(tmp_path / "file/out")), progress=False)


def test_two_processes_preparing_the_same_folder_share_the_work(corpus, settings):
    context = get_context("fork")
    said = context.Queue()
    config = settings(corpus)
    processes = [context.Process(target=lambda: said.put(prepare(config, progress=False).reused)) for _ in range(2)]
    for process in processes:
        process.start()
    assert sorted(said.get(timeout=300) for _ in processes) == [False, True]
    for process in processes:
        process.join(timeout=10)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc, in which root can make no file either")
def test_a_folder_whose_lock_cannot_be_made_is_refused_at_once():
    with pytest.raises(PrepareError, match="cannot write to /proc"), lock_folder(Path("/proc/out")):
        pass


def with_bos(settings, tmp_path):
    """Settings of a tokenizer with a token that begins documents."""
    tokenizer = train_bpe(["the quick brown fox"], 257)
    tokenizer.backend.add_special_tokens(["<s>"])
    tokenizer.save(tmp_path / "tokenizer")
    described = tmp_path / "tokenizer/tokenizer_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"bos_token": {"content": "<s>"}}))
    return lambda source, **changes: settings(source, vocab_size=None, tokenizer=str(tmp_path / "tokenizer"), **changes)


@pytest.mark.parametrize("partition_bytes", [3_000, 1 << 26])
@pytest.mark.parametrize("bos, eos", [(True, True), (True, False), (False, True)])
def test_documents_begin_and_end_as_the_settings_say(
    corpus, records, settings, tmp_path, monkeypatch, bos, eos, partition_bytes
):
    monkeypatch.setattr("llmtrain.data.partitions.cutting.PARTITION_BYTES", partition_bytes)
    monkeypatch.setattr("llmtrain.data.sources.records.BLOCK_BYTES", 700)  # a text is several pieces
    make = with_bos(settings, tmp_path)
    options = {"add_bos_token": bos, "add_eos_token": eos, "seq_len": 8}
    made = prepare(make(records, sources=[str(corpus), str(records)], **options))
    tokenizer = load_tokenizer(made.out / "tokenizer")
    ids = np.concatenate([sample["tokens"] for sample in stored_samples(made.out, "train")])
    begin = tokenizer.backend.token_to_id("<s>") or -1
    marks = ids[(ids == begin) | (ids == 0)].tolist()
    documents = made.split("train")["documents"]
    # Less than a sample is left out, and a partition may close a document that it cuts.
    assert abs(marks.count(begin) - documents * bos) <= 4 and abs(marks.count(0) - documents * eos) <= 4
    if bos and eos and partition_bytes > 3_000:
        places = np.flatnonzero(ids == begin)
        assert places[0] == 0 and (ids[places[1:] - 1] == 0).all()
    held = made.split("validation")
    assert held["bytes_covered"] > 0.9 * held["bytes"]


def test_best_fit_keeps_documents_whole_and_fills_with_ends(corpus, records, settings):
    made = prepare(settings(records, sources=[str(records), str(corpus)], packing="best_fit", seq_len=64))
    tokenizer = load_tokenizer(made.out / "tokenizer")
    texts = [json.loads(line)["text"] for line in records.read_text().splitlines()]
    texts += [file.read_text() for file in corpus.rglob("*.txt")]
    for split in ("train", "validation"):
        rows = [sample["tokens"] for sample in stored_samples(made.out, split)]
        padding = made.split(split)["padding"]
        filled = sum(int((row == 0)[np.flatnonzero(row)[-1] + 2 :].sum()) for row in rows)
        assert 0 < padding <= filled <= padding + 3  # an end may be all that is left of a document behind a full sample
        assert made.split(split)["samples"] * 64 == made.split(split)["tokens"] + padding
        for row in rows:
            for part in np.split(row, np.flatnonzero(row == 0) + 1):
                text = tokenizer.decode(part[part != 0].tolist())
                # Whole, or one of the full samples of a longer one, or its rest.
                assert text in texts or len(part) == 64 or any(one.endswith(text.lstrip("\ufffd")) for one in texts)


def test_settings_of_documents_that_contradict_each_other_are_reported(settings):
    for changes, said in (
        ({"add_eos_token": False}, "nothing divides documents"),
        ({"add_eos_token": False, "packing": "best_fit"}, "best_fit masks"),
        ({"add_bos_token": True}, "no bos_token"),
    ):
        with pytest.raises(ValidationError, match=said):
            settings("a", **changes)


def test_a_tokenizer_without_a_beginning_is_reported(corpus, settings, tmp_path):
    train_bpe(["the quick brown fox"], 257).save(tmp_path / "tokenizer")
    made = settings(corpus, vocab_size=None, tokenizer=str(tmp_path / "tokenizer"), add_bos_token=True)
    with pytest.raises(TokenizerError, match="add_bos_token: the tokenizer has no bos_token"):
        prepare(made)
    assert not list(Path(made.out).parent.glob("*.partial")), "it was refused, and wrote"


def test_waiting_for_another_process_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks, "_SILENT_SECONDS", 0.05)
    caplog.set_level("INFO")
    with lock_folder(tmp_path / "out"):
        waiting = threading.Thread(target=lambda: lock_folder(tmp_path / "out").__enter__())
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()
    assert f"another process prepares {tmp_path / 'out'}: waiting" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"), [({"tokenizer": "./absent", "vocab_size": None}, "absent"), ({"text_key": "1"}, "no key '1'")]
)
def test_without_a_tokenizer_no_folder_is_left(corpus, settings, tmp_path, changes, words):
    (corpus / "z.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises((TokenizerError, PrepareError), match=words):
        prepare(settings(corpus, **changes), progress=False)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
