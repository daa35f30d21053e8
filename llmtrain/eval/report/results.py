"""Files of results: results.json, results.md, results.csv, results.png and details. Imports no torch."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain import __version__
from llmtrain.config.output_folder import write_synced
from llmtrain.eval.report.gauntlet import Gauntlet, GauntletScores
from llmtrain.eval.report.metrics import Estimate, Metrics, is_perplexity

REFERENCES = {"foundry": "LLM Foundry's", "lm-eval": "lm-evaluation-harness 0.4.13's"}
MEANINGS = {
    "acc_sum": "the choice of the highest log-likelihood (`acc`)",
    "acc_per_token": "the highest log-likelihood per token",
    "acc_per_char": "the highest log-likelihood per character (`acc_norm`)",
    "acc_per_byte": "the highest log-likelihood per byte (`acc_bytes`)",
    "acc_pmi": "the highest log-likelihood above that of the choice without its question",
    "acc": "every token of the continuation is the likeliest",
    "exact_match": "the answer is one of the right ones",
}
"""Explanations of metrics; in parentheses their names in lm-evaluation-harness."""


@dataclass(frozen=True)
class Result:
    """One cell of the table.

    path: the model's folder. title: the task with its shots. asked: documents for which the model was run; responses for the others
    were stored. seconds: time of these runs.
    """

    model: str
    path: str
    task: str
    shots: int
    title: str
    convention: str
    dtype: str
    metrics: Metrics
    seconds: float
    asked: int


@dataclass(frozen=True)
class Report:
    """Results in the order of models, then of tasks. scores: those of the gauntlet, by model."""

    name: str
    results: Sequence[Result]
    gauntlet: Gauntlet | None = None
    scores: Mapping[str, GauntletScores] | None = None

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(result.model for result in self.results))

    @property
    def titles(self) -> list[str]:
        return list(dict.fromkeys(result.title for result in self.results))

    def cell(self, model: str, title: str) -> Result:
        return next(one for one in self.results if (one.model, one.title) == (model, title))

    def metric(self, title: str) -> str:
        """Headline metric of a column."""
        return next(one for one in self.results if one.title == title).metrics.headline


def write_results(report: Report, folder: Path, *, settings: Mapping[str, Any], details: bool) -> list[Path]:
    """Write all files, each atomically. settings: those of the run, copied into results.json."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        _write(folder / "results.json", json.dumps(as_json(report, settings), indent=1, ensure_ascii=False) + "\n"),
        _write(folder / "results.md", as_markdown(report)),
        _write(folder / "results.csv", as_csv(report)),
    ]
    if picture := draw(report, folder / "results.png"):
        written.append(picture)
    if details:
        for result in report.results:
            path = (
                folder / "details" / _file_name(result.model) / f"{_file_name(result.task)}-{result.shots}-shot.jsonl"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(one.details, ensure_ascii=False) for one in result.metrics.per_document)
            written.append(_write(path, "".join(f"{line}\n" for line in lines)))
    return written


def as_json(report: Report, settings: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"name": report.name, "llmtrain": __version__, "settings": dict(settings)}
    content["results"] = [
        {
            **{key: getattr(one, key) for key in ("model", "path", "task", "shots", "convention", "dtype")},
            "metric": one.metrics.headline,
            **asdict(one.metrics.score),
            "metrics": {name: asdict(value) for name, value in one.metrics.values.items()},
            "categories": {
                category: {name: asdict(value) for name, value in values.items()}
                for category, values in one.metrics.categories.items()
            },
            "documents": one.metrics.documents,
            "requests": one.metrics.requests,
            "truncated": one.metrics.truncated,
            "asked": one.asked,
            "seconds": round(one.seconds, 3),
        }
        for one in report.results
    ]
    if report.gauntlet is not None and report.scores is not None:
        content["gauntlet"] = {"name": report.gauntlet.name} | {
            model: {
                "averages": {name: asdict(value) for name, value in scores.averages.items()},
                "categories": {name: asdict(value) for name, value in scores.categories.items()},
            }
            for model, scores in report.scores.items()
        }
    return content


def as_markdown(report: Report) -> str:
    """Table with one row per model and one column per task, the meaning of its metrics, and notes on truncated contexts."""
    convention = report.results[0].convention
    dtypes = ", ".join(dict.fromkeys(one.dtype for one in report.results))
    lines = [f"# {report.name}", ""]
    lines.append(
        f"In {REFERENCES[convention]} convention (`{convention}`), weights in {dtypes}. Accuracies in percent, "
        "± one standard error."
    )
    heads = [f"{title}<br>{report.metric(title)}" for title in report.titles]
    rows = [[model, *(_shown(report.cell(model, title)) for title in report.titles)] for model in report.models]
    lines += ["", *_table(["model", *heads], rows)]
    if report.gauntlet is not None and report.scores is not None:
        lines += ["", f"## Gauntlet {report.gauntlet.name}", "", _gauntlet_note(report.gauntlet), ""]
        first = next(iter(report.scores.values()))
        names = [*first.averages, *first.categories]
        rows = [
            [model, *(_percent((scores.averages | scores.categories)[name]) for name in names)]
            for model, scores in report.scores.items()
        ]
        lines += _table(["model", *names], rows)
    documents = (f"{title} {report.cell(report.models[0], title).metrics.documents:,}" for title in report.titles)
    lines += ["", f"Documents: {', '.join(documents)}."]
    used = dict.fromkeys(report.metric(title) for title in report.titles)
    lines += ["", *(f"- `{name}`: {MEANINGS[name]}" for name in used if name in MEANINGS)]
    lines += [
        f"- {one.model}, {one.title}: {one.metrics.truncated} of {one.metrics.requests} contexts were cut on the left to "
        "fit the model's window."
        for one in report.results
        if one.metrics.truncated
    ]
    return "\n".join(lines).rstrip() + "\n"


def as_csv(report: Report) -> str:
    """Table with one row per model; per task its headline metric, unrounded, and its standard error."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    columns = [f"{title} {report.metric(title)}" for title in report.titles]
    averages = list(next(iter(report.scores.values())).averages) if report.scores else []
    heads = [*columns, *(f"gauntlet {name}" for name in averages)]
    table.writerow(["model", "convention", *(cell for head in heads for cell in (head, f"{head} stderr"))])
    for model in report.models:
        found = [report.cell(model, title).metrics.score for title in report.titles]
        found += [report.scores[model].averages[name] for name in averages] if report.scores else []
        cells = [cell for one in found for cell in (one.value, "" if one.stderr is None else one.stderr)]
        table.writerow([model, report.results[0].convention, *cells])
    return text.getvalue()


def draw(report: Report, path: Path) -> Path | None:
    """Draw a bar chart of accuracies with standard errors, models side by side. None if there is no accuracy."""
    titles = [title for title in report.titles if not is_perplexity(report.metric(title))]
    if not titles:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = 0.8 / len(report.models)
    figure, axes = plt.subplots(figsize=(max(6.0, 1.2 * len(titles) + 2), 4.2), constrained_layout=True)
    for number, model in enumerate(report.models):
        found = [report.cell(model, title).metrics.score for title in titles]
        places = [place + (number - (len(report.models) - 1) / 2) * width for place in range(len(titles))]
        errors = [100 * (one.stderr or 0.0) for one in found]
        axes.bar(places, [100 * one.value for one in found], width, yerr=errors, capsize=2, label=model)
    labels = [f"{title}\n{report.metric(title)}" for title in titles]
    axes.set_xticks(range(len(titles)), labels, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="percent", ylim=(0, 100), title=f"{report.name} ({report.results[0].convention} convention)")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    plt.close(figure)
    partial.replace(path)
    return path


def flat_metrics(results: Sequence[Result]) -> dict[str, float]:
    """Values by `icl/<task>/<metric>` for loggers, with `truncated` where contexts were cut.

    Names of tasks that run with several numbers of shots include the number.
    """
    counts = {(one.task, one.shots) for one in results}
    several = {task for task, _ in counts if sum(task == other for other, _ in counts) > 1}
    found: dict[str, float] = {}
    for one in results:
        name = f"icl/{one.task}" + (f"-{one.shots}-shot" if one.task in several else "")
        found |= {f"{name}/{metric}": value.value for metric, value in one.metrics.values.items()}
        if one.metrics.truncated:
            found[f"{name}/truncated"] = one.metrics.truncated
    return found


def truncation_note(result: Result) -> str:
    """Note of how many contexts were cut on the left; empty if none was."""
    cut = result.metrics.truncated
    return f"{cut} of {result.metrics.requests} contexts cut to fit" if cut else ""


def _gauntlet_note(gauntlet: Gauntlet) -> str:
    from_baseline = "Accuracies above the random baseline" if gauntlet.subtract_baseline else "Accuracies"
    scaled = ", rescaled so that 100 is perfect" if gauntlet.rescale else ""
    return f"{from_baseline}{scaled}, in percent."


def _shown(result: Result) -> str:
    score = result.metrics.score
    if is_perplexity(result.metrics.headline):
        return f"{score.value:.4g}" + ("" if score.stderr is None else f" ± {score.stderr:.2g}")
    return _percent(score)


def _percent(estimate: Estimate) -> str:
    error = "" if estimate.stderr is None else f" ± {100 * estimate.stderr:.1f}"
    return f"{100 * estimate.value:.1f}{error}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in escaped]
    return [lines[0], "| --- " + "| ---: " * (len(heads) - 1) + "|", *lines[1:]]


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)


def _write(path: Path, text: str) -> Path:
    partial = path.with_name(path.name + ".partial")
    write_synced(partial, text.encode())
    partial.replace(path)
    return path
