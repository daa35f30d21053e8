"""Files of results: results.json, .md, .csv, .png, results_long.csv, and documents/. Imports no torch."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain import __version__
from llmtrain.config.checksums import checksum, encode_json
from llmtrain.config.regular_file import read_json
from llmtrain.eval.report.document_scores import encode_lines
from llmtrain.eval.report.files import file_name, write_file, write_text
from llmtrain.eval.report.gauntlet import Gauntlet, GauntletScores, Row
from llmtrain.eval.report.groups import GroupResult, group_json, group_notes, group_rows
from llmtrain.eval.report.metrics import Estimate, Failure, Metrics, Result, is_share
from llmtrain.pictures import new_figure, save_figure
from llmtrain.tables import csv_text, markdown_table

RESULTS = "results.json"
DOCUMENTS = "documents"
"""The folder, beside results.json, of what is kept of every document."""
_LISTED = 100
"""Skipped documents of a task that results.json names; all are counted."""

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
class Report:
    """Results in the order of models, then of tasks. scores: those of the gauntlet, by model that has all results for it. groups:
    lm-evaluation-harness's."""

    name: str
    results: Sequence[Result]
    gauntlet: Gauntlet | None = None
    scores: Mapping[str, GauntletScores] | None = None
    groups: Sequence[GroupResult] = ()
    failures: Sequence[Failure] = ()

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(result.model for result in self.results))

    @property
    def titles(self) -> list[str]:
        return list(dict.fromkeys(result.title for result in self.results))

    def cell(self, model: str, title: str) -> Result | None:
        """Result of a model on a task; None where that failed."""
        return next((one for one in self.results if (one.model, one.title) == (model, title)), None)

    def metric(self, title: str) -> str:
        """Headline metric of a column."""
        return next(one for one in self.results if one.title == title).metrics.headline


def write_results(report: Report, folder: Path, *, settings: Mapping[str, Any], picture: bool = True) -> list[Path]:
    """Write all files, each atomically, and return them; the documents' folder last.

    settings: those of the run, copied into results.json.
    """
    (folder / DOCUMENTS).mkdir(parents=True, exist_ok=True)
    files, checksums = document_files(report.results), []
    for result, file in zip(report.results, files, strict=True):
        (folder / file).parent.mkdir(exist_ok=True)
        lines = encode_lines(result.metrics.per_document)
        write_file(folder / file, lines)
        checksums.append(checksum(lines))
    content = as_json(report, settings)
    for row, found in zip(content["results"], checksums, strict=True):
        row["documents_xxh3_128"] = found
    written = [
        write_file(folder / RESULTS, encode_json(content)),
        write_text(folder / "results.md", as_markdown(report)),
        write_text(folder / "results.csv", as_csv(report)),
        write_text(folder / "results_long.csv", as_long_csv(report)),
    ]
    if picture and (drawn := draw(report, folder / "results.png")):
        written.append(drawn)
    return [*written, folder / DOCUMENTS]


def document_files(results: Sequence[Result]) -> list[str]:
    """Distinct names of the files of documents, relative to the folder of results."""
    names: dict[str, None] = {}
    for one in results:
        stem = f"{DOCUMENTS}/{file_name(one.model)}/{file_name(one.task)}-{one.shots}-shot"
        same = sum(name.startswith(f"{stem}.") for name in names)
        names[f"{stem}.{same + 1}.jsonl.gz" if same else f"{stem}.jsonl.gz"] = None
    return list(names)


def as_json(report: Report, settings: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"name": report.name, "llmtrain": __version__, "settings": dict(settings)}
    content["results"] = [
        {
            **{key: getattr(one, key) for key in ("model", "path", "task", "shots", "convention", "dtype")},
            "metric": one.metrics.headline,
            **asdict(one.metrics.score),
            "metrics": {name: asdict(value) for name, value in one.metrics.values.items()},
            "lower_is_better": list(one.metrics.lower_is_better),
            "categories": {
                category: {name: asdict(value) for name, value in values.items()}
                for category, values in one.metrics.categories.items()
            },
            "documents": one.metrics.documents,
            "documents_file": file,
            "requests": one.metrics.requests,
            "truncated": one.metrics.truncated,
            "skipped": len(one.skipped),
            "skipped_documents": dict(itertools.islice(one.skipped.items(), _LISTED)),
            "asked": one.asked,
            "style": one.style,
            "task_settings": one.task_settings,
            "seconds": round(one.seconds, 3),
        }
        for one, file in zip(report.results, document_files(report.results), strict=True)
    ]
    if report.failures:
        content["failed"] = [asdict(one) for one in report.failures]
    if report.groups:
        content["groups"] = [group_json(one) for one in report.groups]
    if report.gauntlet is not None and report.scores:
        content["gauntlet"] = {"name": report.gauntlet.name} | {
            model: {
                "averages": {name: asdict(value) for name, value in scores.averages.items()},
                "categories": {name: asdict(value) for name, value in scores.categories.items()},
                "averages_of": report.gauntlet.named_averages(),
                "benchmarks": [_benchmark(report, row) for row in scores.rows],
            }
            for model, scores in report.scores.items()
        }
    return content


def _benchmark(report: Report, row: Row) -> dict[str, Any]:
    task = next(one.task for one in report.results if one.metrics is row.metrics)
    about = {"category": row.category, "task": task, "shots": row.benchmark.shots}
    return about | {key: getattr(row, key) for key in ("metric", "baseline", "scale", "weight")} | asdict(row.score)


def as_markdown(report: Report) -> str:
    """Table with one row per model and one column per task, the meaning of its metrics, and notes on truncated contexts."""
    convention = report.results[0].convention
    dtypes = ", ".join(dict.fromkeys(one.dtype for one in report.results))
    lines = [f"# {report.name}", ""]
    lines.append(
        f"In {REFERENCES[convention]} convention (`{convention}`), weights in {dtypes}. Accuracies in percent, "
        "± one standard error."
    )
    within = {title for group in report.groups for title in group.children}
    titles = [title for title in report.titles if title not in within]
    heads = [f"{title}<br>{report.metric(title)}" for title in titles]
    rows = [[model, *(_shown(report.cell(model, title)) for title in titles)] for model in report.models]
    if titles:
        lines += ["", *markdown_table(["model", *heads], rows)]
    lines += _group_table(report)
    if report.gauntlet is not None and report.scores:
        lines += ["", f"## Gauntlet {report.gauntlet.name}", "", _gauntlet_note(report.gauntlet), ""]
        first = next(iter(report.scores.values()))
        names = [*first.averages, *first.categories]
        rows = [
            [model, *(_percent((scores.averages | scores.categories)[name]) for name in names)]
            for model, scores in report.scores.items()
        ]
        lines += markdown_table(["model", *names], rows)
    if titles:
        counts = {one.title: one.metrics.documents for one in reversed(report.results)}
        lines += ["", f"Documents: {', '.join(f'{title} {counts[title]:,}' for title in titles)}."]
    used = {one.metrics.headline: meaning for one in reversed(report.results) if (meaning := _meaning(one))}
    lines += ["", *(f"- `{name}`: {meaning}" for name, meaning in reversed(used.items()))]
    lines += [
        f"- {one.model}, {one.title}: {one.metrics.truncated} of {one.metrics.requests} contexts were cut on the left to "
        "fit the model's window."
        for one in report.results
        if one.metrics.truncated
    ]
    lines += [f"- {note}" for note in group_notes(report.groups)]
    lines += [f"- {one.model}, {one.title}: {note}." for one in report.results if (note := skipped_note(one))]
    styles = {one.model: one.style for one in report.results if one.style}
    lines += [f"- {model}: prompts in {style_text(style)}." for model, style in styles.items()]
    if report.failures:
        lines += ["", "## Not evaluated", ""]
        lines += [f"- {one.title} ({', '.join(one.models)}): {' '.join(one.reason.split())}" for one in report.failures]
    return "\n".join(lines).rstrip() + "\n"


def _meaning(result: Result) -> str | None:
    name, kind = result.metrics.headline.partition(",")[0], result.task_settings.get("output_type")
    if name == "acc" and kind not in (None, "loglikelihood"):  # of lm-evaluation-harness; others' own code computes it
        return MEANINGS["acc_sum"] if kind == "multiple_choice" else None
    return MEANINGS.get(name)


def _group_table(report: Report) -> list[str]:
    if not report.groups:
        return []
    models = list(dict.fromkeys(one.model for one in report.groups))
    rows = [
        [row.title, row.metric, f"{row.documents:,}" if row.documents else ""]
        + [
            _formatted(row.metric, row.values[model]) if model in row.values else "failed" * (model in row.failed)
            for model in models
        ]
        for row in group_rows(report.groups, report.results)
    ]
    return ["", "## Groups", "", *markdown_table(["task", "metric", "documents", *models], rows)]


def as_csv(report: Report) -> str:
    """Table with one row per model; per task its headline metric, unrounded, and its standard error.

    Tasks of which documents were left out have another column, with their number.
    """
    columns = [f"{title} {report.metric(title)}" for title in report.titles]
    averages = list(next(iter(report.scores.values())).averages) if report.scores else []
    heads = [*columns, *(f"gauntlet {name}" for name in averages)]
    gaps = [title for title in report.titles if any(one.skipped for one in report.results if one.title == title)]
    lacking = [f"{title} skipped" for title in gaps]
    table: list[list[Any]] = [
        ["model", "convention", *(cell for head in heads for cell in (head, f"{head} stderr")), *lacking]
    ]
    for model in report.models:
        results = {title: report.cell(model, title) for title in report.titles}
        found = [one and one.metrics.score for one in results.values()]
        scores = (report.scores or {}).get(model)
        found += [scores and scores.averages[name] for name in averages]
        cells = [(one.value, "" if one.stderr is None else one.stderr) if one else ("", "") for one in found]
        skipped = [len(one.skipped) if (one := results[title]) else "" for title in gaps]
        table.append([model, report.results[0].convention, *(cell for pair in cells for cell in pair), *skipped])
    return csv_text(table)


def as_long_csv(report: Report) -> str:
    """Table with one row per model, task, category and metric, unrounded."""
    return csv_text([COLUMNS, *long_rows(report)])


COLUMNS = ("model", "task", "shots", "category", "metric", "value", "stderr", "n")
"""n: number of documents. category: empty in rows of a whole task."""


def task_rows(model: str, task: str, shots: int, metrics: Metrics) -> Iterator[list[Any]]:
    """All metrics of a task, the headline first, then those of its categories."""
    sizes = Counter(one.category for one in metrics.per_document)
    parts = [("", metrics.values, metrics.documents)]
    parts += [(name, values, sizes[name]) for name, values in metrics.categories.items()]
    for category, values, count in parts:
        for metric, estimate in sorted(values.items(), key=lambda pair: pair[0] != metrics.headline):
            yield [model, task, shots, category, metric, estimate.value, estimate.stderr, count]


def gauntlet_rows(model: str, gauntlet: Gauntlet, scores: GauntletScores) -> Iterator[list[Any]]:
    """Averages and categories of a gauntlet, as categories of a task `gauntlet NAME`."""
    sizes: Counter[str] = Counter()
    for row in scores.rows:
        sizes[row.category] += row.metrics.documents
    for name, members in gauntlet.named_averages().items():
        sizes[name] = sum(sizes[member] for member in members)
    for name, value in (scores.averages | scores.categories).items():
        yield [model, f"gauntlet {gauntlet.name}", None, name, "score", value.value, value.stderr, sizes[name]]


def long_rows(report: Report) -> list[list[Any]]:
    """Rows of `COLUMNS`: every metric of every task and category, then the gauntlet's."""
    rows = [row for one in report.results for row in task_rows(one.model, one.task, one.shots, one.metrics)]
    if report.gauntlet is not None and report.scores is not None:
        for model, scores in report.scores.items():
            rows += gauntlet_rows(model, report.gauntlet, scores)
    for group in report.groups:
        for name, found in group.metrics.items():
            estimate = found.estimate
            rows.append(
                [group.model, group.group, group.shots, "", name, estimate.value, estimate.stderr, found.documents]
            )
    return rows


def draw(report: Report, path: Path) -> Path | None:
    """Draw a bar chart of accuracies with standard errors, models side by side. None if there is no accuracy."""
    scores = {
        title: [one.metrics.score.value for one in report.results if one.title == title] for title in report.titles
    }
    titles = [title for title in report.titles if is_share(report.metric(title), *scores[title])]
    if not titles:
        return None
    width = 0.8 / len(report.models)
    figure = new_figure(max(6.0, 1.2 * len(titles) + 2), 4.2)
    axes = figure.subplots()
    for number, model in enumerate(report.models):
        cells = [(place, cell) for place, title in enumerate(titles) if (cell := report.cell(model, title))]
        found = [cell.metrics.score for _, cell in cells]
        places = [place + (number - (len(report.models) - 1) / 2) * width for place, _ in cells]
        errors = [100 * (one.stderr or 0.0) for one in found]
        axes.bar(places, [100 * one.value for one in found], width, yerr=errors, capsize=2, label=model)
    labels = [f"{title}\n{report.metric(title)}" for title in titles]
    axes.set_xticks(range(len(titles)), labels, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="percent", ylim=(0, 100), title=f"{report.name} ({report.results[0].convention} convention)")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path)


def truncation_note(result: Result) -> str:
    """Note of how many contexts were cut on the left; empty if none was."""
    cut = result.metrics.truncated
    return f"{cut} of {result.metrics.requests} contexts cut to fit" if cut else ""


def skipped_note(result: Result) -> str:
    """Note of how many documents were left out; empty if none was."""
    count = len(result.skipped)
    return f"{count} of {count + result.metrics.documents} documents left out, as they cannot be used" if count else ""


def style_text(style: Mapping[str, Any]) -> str:
    """Words for PromptStyle.as_json; an empty one is plain text."""
    system = f"the system instruction {style['system_instruction']!r}" if style.get("system_instruction") else ""
    if "chat_template" not in style:
        return f"plain text with {system}" if system else "plain text"
    template = f"the chat template {style['chat_template']} (digest {style['chat_template_digest']})"
    system = "without the system turn, which it refuses" if style.get("system_turn_refused") else system
    examples = "few-shot examples as turns" if style["fewshot_as_multiturn"] else "few-shot examples in one turn"
    return ", ".join(filter(None, [template, system, examples]))


def _gauntlet_note(gauntlet: Gauntlet) -> str:
    from_baseline = "Accuracies above the random baseline" if gauntlet.subtract_baseline else "Accuracies"
    scaled = ", rescaled so that 100 is perfect" if gauntlet.rescale else ""
    return f"{from_baseline}{scaled}, in percent."


def _shown(result: Result | None) -> str:
    return "failed" if result is None else _formatted(result.metrics.headline, result.metrics.score)


def _formatted(metric: str, score: Estimate) -> str:
    if not is_share(metric, score.value):
        return f"{score.value:.4g}" + ("" if score.stderr is None else f" ± {score.stderr:.2g}")
    return _percent(score)


def _percent(estimate: Estimate) -> str:
    error = "" if estimate.stderr is None else f" ± {100 * estimate.stderr:.1f}"
    return f"{100 * estimate.value:.1f}{error}"


_WRITTEN = ("results.md", "results.csv", "results_long.csv", "results.png", DOCUMENTS, "results.json")
_WITHOUT_EFFECT = {"out", "cache", "wandb", "max_batch_tokens", "share_prefixes"}
"""Settings on which no result depends."""


def set_aside(out: Path, report: Report, settings: Mapping[str, Any]) -> Path | None:
    """Move the results in `out` to a new folder beside it (out-1, out-2, ...), if they are of other settings, or `report` lacks one
    of them: of a checkpoint that was the newest then, or of data that have changed since.

    Stored answers stay. Returns the new folder; None where there are no such results.
    """
    try:
        before = read_json(out / "results.json")
        same = _with_effect(before["settings"], settings) == _with_effect(settings, settings)
        old = {_identity(one) for one in before["results"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if same and old <= {_identity(one) for one in json.loads(json.dumps(as_json(report, settings)))["results"]}:
        return None
    kept = next(one for number in itertools.count(1) if not (one := out.with_name(f"{out.name}-{number}")).exists())
    kept.mkdir()
    for name in _WRITTEN:
        if (out / name).exists():
            (out / name).rename(kept / name)
    return kept


def _identity(result: Mapping[str, Any]) -> str:
    """A result as it is known again: of which model, task and shots, with which values."""
    return json.dumps([result.get(key) for key in ("model", "path", "task", "shots", "documents", "metrics")])


def _with_effect(one: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Settings on which results depend, as JSON; of those that a former llmtrain had, the ones that there are still."""
    return {key: json.loads(json.dumps(one[key])) for key in known.keys() & one.keys() - _WITHOUT_EFFECT}
