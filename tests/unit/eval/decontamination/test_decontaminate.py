"""Overlap with training data: the documents found, and their locations."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from llmtrain.eval.decontamination.decontaminate import NgramSet, decontaminate, mds_samples, ngram_hashes, text_samples
from llmtrain.eval.errors import EvalError
from llmtrain.eval.tasks.documents import Choices, Continuation, Document
from tests.support.icl import some_sentence


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    rng = random.Random(2)
    long = [Choices(some_sentence(rng, 30), (some_sentence(rng, 5), "no"), 0) for _ in range(20)]
    contents = [*long, Choices("too short", ("yes", "no"), 0)]
    return [Document(i, f"x.jsonl:{i + 1}", content) for i, content in enumerate(contents)]


def text(document: Document) -> str:
    assert isinstance(document.content, Choices)
    return f"{document.content.query} {document.content.choices[0]}"


@pytest.fixture
def corpus(tmp_path, documents) -> Path:
    """Two files of other text; the second holds document 4 whole, and half of document 7."""
    rng = random.Random(3)
    filler = [some_sentence(rng, 300) for _ in range(6)]
    (tmp_path / "clean.txt").write_text("\n".join(filler[:3]))
    whole, half = text(documents[4]), text(documents[7])
    half = " ".join(half.split()[10:])
    (tmp_path / "leak.txt").write_text(f"{filler[3]}\n{whole}\n{filler[4]} {half}\n{filler[5]}")
    return tmp_path


def test_leaks_in_text_files_are_found_and_placed(corpus, documents, tokenizer):
    seen = []
    samples = text_samples([corpus], tokenizer)
    [found, none] = decontaminate(
        {"mine": documents, "other": documents[:3]}, samples, tokenizer, progress=lambda *at: seen.append(at)
    )
    assert (found.documents, found.checked) == (21, 20)
    assert [hit.document for hit in found.hits] == ["x.jsonl:5", "x.jsonl:8"]
    whole, half = found.hits
    assert whole.share == 1.0
    assert 0.3 < half.share < 0.9
    assert "leak.txt" in whole.found
    assert whole.text in text(documents[4])
    assert half.text in text(documents[7])
    assert found.share == pytest.approx(2 / 20)
    assert none.hits == []
    assert seen
    assert all(0 <= done <= total for done, total in seen)


def test_leaks_in_shards_are_found_as_token_ids(corpus, documents, tokenizer, tmp_path):
    from llmtrain.data.prepare import prepare
    from tests.support.prepared import small

    tokenizer.save(tmp_path / "tokenizer")
    prepare(small(tmp_path, corpus / "leak.txt", corpus / "clean.txt", seq_len=64), progress=False)
    samples = list(mds_samples(tmp_path / "out" / "train", tokenizer))
    assert samples[-1].done == samples[-1].total == len(samples) > 5
    [found] = decontaminate({"mine": documents}, samples, tokenizer)
    assert [hit.document for hit in found.hits] == ["x.jsonl:5", "x.jsonl:8"]
    row = int(found.hits[0].found.rpartition(":")[2])
    assert found.hits[0].text in tokenizer.decode(samples[row].ids.tolist())


@pytest.mark.parametrize("continuation", ["the answer", " the answer", "  the answer "])
@pytest.mark.parametrize("context", ["It is", "It is "])
def test_a_document_reads_as_running_text(context, continuation):
    assert Document(0, "x:1", Continuation(context, continuation)).text == "It is the answer"
    assert Document(0, "x:1", Continuation(context, " . So")).text == "It is. So"


def test_longer_ngrams_find_less(corpus, documents, tokenizer):
    def hits(n: int) -> int:
        [found] = decontaminate({"mine": documents}, text_samples([corpus], tokenizer), tokenizer, n=n)
        return len(found.hits)

    length = len(tokenizer.encode(text(documents[4])))
    assert hits(2) > hits(13) == 2
    assert hits(length - 4) == 1


def test_jsonl_and_bad_input(documents, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"and {text(documents[0])}"}) + "\n{}\n")
    with pytest.raises(EvalError, match=r"a.jsonl:2: has no key 'text'"):
        list(text_samples([tmp_path / "a.jsonl"], tokenizer))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"and {text(documents[0])}"}))
    [found] = decontaminate({"mine": documents}, text_samples([tmp_path / "a.jsonl"], tokenizer), tokenizer)
    assert [hit.document for hit in found.hits] == ["x.jsonl:1"]
    with pytest.raises(EvalError, match="none"):
        list(text_samples([tmp_path / "none"], tokenizer))
    with pytest.raises(EvalError, match=r"holds no index\.json of MDS shards"):
        list(mds_samples(tmp_path, tokenizer))
    (tmp_path / "part.ds").write_bytes(b"\1\0" * 20)  # which would be 40 characters of text
    (tmp_path / "part.ds.index").write_bytes((20).to_bytes(8, "little"))
    with pytest.raises(EvalError, match=r"part\.ds holds token ids"):
        list(text_samples([tmp_path], tokenizer))
    with pytest.raises(EvalError, match="at least 2"):
        decontaminate({}, [], tokenizer, n=1)


def test_hashes_are_of_windows():
    ids = np.array([5, 6, 7, 5, 6, 7, 8])
    hashes = ngram_hashes(ids, 3)
    assert len(hashes) == 5
    assert hashes[0] == hashes[3] != hashes[1]
    assert ngram_hashes(np.array([7, 6, 5]), 3) != hashes[0]
    assert len(ngram_hashes(ids, 8)) == 0


def test_a_set_finds_its_members_and_nothing_else():
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 1 << 63, 200_000, dtype=np.uint64)
    inside = np.unique(stream[::1000])
    others = rng.integers(0, 1 << 63, 5_000, dtype=np.uint64)
    made = NgramSet(np.concatenate([inside, others, inside]))
    positions, members = made.find(stream)
    assert np.array_equal(np.unique(stream[positions]), inside)
    assert np.array_equal(made.hashes[members], stream[positions])
    assert len(NgramSet(np.zeros(0, np.uint64)).find(stream)[0]) == 0
