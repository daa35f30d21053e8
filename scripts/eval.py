"""One rank of an evaluation, for launchers:

    torchrun --nproc-per-node 8 scripts/eval.py FILE model=PATH
    composer -n 8 scripts/eval.py FILE model=PATH

Without a launcher it does the same as `llmtrain eval`.
"""

import argparse
import sys

from llmtrain.commands.eval import add_eval_arguments, run_eval

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Scores models on the tasks of a YAML.")
    add_eval_arguments(parser)
    parser.set_defaults(nproc=None)
    try:
        sys.exit(run_eval(parser.parse_intermixed_args()))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
