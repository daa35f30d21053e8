"""`llmtrain compare`: two models, by what their evaluations kept of every document."""

import argparse
from pathlib import Path

from llmtrain.commands.arguments import output_path
from llmtrain.errors import UserError


def add_compare(commands) -> None:
    sub = commands.add_parser(
        "compare",
        help="paired differences between the results of two models",
        description="Compares two models on the same documents, by results of `llmtrain eval` or of eval.icl (RUN/icl/step-…): "
        "differences of every task, category and gauntlet average with standard errors, 95 % intervals and paired tests, and "
        "the documents on which they differ most. Writes compare.md, .csv, .json and .png.",
    )
    sub.add_argument("a", metavar="RESULT_A", type=Path, help="a folder of results, or its results.json")
    sub.add_argument("b", metavar="RESULT_B", type=Path, nargs="?", help="another; default: two models of RESULT_A")
    sub.add_argument("--model-a", metavar="NAME", help="the model of RESULT_A, where it has several")
    sub.add_argument("--model-b", metavar="NAME", help="the model of RESULT_B, where it has several")
    sub.add_argument("--tasks", metavar="A,B", help="compare these tasks only")
    sub.add_argument(
        "--examples", type=int, default=5, metavar="N", help="documents shown of each task and model (default 5)"
    )
    sub.add_argument("--out", type=output_path, metavar="DIR", help="the folder to write; default results/compare-A-B")
    sub.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from llmtrain.config.output_folder import unwritable_reason
    from llmtrain.eval.compare.compare import compare
    from llmtrain.eval.compare.read import labels, read_sides
    from llmtrain.eval.compare.write import write_comparison
    from llmtrain.eval.report.files import file_name

    if args.examples < 0:
        raise UserError(f"--examples {args.examples}: expected 0 or more")
    a, b = read_sides(args.a, args.b, args.model_a, args.model_b)
    out = args.out or Path("results") / "-".join(["compare", *(file_name(label).strip("_") for label in labels(a, b))])
    if reason := unwritable_reason(out):
        raise UserError(f"--out {out}: {reason}")
    tasks = args.tasks and [name.strip() for name in args.tasks.split(",")]
    found = compare(a, b, tasks=tasks, examples=args.examples)
    written = write_comparison(found, out)
    print((out / "compare.md").read_text(encoding="utf-8"))
    print(f"written: {', '.join(map(str, written))}")
    return 0
