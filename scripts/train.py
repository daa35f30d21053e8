"""One rank of a training run, for launchers:

    composer -n 8 scripts/train.py FILE
    torchrun --nproc-per-node 8 scripts/train.py FILE

Started plainly, it does what `llmtrain train` does.
"""

import argparse
import signal

if (
    signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
):  # scripts/slurm: inherited from torchrun, which leaves it to the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

from llmtrain.bytecode import keep_bytecode

if __name__ == "__main__":
    keep_bytecode()  # before the imports that take long
    from llmtrain.commands.train import add_run_arguments, run_train
    from llmtrain.errors import exit_with

    parser = argparse.ArgumentParser(description="Trains the model of a YAML, or continues its run.")
    add_run_arguments(parser)
    parser.set_defaults(nproc=None, max_restarts=0)
    exit_with(lambda: run_train(parser.parse_args()))
