"""Cost of saving and resuming, beside torch's own distributed checkpoint in the same run.

    [torchrun --nproc-per-node N] -m benchmarks checkpoint FILE FOLDER [a.b=c …] [--saves 3] [--repeat 1]

FILE's model takes training steps on random tokens (one microbatch each), sharded as in training; FOLDER is where
checkpoints go. Measured: how long a step is held up by a save in the background, and the steps beside it; a synchronous
save, and torch's dcp.save to a FileSystemWriter with as many threads, in turn (both flush every file to the disk; ours
hashes it too); and a resume, part by part, from the disk as far as the kernel drops its cached pages on request.
Prints each part's figures when it is done, in case a time limit ends the rest. Add train.compile=off: compiling does not
matter here.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.report import Report
from llmtrain.errors import UserError
from llmtrain.schema.load import load_config


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--saves", type=positive, default=3, help="in the background")
    parser.add_argument("--seconds", type=number, default=30.0, help="after which no third or later one of them begins")
    parser.add_argument("--repeat", type=positive, default=1, help="synchronous saves of each kind")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse(argv)
    config = load_config(args.file, args.overrides)
    if not isinstance(config.train.microbatch_size, int):
        raise UserError("benchmarks checkpoint: name a number for train.microbatch_size")
    import torch.distributed as dist

    from benchmarks.programs.models.checkpoint_runs import measure
    from llmtrain.distributed.world import initialize

    initialize()
    report = Report(args.out if dist.get_rank() == 0 else None, quiet=dist.get_rank() > 0)
    measure(config, args.folder, report, saves=args.saves, seconds=args.seconds, repeat=args.repeat)
    dist.barrier()
    dist.destroy_process_group()
    return 0
