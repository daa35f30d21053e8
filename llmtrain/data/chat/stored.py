"""Records that a run's shards were made of, and whether its objective can be trained on them. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmtrain.config.base import Problem
from llmtrain.data.tokenize.end_of_document import stream_manifest
from llmtrain.errors import UserError
from llmtrain.objectives.section import ObjectiveSection
from llmtrain.schema.data import DataConfig


def record_problems(data: DataConfig, objective: ObjectiveSection) -> Iterator[Problem]:
    """Streams of other records than the objective is of. None of folders that are not there yet."""
    streams, named = {"train": data.train_streams(), "validation": data.validation_streams()}, set[str]()
    for split, some in streams.items():
        for name, stream in some.items():
            if not Path(stream.local).expanduser().exists():
                continue
            manifest = stream_manifest(stream)
            chat = (manifest or {}).get("inputs", {}).get("chat")
            packing = (manifest or {}).get("inputs", {}).get("packing")
            reason = objective.records_refusal(chat and chat["format"])
            if packing is not None and objective.packing not in (None, packing):
                reason = f"is packed ({packing}); `llmtrain prepare` makes samples of one prompt with packing: {objective.packing}"
            if reason:
                path = "data.prepare" if data.prepare is not None else f"data.{split}.streams.{name}"
                if stream.local not in named or data.prepare is None:  # both splits of prepare's are one folder
                    yield Problem(path, stream.local, reason)
                named.add(stream.local)


def require_records(data: DataConfig, objective: ObjectiveSection) -> None:
    """Raise UserError for the first of `record_problems`."""
    for problem in record_problems(data, objective):
        raise UserError(f"{problem.path}: {problem.found} {problem.message}")
