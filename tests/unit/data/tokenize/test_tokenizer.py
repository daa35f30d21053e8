import json
import re
from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.data.tokenize.stored_tokenizer import as_trained, checksums, load_imported
from llmtrain.data.tokenize.tokenizer import EOD, TokenizerError, load_tokenizer, train_bpe
from llmtrain.errors import UserError
from llmtrain.models.hf.hf_checkpoint import find_hf_folder


@pytest.fixture(scope="module")
def tokenizer(make_text):
    return train_bpe([make_text(seed, 500) for seed in range(20)], 300)


@pytest.mark.parametrize(
    "text", ["the quick brown fox", "  tabs\tand\r\n lines\n\n", "走 \U0001f600 \x00 é", f"a {EOD} b", ""]
)
def test_encoding_is_lossless_for_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids


def test_a_trained_tokenizer_has_the_size_asked_for_and_is_the_same_every_time(tokenizer, make_text):
    again = train_bpe((make_text(seed, 500) for seed in range(20)), 300)
    assert tokenizer.vocab_size == 300 == len(tokenizer.backend.get_vocab())
    assert again.backend.to_str() == tokenizer.backend.to_str()


def test_merges_come_from_the_training_text(tokenizer, make_text):
    assert len(tokenizer.encode(make_text(99, 200))) < 0.75 * len(make_text(99, 200).encode())


def test_a_saved_tokenizer_loads_everywhere_and_agrees(tokenizer, tmp_path, make_text):
    tokenizer.save(tmp_path)
    text = make_text(5, 50)
    expected = tokenizer.encode(text)
    for loaded in (load_tokenizer(tmp_path), load_tokenizer(tmp_path / "tokenizer.json")):
        assert (loaded.encode(text), loaded.eod_token, loaded.eod_id) == (expected, EOD, tokenizer.eod_id)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == expected
    for hub in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert hub(text)["input_ids"] == expected
        assert hub.eos_token_id == tokenizer.eod_id
        assert hub.decode(expected) == text


def test_end_of_document_comes_from_the_tokenizer_config(tokenizer, tmp_path):
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eod_token, loaded.eod_id, loaded.vocab_size) == ("</s>", 300, 301)


def test_what_cannot_be_loaded_gives_the_reason(tokenizer, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    backend = json.loads(tokenizer.backend.to_str())
    (tmp_path / "none").mkdir()
    backend["added_tokens"] = []
    del backend["model"]["vocab"][EOD]
    (tmp_path / "none/tokenizer.json").write_text(json.dumps(backend))
    cases = {
        "no such file or folder": "./missing",
        "holds no tokenizer": tmp_path / "empty",
        "is not a tokenizer of the `tokenizers` library": tmp_path / "bad.json",
        "no end-of-document token": tmp_path / "none",
        "neither a folder, nor a file, nor a name": "not a name!",
    }
    for said, name in cases.items():
        with pytest.raises(TokenizerError, match=said):
            load_tokenizer(name)


def test_an_unreachable_hub_explains_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TokenizerError, match="hf download some/model"):
        load_tokenizer("some/model")


class TooManyRedirects(Exception):
    """As of the hub's HTTP library: no OSError."""


@pytest.mark.parametrize("load", [load_tokenizer, find_hf_folder])
def test_a_hub_that_redirects_for_ever_explains_what_to_do(monkeypatch, load):
    def redirected(*given, **options):
        raise TooManyRedirects("Exceeded maximum allowed redirects.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", redirected)
    with pytest.raises(UserError, match=r"did not give it \(TooManyRedirects\).*hf download some/model"):
        load("some/model")


def test_a_text_too_small_for_the_vocabulary_is_an_error():
    with pytest.raises(TokenizerError, match=r"only \d+ of the 1000"):
        train_bpe(["abc"], 1000)


def test_a_small_text_may_yield_fewer_tokens_if_that_is_reported():
    assert 256 < train_bpe(["abc"], 1000, or_fewer=True).vocab_size < 300
    assert train_bpe(["some words of text"], 260, or_fewer=True).vocab_size == 260


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [5, 7]}, "config.json": {"eos_token_id": 3}}, [0, 5, 7]),
        ({"config.json": {"eos_token_id": [0, 9, 8]}}, [0, 9, 8]),
        ({"config.json": {"eos_token_id": "end"}}, [0]),
        ({}, [0]),
    ],
)
def test_the_tokens_that_end_an_answer_outlive_a_copy(tokenizer, tmp_path, files, ends):
    """As `import` keeps them: all that transformers stops at, from the config too where there is no generation config."""
    tokenizer.save(tmp_path / "published")
    for name, content in files.items():
        (tmp_path / "published" / name).write_text(json.dumps(content))
    load_tokenizer(tmp_path / "published").save(tmp_path / "imported")
    assert load_tokenizer(tmp_path / "imported").end_ids == ends


@pytest.mark.parametrize(
    ("manifest", "prepare", "begins"),
    [
        ({"tokenizer": {"eod_id": 0, "begin_id": 9}, "inputs": {}}, None, (9,)),
        ({"tokenizer": {"eod_id": 0}, "inputs": {"add_bos_token": True}}, None, (4,)),  # of an earlier version
        ({"tokenizer": {"eod_id": 0}, "inputs": {"add_bos_token": False}}, None, ()),
        (None, {"add_bos_token": True}, (4,)),  # the shards are elsewhere
        (None, {"add_bos_token": False}, ()),
        (None, None, None),  # shards of others
    ],
)
def test_a_run_begins_texts_as_its_data_did(tokenizer, tmp_path, manifest, prepare, begins):
    made = replace(tokenizer, config=tokenizer.config | {"bos_token": tokenizer.decode([4])})
    if manifest:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    train = {"streams": {"a": {"local": str(tmp_path / "train")}}}
    data = {"prepare": prepare and prepare | {"out": str(tmp_path)}, "train": None if prepare else train}
    assert as_trained(made, data).begins == begins


def test_a_text_needs_the_rows_of_the_tokens_that_begin_it(tokenizer):
    made = replace(tokenizer, backend=Tokenizer.from_str(tokenizer.backend.to_str()))
    assert made.rows_needed == tokenizer.vocab_size
    made.backend.post_processor = TemplateProcessing(single="Q $A", special_tokens=[("Q", 100_000)])
    assert made.prompt_ids("")[0] == 100_000
    assert made.rows_needed == 100_001


@pytest.mark.parametrize("token", [["</s>"], 3, {"content": ["</s>"]}])
def test_a_token_that_is_none_is_refused(tokenizer, tmp_path, token):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    with pytest.raises(TokenizerError, match="is no token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda folder: None, ""),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "tokenizer_config.json"),
        (lambda folder: (folder / "tokenizer_config.json").write_text('{"a": 1}'), "tokenizer_config.json"),
        (lambda folder: (folder / "chat_template.jinja").write_text("x"), "chat_template.jinja"),
    ],
    ids=["as it was", "gone", "another", "added"],
)
def test_a_changed_file_of_an_import_s_tokenizer_is_named(tokenizer, tmp_path, capsys, edit, named):
    tokenizer.save(tmp_path)
    recorded = checksums(tmp_path)
    edit(tmp_path)
    load_imported(tmp_path, recorded)
    text = capsys.readouterr().err
    assert (f"{tmp_path}: {named}: changed, added or gone since the import" in text) if named else not text
    load_imported(tmp_path, None)  # of an import before there were checksums
    assert ("changed" in capsys.readouterr().err) == (not (tmp_path / "tokenizer_config.json").exists())


def test_a_word_of_any_length_trains_a_tokenizer_as_many_words_do(monkeypatch):
    """The trainer's time grows with the square of a word's length: 300,000 brackets took minutes."""
    fed, train = [], Tokenizer.train_from_iterator

    def feed(own, texts, trainer):
        fed.extend(texts)
        train(own, fed, trainer)

    monkeypatch.setattr(Tokenizer, "train_from_iterator", feed)
    text = "ab " + "[" * 10_000 + "x" * 5000 + " " * 9000 + "_" * 4096 + "a" * 4096
    train_bpe([text, "short"], 270, or_fewer=True)
    assert "".join(fed) == text + "short" and fed[-1] == "short"
    words = [word for piece in fed for word in re.findall(r"[a-z]+|\s+|[^a-z\s]+", piece)]
    assert max(map(len, words)) == 4096
