"""Folders of results without a model: answers that are made up, written as `llmtrain eval` writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.eval.prompts.requests import GeneratedText, Loglikelihood
from llmtrain.eval.report.gauntlet import Gauntlet, gauntlet_scores
from llmtrain.eval.report.metrics import Metrics, Result, aggregate
from llmtrain.eval.report.process_results import process_results
from llmtrain.eval.report.results import Report, write_results
from llmtrain.eval.tasks.documents import Choices, Content, Document, Question, Text
from llmtrain.eval.tasks.sections import FoundryPrompting, LmEvalPrompting


def choices(hits: Sequence[bool], first: int = 0) -> list[tuple[Content, list[Loglikelihood]]]:
    """Questions of two choices, the first of which is right, with the answers to them."""
    return [
        (
            Choices(f"question {number}?", ("right | one", "wrong one"), 0),
            [Loglikelihood(-1.0 if hit else -3.0, False, 2), Loglikelihood(-2.0, False, 2)],
        )
        for number, hit in enumerate(hits, first)
    ]


def texts(losses: Sequence[float], tokens: int = 10) -> list[tuple[Content, list[Loglikelihood]]]:
    return [
        (Text(f"text {number} of words"), [Loglikelihood(-loss, False, tokens)]) for number, loss in enumerate(losses)
    ]


def questions(answers: Sequence[str]) -> list[tuple[Content, list[GeneratedText]]]:
    return [
        (Question(f"{number} + 1 =\n", str(number + 1), ()), [GeneratedText(text)])
        for number, text in enumerate(answers)
    ]


def result(
    model: str,
    task: str,
    answered: Sequence[tuple[Content, Sequence]],
    *,
    shots: int = 0,
    convention: str = "lm-eval",
    categories: Sequence[str | None] = (None,),
    **about: Any,
) -> Result:
    """categories: those of the documents, in turns."""
    settings = LmEvalPrompting() if convention == "lm-eval" else FoundryPrompting()
    per_document = [
        process_results(
            Document(number, f"{task}.jsonl:{number + 1}", content, categories[number % len(categories)]),
            answers,
            settings,
        )
        for number, (content, answers) in enumerate(answered)
    ]
    names = list(per_document[0].values)
    values, parts = aggregate(per_document, names, macro=convention == "foundry")
    headline = next(name for name in ("acc_sum", "word_perplexity", "exact_match") if name in names)
    metrics = Metrics(headline, values, len(per_document), len(per_document), 0, parts, per_document)
    rest: dict[str, Any] = {"dtype": "float32", "seconds": 1.0, "asked": len(per_document)} | about
    return Result(model, f"/{model}", task, shots, f"{task} ({shots}-shot)", convention, metrics=metrics, **rest)


def write(
    folder: Path, *results: Result, gauntlet: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
) -> Path:
    """Write a folder of results. gauntlet: a Gauntlet's settings, of which the task names are those of the results."""
    made = None if gauntlet is None else Gauntlet.model_validate(gauntlet)
    scores = (
        None
        if made is None
        else {
            model: gauntlet_scores(made, {(one.task, one.shots): one.metrics for one in results if one.model == model})
            for model in {one.model for one in results}
        }
    )
    write_results(Report(folder.name, results, made, scores), folder, settings=settings or {}, picture=False)
    return folder
