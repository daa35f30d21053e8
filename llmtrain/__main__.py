"""`python -m llmtrain`: the `llmtrain` command of a checkout that is not installed."""

from llmtrain.cli import main
from llmtrain.errors import exit_with

if __name__ == "__main__":
    exit_with(main)
