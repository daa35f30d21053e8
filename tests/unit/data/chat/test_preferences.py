"""Pairs and labelled answers from records to batches of the loader."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.data.chat.conversation import ChatFault
from llmtrain.data.chat.preferences import convert, preference
from llmtrain.data.chat.samples import ChatSettings
from llmtrain.data.chat.template import CHATML, ChatTemplate
from llmtrain.data.loader.loaders import build_train_loader
from llmtrain.data.prepare import prepare
from llmtrain.data.shards.checks import require_records
from llmtrain.data.sources.files import PrepareError
from llmtrain.data.tokenize.tokenizer import load_tokenizer
from llmtrain.errors import UserError
from llmtrain.objectives.preference import Preference
from llmtrain.objectives.sections import NextTokenSection, PreferenceSection
from llmtrain.schema.data import DataConfig, PrepareConfig

SEQ_LEN = 64
PAIRS = PreferenceSection(type="preference")
KTO = PreferenceSection(type="preference", loss={"kto": 1.0})


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = said("user", "Why?"), said("assistant", "So."), said("assistant", "No.")
RECORDS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "implicit": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "prompt beside whole conversations": {"prompt": "Why?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "prompt as text": {"prompt": "Why?", "chosen": [GOOD], "rejected": [BAD]},
    "JSON text": {"prompt": json.dumps([ASKED]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
    "answers as text": {"prompt": [ASKED], "chosen": "So.", "rejected": "No."},
    "turns beside whole conversations": {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
}


@pytest.mark.parametrize("name", RECORDS)
def test_forms_of_one_pair_of_messages_are_the_same(name: str):
    found = preference(RECORDS[name], "pairs")
    assert (found.prompt, found.answers) == ([ASKED], [[GOOD], [BAD]])


def test_texts_without_a_prompt_share_their_beginning_up_to_a_space():
    found = preference({"chosen": "1 + 1 is 2", "rejected": "1 + 1 is three"}, "pairs")
    assert (found.prompt, found.answers) == ("1 + 1 is", [" 2", " three"])


def test_a_system_text_is_the_first_turn():
    found = preference({"system": "Be brief.", **RECORDS["messages"]}, "pairs")
    assert found.prompt == [said("system", "Be brief."), ASKED]
    settings = ChatSettings("pairs", (), ChatTemplate(CHATML, {}, "chatml"), "all", "none")
    texts = {"system": "Be brief.", "prompt": "Why?", "chosen": "So.", "rejected": "No."}
    made, fault = convert(settings, texts)
    assert fault is None and json.loads(made)["answers"][0][0].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "which only a chat template writes" in (convert(replace(settings, plain=True), texts)[1] or "")


def test_fields_and_tools_of_a_label():
    record = {"q": [ASKED], "response": [GOOD], "label": 0, "tools": "[]"}
    found = preference(record, "labels", {"prompt": "q"})
    assert (found.prompt, found.answers, found.desirable) == ([ASKED], [[GOOD]], False)


@pytest.mark.parametrize(
    "record,name,expected",
    [
        ({"chosen": "a", "rejected": "a"}, "pairs", "are the same"),
        ({"prompt": "x", "chosen": " ", "rejected": "a"}, "pairs", "'chosen' is empty"),
        ({"chosen": "a", "rejected": "b"}, "pairs", "begin differently, and there is no 'prompt'"),
        ({"prompt": "x", "chosen": "a", "rejected": [GOOD]}, "pairs", "text and 'rejected' are messages"),
        ({"prompt": "x", "rejected": "a"}, "pairs", "has no 'chosen'"),
        ({"prompt": "x", "chosen": "a", "rejected": None}, "pairs", "'rejected' is null"),
        (
            {"prompt": "x", "chosen": [ASKED, GOOD], "rejected": [BAD | {"role": "user"}, BAD]},
            "pairs",
            "the same first turn",
        ),
        ({"prompt": "x", "chosen": 3, "rejected": "a"}, "pairs", "'chosen' is int"),
        ({"prompt": [GOOD], "chosen": [GOOD], "rejected": [BAD]}, "pairs", "prompt and 'chosen': turn 1 "),
        ({"prompt": [ASKED], "chosen": [said("assistant", "")], "rejected": [BAD]}, "pairs", "turn 2 .*is empty"),
        ({"prompt": [ASKED], "chosen": [GOOD, ASKED], "rejected": [BAD]}, "pairs", "the last turn is user's"),
        ({"prompt": "x", "completion": "y", "label": "good"}, "labels", "'label' is \"good\"; expected true"),
        ({"prompt": "x", "completion": "", "label": True}, "labels", "'completion' is empty"),
        ([1], "pairs", "expected an object, found list"),
        (
            {"question": "q", "chosen": "The a", "rejected": "The b"},
            "pairs",
            "has 'question' but no 'prompt'; give chat.f",
        ),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]}, "pairs", "the beginning of the other"),
    ],
)
def test_rejects_records_of_which_nothing_can_be_learned(record: Any, name: str, expected: str):
    with pytest.raises(ChatFault, match=expected):
        preference(record, name)


def made(tmp_path: Path, records: list[Any], **settings: Any) -> DataConfig:
    source = tmp_path / "records.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in records))
    values = {"sources": [str(source)], "out": str(tmp_path / "out"), "vocab_size": 300, "seq_len": SEQ_LEN}
    config = PrepareConfig.model_validate(values | {"workers": 1, "validation_fraction": 0.0} | settings)
    prepare(config, progress=False)
    return DataConfig(seq_len=SEQ_LEN, prepare=config, mask_documents=True, shuffle=False, num_workers=0)


def batches(data: DataConfig) -> list[dict[str, Any]]:
    """Each sample of the training data as a batch."""
    loader = build_train_loader(data, global_batch_size=1, trained_only=True)
    samples = loader.dataset
    return [loader.collate_fn([samples.get_item(number)]) for number in range(samples.num_samples)]  # type: ignore


def answers(data: DataConfig) -> list[list[tuple[str, str, bool]]]:
    """(text, trained part, undesirable) of each document with labels, by sample."""
    tokenizer = load_tokenizer(f"{data.prepare.out}/tokenizer")  # type: ignore[union-attr]
    found: list[list[tuple[str, str, bool]]] = []
    for batch in batches(data):
        found.append([])
        documents, labels = batch["document_ids"][0], batch["labels"][0]
        for document in documents.unique().tolist():
            own = documents == document
            trained = labels[own][labels[own] != -100]
            if len(trained):
                text, answer = (tokenizer.decode(ids.tolist()) for ids in (batch["input_ids"][0][own], trained))
                found[-1].append((text, answer, bool(batch["undesirable"][0][own].all())))
    return found


TEXTS = [{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}.", "rejected": f" about {3 * n} or so."} for n in range(1, 30)]


@pytest.mark.parametrize("packing", ["best_fit", "padded"])
def test_pairs_stay_together_whole_and_in_order(packing: str, tmp_path: Path):
    rows = answers(made(tmp_path, TEXTS, packing=packing))
    assert all(len(row) % 2 == 0 for row in rows)
    assert (len(rows) == len(TEXTS)) == (packing == "padded")
    found = [(row[at], row[at + 1]) for row in rows for at in range(0, len(row), 2)]
    end = "<|endoftext|>"
    expected = {
        (one["prompt"] + one["chosen"] + end, one["prompt"] + one["rejected"] + end, one["chosen"] + end)
        for one in TEXTS
    }
    assert {(chosen[0], rejected[0], chosen[1]) for chosen, rejected in found} == expected
    assert all(rejected[1].endswith(" or so." + end) for _, rejected in found)


def test_labelled_answers_stand_beside_the_answer_of_another_record(tmp_path: Path):
    records = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}.", "label": bool(n % 3)} for n in range(1, 30)]
    data = made(tmp_path, records)
    found = [row[at : at + 2] for row in answers(data) for at in range(0, len(row), 2)]
    assert len(found) == 29
    desirable = {one["prompt"]: one["label"] for one in records}
    for own, other in found:
        prompt = own[0].removesuffix(own[1])
        assert other[0] == prompt + other[1] and other[1] != own[1]
        assert own[2] is other[2] is not desirable[prompt]
    counts = np.array([(Preference(KTO).count(b), *Preference(KTO).further_counts(b)[:2]) for b in batches(data)]).sum(
        0
    )
    assert counts.tolist() == [29, sum(desirable.values()), 29 - sum(desirable.values())]


def test_a_pair_that_is_too_long_is_cut_and_one_without_an_answer_set_aside(tmp_path: Path):
    long = {"prompt": "a b c", "chosen": " d" * 90, "rejected": " e"}
    useless = {"prompt": "x y z " * 60, "chosen": " d", "rejected": " e"}
    data = made(tmp_path, [*TEXTS, long, useless])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["splits"]["train"]["documents"] == len(TEXTS) + 1
    [row] = [row for row in answers(data) if row[0][0].startswith("a b c")]
    assert row[1][0].endswith(" e<|endoftext|>") and row[0][0].endswith(" d") and len(row) == 2


def test_chat_templates_apply_to_messages(tmp_path: Path):
    data = made(tmp_path, [RECORDS["messages"]] * 8, chat={"template": "chatml"}, vocab_size=264)
    [(chosen, rejected), *_] = [row[:2] for row in answers(data)]
    assert chosen[0].startswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert (chosen[1], rejected[1]) == ("So.<|im_end|>\n", "No.<|im_end|>\n")


@pytest.mark.parametrize("place", [0, 3])
def test_a_bad_pair_is_named_by_its_file_and_record(place: int, tmp_path: Path):
    records: list[Any] = [*TEXTS[:5]]
    records.insert(place, {"prompt": "x", "chosen": "a", "rejected": "a"})
    with pytest.raises(PrepareError, match=f"records.jsonl.*{place + 1}.* are the same"):
        made(tmp_path, records)


def test_messages_need_a_template_and_settings_without_effect_are_refused(tmp_path: Path):
    with pytest.raises(PrepareError, match="need a chat template: name one with"):
        made(tmp_path, [RECORDS["messages"]])
    with pytest.raises(PrepareError, match="have no effect on pairs"):
        made(tmp_path, TEXTS, chat={"prompts": "all"})


def test_shards_go_with_the_objective_that_their_records_are_for(tmp_path: Path):
    data = made(tmp_path, TEXTS)
    require_records(data, PAIRS)
    with pytest.raises(UserError, match=r"data.prepare: .*holds pairs; kto needs labels"):
        require_records(data, KTO)
    with pytest.raises(UserError, match="holds pairs, good answers beside bad ones, for objective: preference"):
        require_records(data, NextTokenSection())
    (tmp_path / "text").mkdir()
    texts = made(tmp_path / "text", [{"text": f"{n} is a number"} for n in range(200)], add_eos_token=True)
    require_records(texts, NextTokenSection())
    with pytest.raises(UserError, match="was not made of preferences; sigmoid needs pairs"):
        require_records(texts, PAIRS)


def test_further_columns_of_samples_come_with_batches(tmp_path: Path):
    loader = build_train_loader(made(tmp_path, TEXTS), global_batch_size=2, trained_only=True)
    samples = loader.dataset.num_samples
    loader.dataset.beside["reference_log_p"] = np.arange(samples * 4, dtype=np.float32).reshape(samples, 4)
    batch: dict[str, Any] = next(iter(loader))  # type: ignore[assignment]
    assert batch["reference_log_p"].tolist() == [
        [4.0 * id + n for n in range(4)] for id in batch["sample_ids"].tolist()
    ]
