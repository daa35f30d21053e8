"""Names of results for loggers, and logging of results to Weights & Biases."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.eval.report.document_scores import ANSWER_COLUMNS, MOST_ANSWERS, answer_rows
from llmtrain.eval.report.metrics import Estimate, Result
from llmtrain.eval.report.results import COLUMNS, Report, long_rows
from llmtrain.schema.wandb import WandbConfig, go_offline_without_key


def log_to_wandb(report: Report, options: WandbConfig, folder: Path, settings: Mapping[str, Any]) -> None:
    """Log one W&B run per model, with tables of its results and answers; offline, into `folder`, without an API key."""
    import wandb

    go_offline_without_key()
    for model in report.models:
        run = wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group or report.name,
            name=f"{report.name}: {model}",
            tags=list(options.tags),
            dir=str(folder),
            config={"model": model, **settings},
            settings=wandb.Settings(silent=True),
        )
        found = [one for one in report.results if one.model == model]
        run.summary.update(flat_metrics(found))
        if report.scores is not None and model in report.scores:
            for name, average in report.scores[model].averages.items():
                run.summary.update(flat_estimate(f"icl/gauntlet/{name}", average))
        run.log({name: wandb.Table(columns=columns, data=rows) for name, columns, rows in tables(report, model)})
        run.finish()


def tables(report: Report, model: str) -> list[tuple[str, list[Any], list[Any]]]:
    """Name, columns and rows of a model's tables: all results, and the first answers of each task."""
    results = [row for row in long_rows(report) if row[0] == model]
    found = [one for one in report.results if one.model == model]
    answers = [
        row for one in found for row in answer_rows(one.task, one.shots, one.metrics.headline, one.metrics.per_document)
    ]
    return [("icl/results", list(COLUMNS), results), ("icl/answers", list(ANSWER_COLUMNS), answers[:MOST_ANSWERS])]


def flat_metrics(results: Sequence[Result], asked: Collection[tuple[str, int]] = ()) -> dict[str, float]:
    """Values by `icl/<task>/<metric>` for loggers, standard errors by `icl/<task>/<metric>_stderr`, `truncated` where contexts
    were cut and `skipped` where documents were left out.

    Names of tasks that run with several numbers of shots include the number. asked: tasks and shots, also of those that failed.
    """
    counts = {(one.task, one.shots) for one in results} | set(asked)
    several = {task for task, _ in counts if sum(task == other for other, _ in counts) > 1}
    found: dict[str, float] = {}
    for one in results:
        name = f"icl/{one.task}" + (f"-{one.shots}-shot" if one.task in several else "")
        for metric, value in one.metrics.values.items():
            found |= flat_estimate(f"{name}/{metric}", value)
        if one.metrics.truncated:
            found[f"{name}/truncated"] = one.metrics.truncated
        if one.skipped:
            found[f"{name}/skipped"] = len(one.skipped)
    return found


def flat_estimate(name: str, estimate: Estimate) -> dict[str, float]:
    """An estimate and, where it is known, its standard error, by name for loggers."""
    error = {} if estimate.stderr is None else {f"{name}_stderr": estimate.stderr}
    return {name: estimate.value, **error}
