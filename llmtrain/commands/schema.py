"""`llmtrain schema`: the JSON schema that editors read. No torch here."""

import argparse

from llmtrain.commands.arguments import output_path
from llmtrain.errors import UserError


def add_schema(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("schema", help="the JSON schema by which editors complete the YAML")
    parser.add_argument("--out", type=output_path, metavar="FILE", help="write it here rather than print it")
    parser.set_defaults(func=schema)


def schema(args: argparse.Namespace) -> int:
    from llmtrain.schema.json_schema import schema_text

    if args.out is None:
        print(schema_text(), end="")
        return 0
    try:
        args.out.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {args.out}: {error.strerror or error}") from None
    return 0
