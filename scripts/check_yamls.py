"""Check that the committed schema, the key reference and the shipped YAMLs are up to date; exit status 1 if one is not.

Data folders are not looked at: they are the user's to make.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llmtrain.commands.schema import reference
from llmtrain.config.report import ConfigError
from llmtrain.schema.json_schema import schema_text
from llmtrain.schema.load import load_config

ROOT = Path(__file__).parents[1]
YAMLS = ROOT / "yamls"
REFERENCE = ROOT / "docs" / "reference"


def main() -> int:
    wrong = []
    if (YAMLS / "schema.json").read_text(encoding="utf-8") != schema_text():
        wrong.append("yamls/schema.json is out of date; run: llmtrain schema --out yamls/schema.json")
    if {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.iterdir()} != reference():
        wrong.append("docs/reference is out of date; run: llmtrain schema --docs docs/reference (it removes no page)")
    paths = sorted(YAMLS.rglob("*.yaml"))
    for path in paths:
        try:
            load_config(path)
        except ConfigError as error:
            wrong.append(str(error))
    print("\n".join(wrong) if wrong else f"{len(paths)} YAMLs, their schema and the key reference are in order")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
