"""`llmtrain migrate`. No torch here."""

import argparse
import sys
from pathlib import Path

from llmtrain.errors import RunError, UserError


def add_migrate(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "migrate",
        help="translate a pretraining YAML of LLM Foundry",
        description="Prints the YAML that means the same here. What has no equal is named with its reason at the top of the "
        "output and on stderr; nothing is dropped without a word. Keys: docs/migrating-from-llm-foundry.md.",
        epilog="example: llmtrain migrate mpt-7b.yaml > ours.yaml && llmtrain check ours.yaml",
    )
    parser.add_argument("file", metavar="FOUNDRY_YAML", help="a YAML of scripts/train/train.py")
    parser.add_argument("--icl", type=Path, metavar="FILE", help="write its icl_tasks to FILE, and name it in eval.icl")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where anything is left to decide")
    parser.set_defaults(func=run_migrate)


def run_migrate(args: argparse.Namespace) -> int:
    """Print our YAML. Raises ConfigError for a file that cannot be read; RunError with --strict where something is left."""
    from llmtrain.config.shipped import eval_yamls
    from llmtrain.convert.foundry.migrate import migrate
    from llmtrain.convert.foundry.write import listed

    if args.icl is not None and args.icl.exists():
        raise UserError(f"--icl {args.icl}: there is such a file already; name another, or remove it first")
    made = migrate(args.file, eval_yamls("tasks"), str(args.icl) if args.icl else None)
    if args.icl is not None and made.tasks is not None:
        args.icl.write_text(made.tasks, encoding="utf-8")
    sys.stdout.write(made.text)
    sys.stdout.flush()
    left, count = made.notes.left, len(made.notes.left)
    if left:
        lines = "".join(f"\n  {line}" for line in listed(left, values=True))
        print(f"{args.file}: {count} left to decide, also at the top of the output{lines}", file=sys.stderr)
    if left and args.strict:
        raise RunError(f"{args.file}: --strict, and {count} {'is' if count == 1 else 'are'} left to decide")
    return 0
