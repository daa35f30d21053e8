"""Check that the generated files (schemas, key reference) and the shipped YAMLs are up to date; exit status 1 if one is not.

Data folders are not looked at: they are the user's to make.
"""

import sys

from llmtrain.config.report import ConfigError
from llmtrain.schema.load import load_config
from scripts.generate_reference import ROOT, outdated


def main() -> int:
    wrong = [f"{name} is out of date; run: python scripts/generate_reference.py" for name in outdated()]
    paths = sorted((ROOT / "yamls").rglob("*.yaml"))
    for path in paths:
        try:
            load_config(path)
        except ConfigError as error:
            wrong.append(str(error))
    print("\n".join(wrong) if wrong else f"{len(paths)} YAMLs, the schemas and the key reference are in order")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
