"""Held-out questions of a run, and the callback that continues them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.data.prepare import prepare
from llmtrain.data.sources.made_up import questions, records_file
from llmtrain.data.tokenize.tokenizer import TextTokenizer, load_tokenizer
from llmtrain.errors import UserError
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import LossConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.data import DataConfig, PrepareConfig
from llmtrain.schema.evaluation import SamplesConfig
from llmtrain.train.callbacks import samples
from llmtrain.train.callbacks.samples import EXACT_MATCH, Samples, held_out_questions
from tests.support.chats import prepare_chats
from tests.support.tiny import tiny_config


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("chats")
    shards = prepare_chats(folder, "best_fit", count=80)
    changes = {"data.seq_len": 64, "model.max_seq_len": 64, "model.vocab_size": 304, "data.mask_documents": True}
    return tiny_config(shards, folder / "run", changes | {"data.num_canonical_nodes": 1})


@pytest.fixture(scope="module")
def tokenizer(config) -> Any:
    return load_tokenizer(config.data.validation.streams["text"].local + "/tokenizer")


def test_questions_are_conversations_up_to_their_last_answer(config, tokenizer):
    found = list(held_out_questions(config.data, 4, tokenizer, 60))
    assert len(found) == 4
    for one in found:
        prompt, answer = tokenizer.decode(one.ids), tokenizer.decode(one.answer or [])
        assert prompt.startswith("<|im_start|>user\nRepeat ") and prompt.endswith("<|im_start|>assistant\n")
        assert prompt.rpartition("Repeat ")[2].startswith(f"{answer}<|im_end|>")
    assert all(len(one.ids) <= 20 for one in held_out_questions(config.data, 99, tokenizer, 20))


def prepared(
    folder: Path, records: list[dict[str, Any]], seq_len: int, held_out: float
) -> tuple[DataConfig, TextTokenizer]:
    """Data of these records, and their tokenizer. held_out: the share for validation."""
    source, out = folder / "records.jsonl", folder / "out"
    source.write_text("".join(json.dumps(one) + "\n" for one in records))
    values = {"sources": [str(source)], "out": str(out), "vocab_size": 290, "seq_len": seq_len, "workers": 1}
    section = PrepareConfig.model_validate(values | {"validation_fraction": held_out})
    prepare(section, progress=False)
    return DataConfig(seq_len=seq_len, prepare=section, mask_documents=True), load_tokenizer(f"{out}/tokenizer")


def test_questions_are_drawn_from_all_lengths(tmp_path):
    """Best-fit packing puts conversations of like length into the same samples: the first samples alone would hold one kind."""
    asked = [f"Repeat {'ab ' * size}{n}" for n in range(60) for size in (1, 4, 9, 16)]
    data, tokenizer = prepared(tmp_path, [{"prompt": one, "completion": "Yes."} for one in asked], 512, 0.8)
    found = held_out_questions(data, 24, tokenizer, 60)
    sizes = [tokenizer.decode(one.ids).count("ab") for one in found]
    assert len(found) == 24 and set(sizes) == {1, 4, 9, 16}
    assert [one.ids for one in held_out_questions(data, 24, tokenizer, 60)] == [one.ids for one in found]


@pytest.mark.parametrize("kto", [False, True])
def test_questions_of_preferences_are_answered_as_chosen(tmp_path, kto):
    asked = [(f"{n} + {n} =", f" {2 * n}.") for n in range(1, 40)]
    made = [{"prompt": one, "chosen": right, "rejected": " who knows?"} for one, right in asked]
    if kto:
        answers = [(right, True) for _, right in asked[::2]] + [(" who knows?", False)] * len(asked[1::2])
        prompts = [one for one, _ in asked[::2] + asked[1::2]]
        made = [{"prompt": p, "completion": c, "label": y} for p, (c, y) in zip(prompts, answers, strict=True)]
    data, tokenizer = prepared(tmp_path, made, 64, 0.5)
    found = list(held_out_questions(data, 99, tokenizer, 60, of_pairs=True))
    texts = {(tokenizer.decode(one.ids), tokenizer.decode(one.answer or [])) for one in found}
    assert len(found) >= 5 and texts <= set(asked)


@pytest.fixture
def logged(config, tokenizer, tmp_path, monkeypatch) -> Any:
    """The callback with a model that answers the first of three questions rightly, and metrics by name."""
    model = HybridLM(config.model)
    model.init_weights(0)
    metrics: dict[str, Any] = {}
    logger = SimpleNamespace(
        log_metrics=metrics.update, log_table=lambda columns, rows, name: metrics.update({name: rows})
    )
    made = Samples(
        SamplesConfig(prompts=["Hello"], questions=3, max_new_tokens=12),
        config.data, CausalLM(model, LossConfig()), tokenizer, 5, tmp_path, True,
    )  # fmt: skip
    answer = [*(made.asked[1].answer or []), tokenizer.end_ids[1]]

    def decode(model: Any, prompts: list[list[int]], *_: Any, max_new_tokens: int) -> Any:
        for step in range(max_new_tokens):
            yield [answer[step] if row == 1 and step < len(answer) else 7 for row in range(len(prompts))]

    monkeypatch.setattr(samples, "decode", decode)
    return made, logger, metrics


def at(step: int, last: bool = False) -> Any:
    timestamp = SimpleNamespace(batch=SimpleNamespace(value=step), __ge__=lambda *_: last)
    return SimpleNamespace(timestamp=SimpleNamespace(batch=timestamp.batch), max_duration=None)


def test_texts_are_written_before_the_first_step_and_at_each_interval(logged, tmp_path):
    callback, logger, metrics = logged
    callback.fit_start(at(0), logger)
    assert metrics[EXACT_MATCH] == pytest.approx(1 / 3) and len(metrics["samples"]) == 4
    for step in range(1, 6):
        callback.batch_end(at(step), logger)
    callback.fit_start(at(5), logger)  # of a run that goes on
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0] * 4 + [5] * 4
    assert [row.get("right") for row in rows[:4]] == [None, True, False, False]
    assert rows[0]["prompt"] == "Hello" and rows[1]["text"] == rows[1]["answer"]


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"prompts": ["word " * 90]}, "leaves no room for 12 tokens"),
        ({"questions": 500}, "500 are asked for, .* are held out; ask for fewer"),
    ],
)
def test_what_cannot_be_asked_is_refused(config, tokenizer, tmp_path, settings, reason):
    model = HybridLM(config.model)
    found = SamplesConfig(**{"max_new_tokens": 12} | settings)
    with pytest.raises(UserError, match=reason):
        Samples(found, config.data, CausalLM(model, LossConfig()), tokenizer, 5, tmp_path, True)


def test_made_up_questions_are_the_same_everywhere():
    records = questions()
    asked = [record["messages"][0]["content"] for record in records]
    assert len(set(asked)) == len(records) == 432
    assert records[0]["messages"][1] == {"role": "assistant", "content": "Mira Anmidek lives in Dekbelum."}
    assert [json.loads(line) for line in records_file("made-up-questions").read_text().splitlines()] == records
