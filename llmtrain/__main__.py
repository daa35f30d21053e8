"""`python -m llmtrain`: the `llmtrain` command of a checkout that is not installed."""

import os
from pathlib import Path

from llmtrain.cli import main
from llmtrain.errors import exit_with

if __name__ == "__main__":
    # Processes that it starts import this package too, but no torch.py or json.py that lies in the working folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.getenv("PYTHONPATH"))))
    exit_with(main)
