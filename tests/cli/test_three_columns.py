"""The three columns (checkpoint, exported, harness) have the same numbers."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.programs.models.three_columns import TaskRequests, as_markdown, compare, main
from llmtrain.errors import exit_status
from llmtrain.eval.native_task import load_task
from llmtrain.eval.prompts.requests import Loglikelihood, LoglikelihoodRequest
from tests.support.icl import byte_level, some_sentence


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder, rng = tmp_path_factory.mktemp("icl"), random.Random(0)

    def write(name: str, records: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    def choices() -> dict[str, Any]:
        return {"choices": [some_sentence(rng, rng.randint(1, 5)) for _ in range(4)], "gold": rng.randrange(4)}

    write("arc_easy.jsonl", [{"query": f"Question: {some_sentence(rng, 8)}?"} | choices() for _ in range(12)])
    write(
        "lambada_openai.jsonl",
        [{"context": some_sentence(rng, 60), "continuation": some_sentence(rng, 1)} for _ in range(12)],
    )
    return folder


def test_a_different_choice_is_found(data):
    task = load_task("arc_easy", "lm-eval", data)
    documents = task.documents(3)
    requests = [
        one for one in task.requests(documents, byte_level(), 0, pmi=False) if isinstance(one, LoglikelihoodRequest)
    ]
    asked = TaskRequests("arc_easy", task, 0, documents, requests)
    rights = {one.index: getattr(one.content, "gold", -1) for one in documents.evaluated}
    right = [Loglikelihood(-2.0 + (one.option == rights[one.document]), False, 1) for one in requests]
    wrong = [replace(one, log_likelihood=-9.0) if i == rights[0] else one for i, one in enumerate(right)]
    row = compare(asked, dict.fromkeys(("checkpoint", "exported", "harness"), right))
    assert row["same"] and row["values"]["harness"]["acc_sum"] == 1.0 and set(row["differences"].values()) == {0.0}
    row = compare(asked, {"checkpoint": right, "exported": right, "harness": wrong})
    assert not row["same"] and row["values"]["harness"]["acc_sum"] == pytest.approx(2 / 3)
    assert row["differences"] == {
        "checkpoint - exported": 0.0,
        "checkpoint - harness": 8.0,
        "exported - harness": 8.0,
    }


def test_the_columns_that_there_are_make_a_table(data):
    """Columns are written as they are finished."""
    task = load_task("arc_easy", "lm-eval", data)
    documents = task.documents(3)
    requests = [
        one for one in task.requests(documents, byte_level(), 0, pmi=False) if isinstance(one, LoglikelihoodRequest)
    ]
    asked = TaskRequests("arc_easy", task, 0, documents, requests)
    answers = [Loglikelihood(-1.0, False, 1) for _ in requests]
    alone, two = (
        compare(asked, dict.fromkeys(names, answers)) for names in (("checkpoint",), ("checkpoint", "exported"))
    )
    assert alone["same"] and alone["differences"] == {} and two["differences"] == {"checkpoint - exported": 0.0}
    assert as_markdown([alone]).startswith("| task | documents | metric | checkpoint | same |\n")


def test_what_cannot_be_compared_is_refused_before_training(data, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    common = ["no.yaml", "--data-dir", str(data), "--out", str(tmp_path)]
    assert exit_status(lambda: main([*common, "--tasks", "gsm8k"])) == 2
    assert "only tasks of choices" in capsys.readouterr().err
    assert exit_status(lambda: main([*common, "--tasks", "copa"])) == 2
    assert "holds no file of copa" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    assert exit_status(lambda: main(common)) == 2
    assert "holds an earlier run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, a development dependency")
def test_three_columns(data, tmp_path, capsys):
    rng = random.Random(1)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(some_sentence(rng, 12) for _ in range(2000)))
    source = {"sources": [str(text)], "out": str(tmp_path / "data"), "vocab_size": 300, "seq_len": 128}
    block = {"type": "attention", "n_heads": 2, "position": {"type": "rotary"}, "mlp": {"type": "swiglu", "d_ff": 48}}
    settings = {
        "name": "tiny",
        "model": {
            **{"vocab_size": 300, "d_model": 32, "max_seq_len": 128, "tie_embeddings": True},
            **{"norm": {"type": "rmsnorm"}, "blocks": {"attn": block}, "layers": "attn*2"},
        },
        "data": {"seq_len": 128, "num_workers": 0, "prepare": source | {"validation_fraction": 0}},
        "train": {"duration": "1 steps", "global_batch_size": 4, "microbatch_size": 4},
        "optimizer": {"lr": 4e-3},
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings))
    out = tmp_path / "out"
    command = [str(file), "--data-dir", str(data), "--out", str(out), "--limit", "8", "--minutes", "0.001"]
    status = main([*command, "--tasks", "arc_easy", "arc_easy:2", "lambada", "copa"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "steps in 0.001 minutes" in printed and "left out: copa" in printed
    rows = json.loads((out / "three_columns.json").read_text())["rows"]
    assert [row["task"] for row in rows] == ["arc_easy", "arc_easy:2", "lambada"]
    assert all(row["same"] and max(row["differences"].values()) < 2e-4 for row in rows)
    assert (out / "three_columns.md").read_text().count("| yes |") == 3
