"""The `llmtrain` command, and `python -m llmtrain` of a checkout that is not installed."""

import os
from pathlib import Path

from llmtrain.bytecode import keep_bytecode
from llmtrain.errors import exit_status, exit_with


def main() -> int:
    """Run the command of sys.argv. Returns its exit status."""
    return exit_status(_command)


def _command() -> int:
    keep_bytecode()  # before the imports that take long
    from llmtrain.cli import main as command

    return command()


if __name__ == "__main__":
    # Processes that it starts import this package too, but no torch.py or json.py that lies in the working folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.getenv("PYTHONPATH"))))
    exit_with(main)
