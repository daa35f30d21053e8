"""Cost of saving and resuming, beside torch's own distributed checkpoint in the same run.

    [torchrun --nproc-per-node N] -m benchmarks checkpoint FILE FOLDER [a.b=c …] [--saves 3] [--repeat 1]

FILE's model takes training steps on random tokens (one microbatch each), sharded as in training; FOLDER is where
checkpoints go. Measured: how long a step is held up by a save in the background, and the steps beside it; a synchronous
save, and torch's dcp.save to a FileSystemWriter with as many threads, in turn (both flush every file to the disk; ours
hashes it too); and a resume, part by part, from the disk as far as the kernel drops its cached pages on request.
Prints each part's figures when it is done, then a Markdown table, and everything as one line of JSON. Add
train.compile=off: compiling does not matter here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.report import rounded
from llmtrain.schema.load import load_config


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--saves", type=positive, default=3, help="in the background")
    parser.add_argument("--seconds", type=number, default=30.0, help="after which no third or later one of them begins")
    parser.add_argument("--repeat", type=positive, default=1, help="synchronous saves of each kind")
    args = parser.parse(argv)
    config = load_config(args.file, args.overrides)
    import torch.distributed as dist

    from benchmarks.programs.models.checkpoint_runs import measure

    figures = measure(config, args.folder, saves=args.saves, seconds=args.seconds, repeat=args.repeat)
    if dist.get_rank() == 0:
        print(table(figures))
        print(json.dumps(rounded(figures)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def table(figures: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""

    def seconds(name: str) -> str:
        value = figures[f"{name}_seconds"]
        return "(none)" if value is None else f"{value:.3f} s"

    rows = [
        ("a training step (median, longest)", f"{seconds('step')}, {seconds('longest_step_alone')}"),
        ("step blocked by a background save (median)", seconds("blocked")),
        ("longest step with a save in it", seconds("longest_step_with_save")),
        (
            "steps while it is written (median, longest)",
            f"{seconds('step_while_writing')}, {seconds('longest_step_while_writing')}",
        ),
        ("background save, until on disk", seconds("background_save")),
        ("synchronous save", f"{seconds('save')}, {figures['save_gigabytes_per_second']:.2f} GB/s"),
        ("torch's dcp.save", f"{seconds('torch_save')}, {figures['torch_save_gigabytes_per_second']:.2f} GB/s"),
        *(
            (f"resume: {name.replace('_', ' ')}", seconds(f"resume_{name}"))
            for name in ("start", "find", "verify", "build", "read", "first_step")
        ),
        ("resume, all of it", seconds("resume")),
    ]
    title = (
        f"{figures['model']}: {figures['parameters']:,} parameters, {figures['gigabytes']:.2f} GB with AdamW's state, "
        f"{figures['ranks']} rank(s), {figures['device']}"
    )
    return "\n".join([title, "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""])
