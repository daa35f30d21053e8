"""`llmtrain plot`: one metric of several runs in one picture and one table."""

import argparse
from pathlib import Path

from llmtrain.commands.arguments import output_path
from llmtrain.errors import UserError


def add_plot(commands) -> None:
    sub = commands.add_parser(
        "plot",
        help="a metric of several runs in one picture",
        description="Draws one metric of the runs' metrics.jsonl, those of runs that train too, over tokens or steps, and prints "
        "where each run is. The training loss is smoothed. Existing pictures are replaced.",
    )
    sub.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder, or its metrics.jsonl")
    sub.add_argument("--metric", metavar="NAME", help="default: the cross entropy of training, and that of validation")
    sub.add_argument("--over", choices=["tokens", "steps"], default="tokens", help="the axis (default tokens)")
    sub.add_argument("--out", type=output_path, metavar="FILE.png", default=Path("plot.png"), help="default plot.png")
    sub.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from llmtrain.config.output_folder import unwritable_reason
    from llmtrain.train.report.several_runs import draw_runs, read_runs, table

    if args.out.suffix != ".png":
        raise UserError(f"--out {args.out}: expected a name that ends with .png")
    if reason := unwritable_reason(args.out):
        raise UserError(f"--out {args.out}: {reason}")
    runs = read_runs(args.runs, args.metric)
    print(table(runs, args.metric))
    draw_runs(runs, args.metric, args.over, args.out)
    print(f"written: {args.out}")
    return 0
