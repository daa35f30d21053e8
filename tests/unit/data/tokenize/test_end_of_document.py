"""Batches in which documents are kept apart, and where the token that ends them is found."""

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmtrain.data.inspect.show import SampleView
from llmtrain.data.inspect.statistics import stream_statistics
from llmtrain.data.loader.batches import collate_packed, filler
from llmtrain.data.loader.loaders import build_train_loader, build_validation_loader
from llmtrain.data.prepare import prepare
from llmtrain.data.shards.index import ShardError
from llmtrain.data.shards.packing import document_ends
from llmtrain.data.shards.stored_stream import open_place
from llmtrain.data.tokenize.end_of_document import check_documents, end_of_document
from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.schema.data import DataConfig
from tests.support.prepared import small


def sample(*tokens: int, text_bytes: int = -1) -> dict:
    return {"tokens": np.array(tokens), "sample_id": 4, "text_bytes": text_bytes}


def test_a_document_is_closed_by_its_last_token():
    batch = collate_packed([sample(5, 9, 6, 9, 9, 7), sample(5, 6, 7, 8, 1, 9), sample(9, 6, 7, 8, 1, 2)], eod_id=9)
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("row", "begins", "ids"),
    [
        ([9, 5, 6, 9, 9, 7, 8, 9], None, [0, 0, 0, 0, 1, 1, 1, 1]),  # BOS = EOS, as the row shows
        ([9, 5, 6, 9, 9, 7, 8, 9], True, [0, 0, 0, 0, 1, 1, 1, 1]),
        ([9, 5, 6, 9, 9, 7, 8, 9], False, [0, 1, 1, 1, 2, 3, 3, 3]),  # an earlier version's folder
        ([9, 5, 6, 7, 8, 1, 2, 3], True, [0] * 8),
        ([9, 5, 6, 7, 8, 1, 2, 3], None, [0] + [1] * 7),
        ([5, 9, 9, 7, 8, 9, 9, 3], True, [0, 0, 1, 1, 1, 1, 2, 2]),
        ([9, 9, 7, 8, 9, 9, 9, 9], True, [0, 1, 1, 1, 1, 2, 3, 4]),  # padding: each by itself, and no label
        ([5, 9, 6, 9, 9, 7, 8, 9], None, [0, 0, 1, 1, 2, 3, 3, 3]),  # an empty document behind one without BOS
        ([5, 9, 9, 9, 9, 7, 8, 9], True, [0, 0, 1, 2, 3, 3, 3, 3]),
        ([9] * 8, True, list(range(8))),
    ],
)
def test_documents_that_begin_and_end_with_one_token_are_not_cut(row, begins, ids):
    batch = collate_packed([sample(*row)], 9, begins)
    [found], [labels] = batch["document_ids"].tolist(), batch["labels"].tolist()
    assert found == ids
    same = [now == after for now, after in itertools.pairwise(ids)] + [False]
    assert labels == [label if within else -100 for label, within in zip([*row[1:], 0], same, strict=True)]


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("tokens", [False, True])
def test_one_token_around_documents_is_recorded_and_read(tmp_path, packing, tokens):
    """Of texts by add_bos_token, and of a .npy whose documents have it: borders, counts, statistics and what `show` prints."""
    made = train_bpe(["the quick brown fox "] * 50, 270, or_fewer=True)
    replace(made, config=made.config | {"bos_token": made.eod_token}).save(tmp_path / "tokenizer")
    texts = [f"the fox{' quick' * (n % 4)}" for n in range(60)]
    documents = [[0, *made.encode(text), 0] for text in texts]
    if tokens:
        np.array([token for ids in documents for token in ids], np.uint16).tofile(tmp_path / "a.npy")
    else:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = tmp_path / ("a.npy" if tokens else "a.jsonl")
    config = small(tmp_path, source, add_bos_token=not tokens, packing=packing)
    result = prepare(config, progress=False)
    assert result.split("train")["documents"] == 60 and result.manifest["tokenizer"]["begin_id"] == 0
    data = DataConfig(seq_len=32, prepare=config, mask_documents=True, num_workers=0, num_canonical_nodes=1)
    ends = end_of_document(data)
    assert ends is not None and ends == (0, True)
    stream = open_place(str(tmp_path / "out/train"))
    assert stream is not None
    rows = stream.tokens(0)
    borders = document_ends(rows, *ends)
    known = {tuple(document) for document in documents}
    for row, last in zip(rows, borders, strict=True):
        parts = [part.tolist() for part in np.split(row, np.flatnonzero(last) + 1)]
        assert all(tuple(part) in known or part == [0] for part in parts[1:-1])
        view = SampleView(made, ends.begins, False)
        shown = [line for line in view.lines("x", row, None) if line.startswith("── tokens")]
        assert len(shown) == len([part for part in parts if part and part != [0]]) or packing == "concatenate"
    if packing == "concatenate":
        bare = replace(stream, places=(str(tmp_path / "out/train"),))
        (tmp_path / "out/manifest.json").rename(tmp_path / "manifest.json")
        [statistics] = stream_statistics(bare, ends, None, lambda samples: None)
        lengths = sorted(map(len, documents[: statistics.documents]))
        assert (statistics.lengths.count, statistics.lengths.longest) == (len(lengths), lengths[-1])


def test_a_first_token_is_nobodys_label_and_the_last_is_its_documents():
    batch = collate_packed([sample(5, 9, 6, 9, 9, 7), sample(5, 6, 7, 8, 1, 9)], eod_id=9)
    assert batch["labels"].tolist() == [[9, -100, 9, -100, -100, -100], [6, 7, 8, 1, 9, -100]]


def test_bytes_behind_labels_are_known_where_no_label_is_gone():
    rows = [sample(5, 9, 6, text_bytes=7), sample(5, 6, 9, text_bytes=8), filler(3)]
    assert collate_packed(rows, eod_id=9)["text_bytes"].tolist() == [-1, 8, 0]
    batch = collate_packed(rows, eod_id=0)  # what fillers are made of
    assert batch["text_bytes"].tolist() == [7, 8, 0] and (batch["labels"][2] == -100).all()


@pytest.fixture
def prepared(settings, corpus) -> DataConfig:
    made = settings(corpus)
    prepare(made, progress=False)
    return DataConfig(seq_len=32, prepare=made, mask_documents=True, num_workers=0, num_canonical_nodes=1)


def streams(of: DataConfig, **stream: str) -> DataConfig:
    return DataConfig.model_validate(of.model_dump() | {"prepare": None, "train": {"streams": {"text": stream}}})


def test_batches_of_prepared_shards_are_cut_where_documents_end(prepared):
    found = end_of_document(prepared)
    assert found is not None and found == (0, False)
    for loader in (
        build_train_loader(prepared, global_batch_size=4),
        build_validation_loader(prepared, global_batch_size=4),
    ):
        assert loader is not None
        batches: list[Any] = list(loader)
        assert any(batch["document_ids"].max() > 0 for batch in batches)
        for batch in batches:
            changes = batch["document_ids"].diff(dim=1).bool()
            assert (changes == (batch["input_ids"] == found.eod_id)[:, :-1]).all()
            assert (batch["labels"][:, :-1][changes] == -100).all()


def test_the_switch_changes_neither_samples_nor_their_order(prepared):
    def batches(mask: bool) -> list[Any]:
        return list(build_train_loader(prepared.model_copy(update={"mask_documents": mask}), global_batch_size=4))

    masked, usual = batches(True), batches(False)
    assert [b["sample_ids"].tolist() for b in masked] == [b["sample_ids"].tolist() for b in usual]
    assert not any("document_ids" in batch for batch in usual)


def test_the_manifest_or_the_tokenizer_beside_the_shards_states_it(prepared, tmp_path):
    out = tmp_path / "out"
    assert end_of_document(streams(prepared, local=str(out), split="train")) == (0, False)
    assert end_of_document(streams(prepared, local=str(out / "train"))) == (0, False)
    (out / "manifest.json").unlink()
    assert end_of_document(streams(prepared, local=str(out), split="train")) == (0, None)  # by tokenizer/


def test_it_is_not_looked_for_unless_asked(tmp_path):
    data = DataConfig.model_validate({"train": {"streams": {"a": {"local": str(tmp_path)}}}})
    assert end_of_document(data) is None and list(check_documents(data)) == []


def test_shards_that_do_not_say_are_refused_before_a_run(prepared, tmp_path):
    data = streams(prepared, local=str(tmp_path / "bare"), split="train")
    [problem] = check_documents(data)
    assert problem.path == "data.mask_documents"
    assert f"neither {tmp_path / 'bare/manifest.json'} nor {tmp_path / 'bare/tokenizer'} says" in problem.message
    assert "`llmtrain prepare`" in problem.message


def test_streams_that_end_documents_differently_are_refused(prepared, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "manifest.json").write_text(json.dumps({"tokenizer": {"eod_id": 7}}))
    both = {"a": {"local": str(tmp_path / "out"), "split": "train"}, "b": {"local": str(other), "split": "train"}}
    data = DataConfig.model_validate(prepared.model_dump() | {"prepare": None, "train": {"streams": both}})
    with pytest.raises(ShardError, match=rf"different tokens \(0 in {tmp_path / 'out'}, 7 in {other}\)"):
        end_of_document(data)


def test_data_that_is_not_prepared_yet_is_not_asked(settings, corpus):
    made = settings(corpus)
    assert list(check_documents(DataConfig(seq_len=32, prepare=made, mask_documents=True))) == []


def test_samples_that_are_filled_are_trained_on_with_masks_alone(settings, corpus, tmp_path):
    """No label is padding, and every token of a document but its first is one."""
    made = settings(corpus, packing="best_fit")
    prepare(made, progress=False)
    data = DataConfig(seq_len=32, prepare=made, mask_documents=True, num_workers=0, num_canonical_nodes=1)
    for loader in (build_train_loader(data, global_batch_size=4), build_validation_loader(data, global_batch_size=4)):
        assert loader is not None
        batches: list[Any] = list(loader)
        for batch in batches:
            ids, labels = batch["input_ids"], batch["labels"]
            assert ((labels[:, :-1] == -100) == (ids[:, :-1] == 0))[batch["sample_ids"] >= 0].all()
            assert (labels[:, -1] == -100).all()
    plain = streams(data, local=made.out, split="train").model_copy(
        update={"mask_documents": False, "validation": None}
    )
    [problem] = check_documents(plain)
    assert problem.path == "data.mask_documents" and "filled with end-of-document tokens" in problem.message
    with pytest.raises(ShardError, match="mask_documents: true"):
        build_train_loader(plain, global_batch_size=4)
