"""One rank of an evaluation, for launchers:

    torchrun --nproc-per-node 8 scripts/eval.py FILE model=PATH
    composer -n 8 scripts/eval.py FILE model=PATH

Without a launcher it does the same as `llmtrain eval`.
"""

import argparse

from llmtrain.commands.eval import add_eval_arguments, run_eval
from llmtrain.errors import exit_with

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Scores models on the tasks of a YAML.")
    add_eval_arguments(parser)
    parser.set_defaults(nproc=None)
    exit_with(lambda: run_eval(parser.parse_intermixed_args()))
