"""Logging of results to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain.eval.report.results import Report, flat_metrics
from llmtrain.schema.wandb import WandbConfig, go_offline_without_key


def log_to_wandb(report: Report, options: WandbConfig, folder: Path, settings: Mapping[str, Any]) -> None:
    """Log one W&B run per model, with a table of its results; offline, into `folder`, without an API key."""
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
        if report.scores is not None:
            averages = report.scores[model].averages
            run.summary.update({f"icl/gauntlet/{name}": value.value for name, value in averages.items()})
        columns: list[Any] = ["task", "shots", "convention", "metric", "value", "stderr"]
        rows: list[Any] = [
            [
                one.task,
                one.shots,
                one.convention,
                one.metrics.headline,
                one.metrics.score.value,
                one.metrics.score.stderr,
            ]
            for one in found
        ]
        run.log({"icl/results": wandb.Table(columns=columns, data=rows)})
        run.finish()
