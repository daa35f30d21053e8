"""Results of an earlier evaluation in a folder that another one is to be written to. Imports no torch."""

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from llmtrain.config.regular_file import read_json
from llmtrain.eval.report.results import DOCUMENTS, Report, as_json

_FILES = ("results.md", "results.csv", "results_long.csv", "results.png", DOCUMENTS, "results.json")
_SAME = {"out", "cache", "wandb", "max_batch_tokens", "share_prefixes"}
"""Settings on which no result depends."""


def set_aside(out: Path, report: Report, settings: Mapping[str, Any]) -> Path | None:
    """Move the results in `out` to a new folder beside it (out-1, out-2, ...), if they are of other settings, or `report` lacks one
    of them: of a checkpoint that was the newest then, or of data that have changed since.

    Stored answers stay. Returns the new folder; None where there are no such results.
    """
    try:
        before = read_json(out / "results.json")
        same = _of_results(before["settings"], settings) == _of_results(settings, settings)
        old = {_row(one) for one in before["results"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if same and old <= {_row(one) for one in json.loads(json.dumps(as_json(report, settings)))["results"]}:
        return None
    kept = next(one for number in count(1) if not (one := out.with_name(f"{out.name}-{number}")).exists())
    kept.mkdir()
    for name in _FILES:
        if (out / name).exists():
            (out / name).rename(kept / name)
    return kept


def _row(result: Mapping[str, Any]) -> str:
    """A result as it is known again: of which model, task and shots, with which values."""
    return json.dumps([result.get(key) for key in ("model", "path", "task", "shots", "documents", "metrics")])


def _of_results(one: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Settings on which results depend, as JSON; of those that a former llmtrain had, the ones that there are still."""
    return {key: json.loads(json.dumps(one[key])) for key in known.keys() & one.keys() - _SAME}
