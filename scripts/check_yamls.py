"""Are the committed schema and the shipped YAMLs up to date? Prints what is not; exit status 1 then.

Data folders are not looked at: they are the user's to make.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llmtrain.schema.json_schema import schema_text
from llmtrain.schema.load import ConfigError, load_config

YAMLS = Path(__file__).parents[1] / "yamls"


def main() -> int:
    wrong = []
    if (YAMLS / "schema.json").read_text(encoding="utf-8") != schema_text():
        wrong.append("yamls/schema.json is out of date; run: llmtrain schema --out yamls/schema.json")
    paths = sorted(YAMLS.rglob("*.yaml"))
    for path in paths:
        try:
            load_config(path)
        except ConfigError as error:
            wrong.append(str(error))
    print("\n".join(wrong) if wrong else f"{len(paths)} YAMLs and their schema are in order")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
