"""`python -m llmtrain`: the `llmtrain` command of a checkout that is not installed."""

import sys

from llmtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
