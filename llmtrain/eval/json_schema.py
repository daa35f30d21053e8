"""JSON schemas with which editors complete and check the YAMLs of runs, tasks and gauntlets.

After a change of the sections, `python -m llmtrain.eval.json_schema` in a checkout writes them again.
"""

from __future__ import annotations

import json
from pathlib import Path

from llmtrain.config.base import Section
from llmtrain.eval.report.gauntlet import Gauntlet
from llmtrain.eval.run_config import EvalRun
from llmtrain.eval.tasks.config import TaskConfig

SCHEMAS: dict[str, type[Section]] = {
    "schema.json": EvalRun,
    "tasks/schema.json": TaskConfig,
    "gauntlets/schema.json": Gauntlet,
}
"""Root sections by file name below eval/."""


def schema_text(section: type[Section]) -> str:
    """JSON schema of the section that decodes the YAML."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **section.model_json_schema()}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, section in SCHEMAS.items():
        (Path(__file__).parents[2] / "eval" / name).write_text(schema_text(section), encoding="utf-8")
