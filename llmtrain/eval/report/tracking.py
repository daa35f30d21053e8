"""Logging of results to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain.eval.report.document_scores import ANSWER_COLUMNS, MOST_ANSWERS, answer_rows
from llmtrain.eval.report.long_table import COLUMNS
from llmtrain.eval.report.results import Report, flat_estimate, flat_metrics, long_rows
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
    return [
        ("icl/results", list(COLUMNS), results),
        ("icl/answers", list(ANSWER_COLUMNS), answers[:MOST_ANSWERS]),
    ]
