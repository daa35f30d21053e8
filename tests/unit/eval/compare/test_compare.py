"""Comparison of two results: what is paired, what is refused, and what is written."""

import csv
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.checksums import decode, encode_json
from llmtrain.eval.compare.compare import Comparison, compare
from llmtrain.eval.compare.read import read_sides
from llmtrain.eval.compare.write import as_json, as_markdown, draw, write_comparison
from llmtrain.eval.errors import EvalError
from tests.support.results import choices, questions, result, texts, write

A = [True, True, False, False, True, False, True, False] * 5
B = [True, True, True, False, True, True, False, False] * 5


def compared(a: Path, b: Path, **options) -> Comparison:
    return compare(*read_sides(a, b, None, None), **options)


def test_differences_of_tasks_are_over_documents(tmp_path):
    a = write(tmp_path / "a", result("x", "arc", choices(A)), result("x", "prose", texts([20.0, 30.0, 41.0])))
    b = write(tmp_path / "b", result("y", "arc", choices(B)), result("y", "prose", texts([19.0, 28.0, 40.0])))
    found = compared(a, b)
    arc, prose = found.tasks
    assert (found.a, found.b, found.convention) == ("x", "y", "lm-eval")
    assert arc.headline.a == 0.5 and arc.headline.b == 0.625 and arc.headline.n == 40
    # 10 documents only B has right, 5 only A: share 15/40, difference 1/8.
    assert arc.headline.stderr == pytest.approx(math.sqrt((15 / 40 - 1 / 64) / 39))
    assert set(arc.metrics) == {"acc_sum", "acc_per_token", "acc_per_char", "acc_per_byte"}
    assert prose.metric == "word_perplexity" and prose.headline.value < 0
    assert (prose.headline.low or 0) < prose.headline.value < (prose.headline.high or 0)
    assert found.notes == []


def test_documents_are_paired_by_their_texts_and_not_by_their_order(tmp_path):
    a, b = choices(A), choices(B)
    straight = compared(write(tmp_path / "a", result("x", "t", a)), write(tmp_path / "b", result("y", "t", b)))
    turned = compared(tmp_path / "a", write(tmp_path / "c", result("y", "t", b[::-1])))
    assert turned.tasks[0].metrics == straight.tasks[0].metrics
    twice = compared(
        write(tmp_path / "d", result("x", "t", [*a, *a])), write(tmp_path / "e", result("y", "t", [*b, *b]))
    )
    assert twice.tasks[0].headline.value == straight.tasks[0].headline.value


def test_the_documents_on_which_they_differ_most(tmp_path):
    a = write(tmp_path / "a", result("x", "t", choices(A)), result("x", "sum", questions(["1", "2", "wrong\nanswer"])))
    b = write(tmp_path / "b", result("y", "t", choices(B)), result("y", "sum", questions(["1", "22", "3"])))
    found = compared(a, b, examples=3)
    first, sums = found.tasks
    assert [len(first.a_better), len(first.b_better)] == [3, 3]
    worst = first.a_better[0]
    assert (worst.where, worst.prompt, worst.right) == ("t.jsonl:7", "question 6?", "right | one")
    assert (worst.a, worst.b) == ("right | one", "wrong one")
    assert (worst.log_likelihoods_a, worst.log_likelihoods_b) == ([-1.0, -2.0], [-3.0, -2.0])
    assert [(one.where, one.a, one.b) for one in sums.b_better] == [("sum.jsonl:3", "wrong\nanswer", "3")]
    text = as_markdown(found)
    assert (
        "| t.jsonl:7 | question 6? | right \\| one | right \\| one (-1.00, -2.00) | wrong one (-3.00, -2.00) |" in text
    )
    assert "| sum.jsonl:3 | 2 + 1 = | 3 | wrong answer | 3 |" in text
    assert compared(a, b, examples=0).tasks[0].b_better == []


def test_of_unequal_answers_those_come_first_of_which_the_log_likelihoods_moved_most(tmp_path):
    a, b = choices([False] * 4), choices([True] * 4)
    b[2][1][0] = type(b[2][1][0])(-0.1, False, 2)
    found = compared(write(tmp_path / "a", result("x", "t", a)), write(tmp_path / "b", result("y", "t", b)), examples=1)
    assert [one.where for one in found.tasks[0].b_better] == ["t.jsonl:3"]


def test_where_lower_is_better_the_model_with_less_is(tmp_path, monkeypatch):
    """As of Brier scores, or of what a task of lm-evaluation-harness calls `higher_is_better: false`."""

    def place(name: str, hits: list[bool]) -> Path:
        made = result(name, "t", choices(hits))
        return write(tmp_path / name, replace(made, metrics=replace(made.metrics, lower_is_better=["acc_sum"])))

    found = compared(place("x", A), place("y", B))
    [task] = found.tasks
    assert task.headline.value == 0.125 and as_json(found)["tasks"][0]["lower_is_better"] == ["acc_sum"]
    assert task.a_better[0].a == "wrong one" and task.b_better[0].b == "wrong one"
    drawn: list[str] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write(b""))
    monkeypatch.setattr("matplotlib.axes.Axes.set", lambda axes, **given: drawn.append(given.get("xlabel", "")))
    draw(found, tmp_path / "it.png")
    assert drawn == ["B − A, percent of A's (left: B is better)"]


def test_a_metric_may_fall_in_one_task_and_rise_in_another(tmp_path, monkeypatch):
    def place(name: str, hits: list[bool]) -> Path:
        falls, rises = result(name, "t", choices(hits)), result(name, "u", choices(hits))
        return write(
            tmp_path / name, replace(falls, metrics=replace(falls.metrics, lower_is_better=["acc_sum"])), rises
        )

    found = compared(place("x", A), place("y", B))
    assert [one["lower_is_better"] for one in as_json(found)["tasks"]] == [["acc_sum"], []]
    assert [one.a_better[0].a for one in found.tasks] == ["wrong one", "right | one"]
    drawn: list[list[str]] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write(b""))
    monkeypatch.setattr("matplotlib.axes.Axes.set_yticks", lambda axes, ticks, labels, **_: drawn.append(list(labels)))
    draw(found, tmp_path / "it.png")
    assert [[label.partition("\n")[0] for label in panel] for panel in drawn] == [["u (0-shot)"], ["t (0-shot)"]]


@pytest.mark.parametrize("convention", ["lm-eval", "foundry"])
def test_categories_and_their_mean(tmp_path, convention):
    of: dict[str, Any] = {"categories": ["law", "art", "art", "art"], "convention": convention}
    found = compared(
        write(tmp_path / "a", result("x", "t", choices(A), **of)),
        write(tmp_path / "b", result("y", "t", choices(B), **of)),
    )
    [task] = found.tasks
    law, art = task.categories["law"]["acc_sum"], task.categories["art"]["acc_sum"]
    assert law.n == 10 and art.n == 30
    weight = 1 / 4 if convention == "lm-eval" else 1 / 2  # mean of documents, or of categories
    assert task.headline.value == pytest.approx(weight * law.value + (1 - weight) * art.value)
    assert "## Categories of t (0-shot)" in as_markdown(found)


def test_a_gauntlet_is_compared_by_its_benchmarks(tmp_path):
    gauntlet = {
        "name": "g",
        "weighting": "documents",
        "categories": {
            "easy": [{"task": "t", "shots": 0, "baseline": 0.5}, {"task": "u", "shots": 0, "baseline": 0.25}],
            "hard": [{"task": "u", "shots": 0, "baseline": 0.25}],
        },
        "averages": {"all": ["easy", "hard"]},
    }

    def place(name: str, first: list[bool], second: list[bool], **changes) -> Path:
        made = result(name, "t", choices(first)), result(name, "u", choices(second[:20]))
        return write(tmp_path / name, *made, gauntlet=gauntlet | changes)

    a, b = place("a", A, B), place("b", B, A)
    found = compared(a, b)
    t, u = (one.headline.value for one in found.tasks)
    easy, hard = (t / 0.5 * 40 + u / 0.75 * 20) / 60, u / 0.75
    assert found.gauntlet["easy"].value == pytest.approx(easy) and found.gauntlet["hard"].value == pytest.approx(hard)
    assert found.gauntlet["all"].value == pytest.approx((easy + hard) / 2)
    said = [json.loads((side / "results.json").read_text())["gauntlet"] for side in (a, b)]
    assert found.gauntlet["all"].a == pytest.approx(said[0]["a"]["averages"]["all"]["value"])
    assert found.gauntlet["all"].b == pytest.approx(said[1]["b"]["averages"]["all"]["value"])
    other = compared(a, place("c", B, A, weighting="equal"))
    assert other.gauntlet == {} and "gauntlets are not the same" in other.notes[0]
    assert "Gauntlet g is not compared, because u is not" in compared(a, b, tasks=["t"]).notes[0]


def with_groups(folder: Path, model: str, weights: tuple[float, float]) -> Path:
    """Add groups to results.json: `all` of t and the group `inner`, which is of u."""
    content, _ = decode((folder / "results.json").read_bytes())
    t, u = (one["metrics"]["acc_sum"]["value"] for one in content["results"])
    mean = (weights[0] * t + weights[1] * u) / sum(weights)
    about = {"model": model, "shots": 0}
    content["groups"] = [
        {
            **about,
            "group": "all",
            "parents": [],
            "children": ["t (0-shot)", "inner"],
            "metrics": {"acc_sum": {"value": mean}},
        },
        {
            **about,
            "group": "inner",
            "parents": ["all"],
            "children": ["u (0-shot)"],
            "metrics": {"acc_sum": {"value": u}},
        },
    ]
    (folder / "results.json").write_bytes(encode_json(content))
    return folder


@pytest.mark.parametrize("weights", [(40.0, 20.0), (1.0, 1.0)], ids=["over documents", "over tasks"])
def test_groups_are_weighted_as_in_the_results(tmp_path, weights):
    a, b = (
        with_groups(
            write(tmp_path / name, result(name, "t", choices(t)), result(name, "u", choices(u[:20]))), name, weights
        )
        for name, t, u in (("a", A, B), ("b", B, A))
    )
    found = compared(a, b)
    t, u = (one.headline.value for one in found.tasks)
    assert found.groups["all (0-shot)"]["acc_sum"].value == pytest.approx(
        (weights[0] * t + weights[1] * u) / sum(weights)
    )
    assert found.groups["inner (0-shot)"]["acc_sum"].value == pytest.approx(u) and found.notes == []
    assert "| all (0-shot) | acc_sum | 60 |" in as_markdown(found)
    few = compared(a, b, tasks=["t"])
    assert few.groups == {} and "Group all (0-shot): acc_sum is not compared" in few.notes[0]


def test_what_one_of_them_lacks_is_named(tmp_path):
    def named(task: str, shots: int = 0) -> str:
        return f"{task} ({shots}-shot)"

    a = write(
        tmp_path / "a",
        *(result("x", "t", choices(A), shots=shots) for shots in (0, 5)),
        result("x", "u", choices(A)),
        settings={"dtype": None, "limit": 40, "max_length": 100, "out": "a"},
    )
    b = write(
        tmp_path / "b",
        result("y", "v", choices(A)),
        result("y", "t", choices(B), dtype="bfloat16"),
        settings={"dtype": "bfloat16", "limit": 40, "max_length": None, "out": "b"},
    )
    found = compared(a, b)
    assert [one.title for one in found.tasks] == [named("t")]
    assert found.notes == [
        f"Only x has {named('t', 5)}, {named('u')}.",
        f"Only y has {named('v')}.",
        "max_length: 100 in A, None in B.",
        f"dtype: float32 in A, bfloat16 in B ({named('t')}).",
    ]


def test_other_chat_templates_are_named_first_and_other_places_of_one_are_not(tmp_path):
    def style(file: str, digest: str) -> dict[str, Any]:
        about = {"system_instruction": "Be brief.", "fewshot_as_multiturn": True}
        return {"chat_template": file, "chat_template_digest": digest} | about

    def place(name: str, given: dict[str, Any] | None) -> Path:
        results = [result(name, "t", choices(A), style=given), result(name, "prose", texts([20.0, 30.0]))]
        return write(tmp_path / name, *results, settings={"chat_template": given is not None})

    plain, tuned = place("plain", None), place("tuned", style("tuned.jinja", "12ab"))
    [first] = compared(plain, tuned).notes
    assert first == (
        "The prompts differ, and so the models are compared together with their prompts: plain text in A, the chat template "
        "tuned.jinja (digest 12ab), the system instruction 'Be brief.', few-shot examples as turns in B (t (0-shot))."
    )
    assert compared(tuned, place("other", style("other.jinja", "34cd"))).notes[0].startswith("The prompts differ")
    assert compared(tuned, place("moved", style("elsewhere.jinja", "12ab"))).notes == []


def test_a_task_file_that_was_changed_in_between_is_named_with_what_changed(tmp_path):
    def place(name: str, **settings: Any) -> Path:
        return write(tmp_path / name, *(result(name, task, choices(A), task_settings=settings) for task in ("t", "u")))

    a, b = place("a", description="Answer.", stops=["x"]), place("b", description="x" * 200, stops=["x"])
    [note] = compared(a, b).notes
    assert note == (
        f'The task itself differs: description is "Answer." in A, "{"x" * 79}… in B (t (0-shot), u (0-shot)).'
    )
    assert compared(a, place("older")).notes == []


def test_perplexity_per_token_of_other_tokens_is_left_out(tmp_path):
    a = write(tmp_path / "a", result("x", "prose", texts([20.0, 30.0], tokens=10)))
    b = write(tmp_path / "b", result("y", "prose", texts([20.0, 31.0], tokens=9)))
    found = compared(a, b)
    assert set(found.tasks[0].metrics) == {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert "token_perplexity is not compared: it counts each model's own tokens" in found.notes[0]


def refusal(a: Path, b: Path, **options) -> str:
    with pytest.raises(EvalError) as error:
        compared(a, b, **options)
    return str(error.value)


def test_what_cannot_be_compared_is_refused(tmp_path):
    made = 0

    def place(*results) -> Path:
        nonlocal made
        made += 1
        return write(tmp_path / str(made), *results)

    a = place(result("x", "t", choices(A)), result("x", "u", choices(A)))
    foundry = place(result("y", "t", choices(A), convention="foundry"))
    assert "is of convention lm-eval" in refusal(a, foundry) and "again with convention=foundry" in refusal(a, foundry)
    few = place(result("y", "t", choices(A)[:8]), result("y", "u", choices(B)))
    said = refusal(a, few)
    assert "t (0-shot): not the same documents: 40 in" in said and "8 in both" in said and "--tasks u" in said
    assert [one.task for one in compared(a, few, tasks=["u"]).tasks] == ["u"]
    others = place(result("y", "t", choices(A, first=100)))
    assert "40 in" in refusal(a, others) and "0 in both" in refusal(a, others)
    shots = place(result("y", "t", choices(A), shots=5), result("y", "u", choices(A)))
    said = refusal(a, shots)
    assert "t: 0 examples (shots) in" in said and ", 5 in" in said and "leave them out: --tasks u" in said
    other = place(result("y", "v", choices(A)))
    assert "nothing to compare" in refusal(a, other) and "has v (0-shot)" in refusal(a, other)
    assert "--tasks w: neither result has it" in refusal(a, few, tasks=["w"])
    with pytest.raises(EvalError, match="would be compared with itself"):
        read_sides(a, a, None, None)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    a = write(tmp_path / "a", result("x", "t", choices(A)))
    b = write(tmp_path / "b", result("y", "t", choices(B)))
    file = "documents/{}/t-0-shot.jsonl.gz"
    whole = (b / file.format("y")).read_bytes()
    (b / file.format("y")).write_bytes((a / file.format("x")).read_bytes())
    assert "is not what was written" in refusal(a, b)
    content, _ = decode((b / "results.json").read_bytes())
    del content["results"][0]["documents_xxh3_128"]  # as an earlier version wrote it
    (b / "results.json").write_text(json.dumps(content))
    assert "says 0.625, and its documents 0.5" in refusal(a, b)
    (b / file.format("y")).write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in refusal(a, b) and "run the same `llmtrain eval` again" in refusal(a, b)
    (b / file.format("y")).unlink()
    assert "no such file; run the same" in refusal(a, b)
    content["results"][0].pop("documents_file")
    (b / "results.json").write_text(json.dumps(content))
    assert "was written before documents were kept" in refusal(a, b)


def test_every_damage_to_the_files_of_a_result_is_refused(tmp_path):
    a = write(tmp_path / "a", result("x", "t", choices(A)))
    b = write(tmp_path / "b", result("y", "t", choices(B)))
    before = as_json(compared(a, b))
    rng = random.Random(0)
    for file in (b / "results.json", b / "documents/y/t-0-shot.jsonl.gz"):
        content = file.read_bytes()
        for _ in range(100):
            at = rng.randrange(len(content))
            file.write_bytes(content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :])
            try:
                found = as_json(compared(a, b))
            except EvalError:
                continue
            assert found == before  # the name of the checksum was damaged, or the line break behind it
        for at in rng.sample(range(len(content) - 1), 10):
            file.write_bytes(content[:at])
            with pytest.raises(EvalError):
                compared(a, b)
        file.write_bytes(content)


def test_models_are_named_where_there_are_several(tmp_path):
    both = write(tmp_path / "both", result("x", "t", choices(A)), result("y", "t", choices(B)))
    found = compare(*read_sides(both, None, None, None))
    assert (found.a, found.b) == ("x", "y") and found.tasks[0].headline.value == 0.125
    turned = compare(*read_sides(both / "results.json", None, "y", "x"))
    assert turned.tasks[0].headline.value == -0.125
    one = write(tmp_path / "one", result("x", "t", choices(B)))
    with pytest.raises(EvalError, match=r"has 2 models \(x, y\); choose one by --model-a"):
        read_sides(both, one, None, None)
    found = compare(*read_sides(both, one, "x", None))
    assert (found.a, found.b) == (f"x ({both})", f"x ({one})")
    with pytest.raises(EvalError, match=r"--model-b z: .* has no such model; it has: x, y"):
        read_sides(both, None, "x", "z")
    with pytest.raises(EvalError, match=r"has 1 model \(x\); name the two"):
        read_sides(one, None, None, None)


def test_what_is_no_result_is_refused(tmp_path):
    one = write(tmp_path / "one", result("x", "t", choices(A)))
    with pytest.raises(EvalError, match=r"absent.*: no such file; expected a folder that `llmtrain eval` wrote"):
        read_sides(one, tmp_path / "absent", None, None)
    run = tmp_path / "run"
    write(run / "icl" / "step-00000010", result("x", "t", choices(A)))
    with pytest.raises(EvalError, match=r"the evaluations of this run are .*step-00000010"):
        read_sides(one, run, None, None)
    for text in ("", "[]", '{"results": {"arc": {"acc": 1}}}', '{"results": []}'):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(EvalError, match=r"is no results\.json of `llmtrain eval`"):
            read_sides(one, tmp_path, None, None)


def test_files(tmp_path):
    of: dict[str, Any] = {"categories": ["law", "art"]}
    a = write(tmp_path / "a", result("x", "t", choices(A), **of), result("x", "prose", texts([20.0, 30.0, 41.0])))
    b = write(tmp_path / "b", result("y", "t", choices(B), **of), result("y", "prose", texts([19.0, 28.0, 40.0])))
    found = compared(a, b)
    written = write_comparison(found, tmp_path / "out")
    assert [path.name for path in written] == ["compare.json", "compare.md", "compare.csv", "compare.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in written)
    assert written[3].read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(written[2].open()))
    [first] = [row for row in rows if (row["task"], row["category"], row["metric"]) == ("t", "", "acc_sum")]
    assert float(first["difference"]) == 0.125 and first["n"] == "40" and float(first["low"]) < 0 < float(first["high"])
    assert {row["category"] for row in rows} == {"", "law", "art"}
    content = json.loads(written[0].read_text())
    assert content == as_json(found) and content["tasks"][0]["metrics"]["acc_sum"]["difference"] == 0.125
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    text = written[1].read_text()
    assert "| t (0-shot) | acc_sum | 40 | 50.0 | 62.5 | +12.50 ± 9.60 | −7.14 to +31.44 | 0.210 |" in text
    assert "| prose (0-shot) | word_perplexity | 3 | 1965 | " in text
