"""Chat and completion data from files to shards, and the labels that training makes of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from llmtrain.data.loader.loaders import build_train_loader, build_validation_loader
from llmtrain.data.prepare import prepare
from llmtrain.data.prepare_streams import PreparedStreams, hold_out, prepare_all
from llmtrain.data.shards.index import ShardError
from llmtrain.data.sources.files import PrepareError
from llmtrain.data.tokenize.tokenizer import load_tokenizer
from llmtrain.errors import UserError
from llmtrain.schema.data import DataConfig, PrepareConfig

SEQ_LEN = 48
PAIRS = [(f"What is {n} + {n}?" + " Please." * (n % 4), f"It is {2 * n}.") for n in range(60)]


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


RECORDS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": messages(q, a)} for q, a in PAIRS],
    "sharegpt": [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in PAIRS],
    "alpaca": [{"instruction": q, "input": "", "output": a} for q, a in PAIRS],
    "messages as prompt and completion": [
        {"prompt": messages(q, a)[:1], "completion": messages(q, a)[1:]} for q, a in PAIRS
    ],
    "prompt and response": [{"prompt": q, "response": a} for q, a in PAIRS],
    "messages as JSON text": [{"messages": json.dumps(messages(q, a)), "tools": "[]"} for q, a in PAIRS],
}


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))
    return str(path)


def config(tmp_path: Path, source: str, **settings: Any) -> PrepareConfig:
    chat = {"template": "chatml"} | settings.pop("chat", {})
    values = {"sources": [source], "out": str(tmp_path / "out"), "vocab_size": 320, "seq_len": SEQ_LEN, "workers": 1}
    return PrepareConfig.model_validate(values | {"chat": chat} | settings)


def shards(tmp_path: Path) -> dict[str, Any]:
    out = tmp_path / "out"
    return {file.name: file.read_bytes() for file in (out / "train").iterdir()} | {
        "splits": json.loads((out / "manifest.json").read_text())["splits"]
    }


def data(tmp_path: Path, **settings: Any) -> DataConfig:
    streams = {
        split: {"streams": {"a": {"local": str(tmp_path / "out"), "split": split}}} for split in ("train", "validation")
    }
    values = {"seq_len": SEQ_LEN, "num_workers": 0, "mask_documents": True, "num_canonical_nodes": 1, "shuffle": False}
    return DataConfig.model_validate(values | streams | settings)


@pytest.mark.parametrize("name", RECORDS)
def test_all_formats_of_one_conversation_become_the_same_shards(name, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    # The split goes by a record's place, which differs between the files: none is held out.
    settings = {"validation_fraction": 0.0}
    expected = prepare(config(tmp_path / "a", write(tmp_path / "a" / "x.jsonl", RECORDS["messages"]), **settings))
    made = prepare(config(tmp_path / "b", write(tmp_path / "b" / "x.jsonl", RECORDS[name]), **settings))
    assert made.split("train") == expected.split("train") | {"bytes": made.split("train")["bytes"]}
    tokens = [
        next(iter(build_train_loader(data(tmp_path / one, validation=None), global_batch_size=2))) for one in "ab"
    ]
    assert tokens[0]["input_ids"].tolist() == tokens[1]["input_ids"].tolist()
    assert tokens[0]["labels"].tolist() == tokens[1]["labels"].tolist()


def test_only_answers_are_labels(tmp_path):
    prepare(config(tmp_path, write(tmp_path / "x.jsonl", RECORDS["messages"])))
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert tokenizer.chat_template and len(tokenizer.end_ids) == 2
    found: list[str] = []
    for build in (build_train_loader, build_validation_loader):
        loader = build(data(tmp_path), global_batch_size=1, trained_only=True)
        assert loader is not None
        for batch in cast("Iterable[dict[str, Any]]", loader):
            labels = batch["labels"][0]
            assert batch["label_counts"].tolist() == [(labels != -100).sum()] and batch["text_bytes"].tolist() == [-1]
            inputs = batch["input_ids"][0]
            assert (labels[:-1] == inputs[1:])[labels[:-1] >= 0].all()
            text = tokenizer.decode(labels[labels >= 0].tolist())
            found += [one for one in text.split("<|im_end|>") if one]
            documents = batch["document_ids"][0]
            starts = np.flatnonzero(np.diff(documents.numpy(), prepend=-1))
            opens = tokenizer.backend.token_to_id("<|im_start|>")
            padding = inputs == tokenizer.eod_id
            assert all(inputs[at] == opens or padding[at] for at in starts.tolist())
    assert sorted(found) == sorted(answer for _, answer in PAIRS)
    everything = list(cast("Iterable[dict[str, Any]]", build_train_loader(data(tmp_path), global_batch_size=1)))
    assert all((batch["labels"] != tokenizer.eod_id).all() for batch in everything)  # no padding is a label
    assert sum(int(batch["label_counts"].sum()) for batch in everything) > sum(map(len, found))


@pytest.mark.parametrize("packing", ["best_fit", "padded"])
def test_packing_keeps_conversations_whole(packing, tmp_path):
    made = prepare(config(tmp_path, write(tmp_path / "x.jsonl", RECORDS["messages"]), packing=packing))
    split = made.split("train")
    assert split["tokens"] + split["padding"] == split["samples"] * SEQ_LEN
    assert (split["samples"] == split["documents"]) == (packing == "padded")


def test_what_is_cut_and_what_is_not_trained_is_named(tmp_path):
    long = "word " * 200
    records = [*RECORDS["messages"], {"messages": messages("Tell", long)}, {"messages": messages(long, "Yes")}]
    settings = config(tmp_path, write(tmp_path / "x.jsonl", records), validation_fraction=0.0)
    made = prepare(settings)
    assert made.manifest["truncated"]["x.jsonl"][0] == 2 and made.manifest["truncated"]["x.jsonl"][1] > 200
    assert made.manifest["untrained"] == {"count": 1, "first": [f"{tmp_path}/x.jsonl:62"]}
    assert "x.jsonl: 2 longer than a sample, of which" in made.summary()
    assert f"set aside 1 conversations without a trained token:\n    {tmp_path}/x.jsonl:62" in made.summary()
    assert made.split("train")["documents"] == 61
    assert prepare(settings).reused
    with pytest.raises(PrepareError, match=r"chat: .* then, .*'targets': 'last'"):
        prepare(config(tmp_path, str(tmp_path / "x.jsonl"), validation_fraction=0.0, chat={"targets": "last"}))


@pytest.mark.parametrize("name, kind", [("csv", "alpaca"), ("parquet", "messages"), ("json", "sharegpt")])
def test_tables_and_arrays_hold_conversations_too(name, kind, tmp_path):
    file, records = tmp_path / f"x.{name}", RECORDS[kind]
    if name == "parquet":
        pq.write_table(pa.Table.from_pylist([{"id": number, **one} for number, one in enumerate(records)]), file)
    elif name == "csv":
        lines = [",".join(records[0]), *(",".join(f'"{value}"' for value in one.values()) for one in records)]
        file.write_text("\n".join(lines))
    else:
        file.write_text(json.dumps(records))
    made = prepare(config(tmp_path, str(file), validation_fraction=0.0, chat={"format": kind}))
    assert made.split("train")["documents"] == len(PAIRS)


def test_a_format_is_recognised_by_the_first_record(tmp_path):
    def found(record: Any, **settings: Any) -> PrepareConfig:
        values = {"sources": [write(tmp_path / "x.jsonl", [record])], "out": str(tmp_path / "out"), "vocab_size": 320}
        return hold_out(PrepareConfig.model_validate(values | settings))

    for name, records in RECORDS.items():
        made = found(records[0])
        assert made.chat is not None and made.packing == "best_fit"
        assert made.chat.format == (
            "completion" if name.startswith(("prompt", "messages as prompt")) else name.split()[0]
        )
    assert found({"text": "a", "messages": []}).chat is None
    assert found({"prompt": "a", "completion": "b"}, text_key="prompt").chat is None
    assert found({"prompt": "a", "completion": "b"}, packing="padded").packing == "padded"
    assert found({"title": "a"}).chat is None
    fields = {"prompt": "question", "completion": "answer"}
    named = found({"question": "a", "answer": "b"}, chat={"fields": fields})
    assert named.chat is not None and named.chat.format == "completion"
    with pytest.raises(
        PrepareError, match=r"first record's fields \(title\) are of none of the formats pairs, labels, messages"
    ):
        found({"title": "a"}, chat={})


def test_completions_without_a_template(tmp_path):
    source = write(tmp_path / "x.jsonl", [{"question": q, "answer": f" {a}"} for q, a in PAIRS])
    fields = {"prompt": "question", "completion": "answer"}
    prepare(config(tmp_path, source, chat={"template": None, "fields": fields}, validation_fraction=0.0))
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert tokenizer.chat_template is None
    trained = ""
    for batch in build_train_loader(data(tmp_path, validation=None), global_batch_size=1, trained_only=True):
        trained += tokenizer.decode(batch["labels"][batch["labels"] >= 0].tolist())
    assert sorted(trained.split("<|endoftext|>")) == sorted(["", *(f" {answer}" for _, answer in PAIRS)])


USER, ANSWER = messages("q", "a")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "two questions": ({"messages": [USER, USER, ANSWER]}, r"turn 2 \(user\) stands after user; roles take turns"),
    "an answer first": ({"messages": [ANSWER]}, r"turn 1 \(assistant\) stands at the beginning"),
    "a system turn in the middle": (
        {"messages": [USER, {"role": "system", "content": "x"}]},
        r"turn 2 \(system\) stands",
    ),
    "no answer": ({"messages": [USER, ANSWER, USER]}, "the last turn is user's, not the assistant's"),
    "an empty answer": ({"messages": messages("q", " \n")}, r"turn 2 \(assistant\) is empty; mend the record"),
    "a null answer": ({"messages": [USER, {"role": "assistant", "content": None}]}, r"turn 2 \(assistant\) is empty"),
    "an unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "turn 1 has the role 'wizard'; known are"),
    "no role": ({"messages": [{"content": "x"}]}, "turn 1 has no `role`"),
    "no turns": ({"messages": []}, "'messages' is empty; expected a list of turns"),
    "a text": ({"messages": "hello"}, "'messages' is text, but no JSON"),
    "a number": ({"messages": [USER, {"role": "assistant", "content": 3}]}, "the content of turn 2 is int, not text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER]},
        "turn 1 has a part of type 'image_url', and only text is read",
    ),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]},
        "'text of turn 1' is NoneType",
    ),
    "an untrained answer": (
        {"messages": [USER, ANSWER | {"weight": 0}]},
        r"turn 2 \(assistant\) has weight: 0, but all answers are trained",
    ),
    "half an answer": (
        {"messages": [USER, ANSWER | {"weight": 0.5}]},
        r"turn 2 \(assistant\) has weight: 0.5, but all",
    ),
    "a weight of text": (
        {"messages": [USER, ANSWER | {"weight": "0"}]},
        r'turn 2 \(assistant\) has weight: "0", but all',
    ),
    "a role that is a number": ({"messages": [{"role": 5, "content": "x"}]}, "turn 1 has no `role`, a text: it is 5"),
    "another format": ({"text": "x"}, r"has no 'messages' \(keys: text\); name its field with chat.fields"),
    "tools": ({"messages": [USER, ANSWER], "tools": "{}"}, "'tools' is no list of descriptions"),
    "half a surrogate": ({"messages": messages("q", "\ud800")}, "holds half of a surrogate pair"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_conversation_is_named_by_its_line(name, tmp_path):
    record, reason = BAD[name]
    source = write(tmp_path / "x.jsonl", [*RECORDS["messages"][:20], record, *RECORDS["messages"][20:]])
    settings = {"chat": {"format": "messages"}, "validation_fraction": 0.0}
    with pytest.raises(PrepareError, match=r"x\.jsonl:21: .*" + reason):
        prepare(config(tmp_path, source, **settings))
    made = prepare(config(tmp_path, source, skip_bad_records=True, **settings))
    assert made.manifest["skipped"]["count"] == 1 and made.split("train")["documents"] == len(PAIRS)


def test_bad_prompts_and_completions(tmp_path):
    for record, reason in (
        ({"prompt": "a", "completion": "  "}, "the completion is empty"),
        ({"prompt": "a", "completion": 3}, "'completion' is int, not text"),
        ({"prompt": "a", "completion": None}, "'completion' is null"),
    ):
        source = write(tmp_path / "x.jsonl", [{"prompt": "a", "completion": "b"}, record])
        with pytest.raises(PrepareError, match=rf"x\.jsonl:2: {reason}"):
            prepare(config(tmp_path, source, chat={"template": None}))


def test_a_template_is_needed_and_what_to_do_is_said(tmp_path):
    source = write(tmp_path / "x.jsonl", RECORDS["messages"])
    with pytest.raises(
        PrepareError, match=r"a tokenizer that is trained here has none; .* or `chatml`, as chat\.template"
    ):
        prepare(config(tmp_path, source, chat={"template": None}))
    with pytest.raises(PrepareError, match=r"nowhere\.jinja cannot be read"):
        prepare(config(tmp_path, source, chat={"template": str(tmp_path / "nowhere.jinja")}))
    (tmp_path / "x.jinja").write_text("{{ raise_exception('not so') }}")
    with pytest.raises(
        PrepareError, match=r"x\.jsonl:1: chat template .*x\.jinja: not so; mend the record or the template"
    ):
        prepare(config(tmp_path, source, chat={"template": str(tmp_path / "x.jinja")}))


def test_conversations_need_masks_and_texts_have_no_trained_tokens(tmp_path, stdlib_like):
    prepare(config(tmp_path, write(tmp_path / "x.jsonl", RECORDS["messages"])))
    with pytest.raises(UserError, match=r"packed by best fit, .*set data\.mask_documents: true"):
        build_train_loader(data(tmp_path, mask_documents=False), global_batch_size=1)
    values = {"sources": [stdlib_like], "out": str(tmp_path / "t"), "vocab_size": 300, "seq_len": SEQ_LEN}
    text = prepare(PrepareConfig.model_validate(values | {"validation_fraction": 0.0}))
    streams = {"streams": {"t": {"local": str(text.out), "split": "train"}}}
    loader = build_train_loader(data(tmp_path, train=streams, validation=None), global_batch_size=1, trained_only=True)
    with pytest.raises(ShardError, match="is text, of which no token is marked as trained"):
        next(iter(loader))


def test_streams_of_conversations_and_of_texts_share_a_tokenizer(tmp_path, stdlib_like):
    chats = write(tmp_path / "x.jsonl", RECORDS["prompt and response"])
    values = {"streams": {"chat": [chats], "text": [stdlib_like]}, "out": str(tmp_path / "out"), "vocab_size": 300}
    values |= {"seq_len": SEQ_LEN, "validation_fraction": 0.0}
    made = prepare_all(PrepareConfig.model_validate(values), progress=False)
    assert isinstance(made, PreparedStreams)
    assert "mask_documents: true" in made.yaml.read_text()
    assert "trained" in made.folders["chat"].split("train") and "trained" not in made.folders["text"].split("train")
    streams = {name: {"local": str(folder.out), "split": "train"} for name, folder in made.folders.items()}
    loader = build_train_loader(data(tmp_path, train={"streams": streams}, validation=None), global_batch_size=1)
    assert len(list(loader)) == len(loader)


@pytest.fixture
def stdlib_like(tmp_path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"Line {number} of a text about tea, and more of it.\n" for number in range(400)))
    return str(file)


def test_rejects_fields_that_no_format_or_no_record_has(tmp_path):
    with pytest.raises(ValidationError, match="mesages is no field of a format; did you mean messages"):
        config(tmp_path, "x.jsonl", chat={"fields": {"mesages": "turns"}})
    source = write(tmp_path / "a.jsonl", [{"messages": messages("Why?", "So.")}])
    with pytest.raises(PrepareError, match="has no 'turns'"):
        prepare(config(tmp_path, source, chat={"format": "messages", "fields": {"messages": "turns"}}), progress=False)
