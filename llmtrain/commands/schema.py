"""`llmtrain schema`: the JSON schema that editors read, and the key reference in docs/reference. No torch here."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmtrain.errors import UserError


def add_schema(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("schema", help="the JSON schema by which editors complete the YAML")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it here rather than print it")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write the key reference there, as Markdown pages")
    parser.set_defaults(func=schema)


def schema(args: argparse.Namespace) -> int:
    from llmtrain.schema.json_schema import schema_text

    try:
        if args.docs is not None:
            args.docs.mkdir(parents=True, exist_ok=True)
            for name, text in reference().items():
                (args.docs / name).write_text(text, encoding="utf-8")
        if args.out is not None:
            args.out.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise UserError(str(error)) from None
    if args.out is None and args.docs is None:
        print(schema_text(), end="")
    return 0


def reference() -> dict[str, str]:
    """Text of every page of the key reference, by file name."""
    from llmtrain.config.reference import render, run_pages, whole_page
    from llmtrain.eval.report.gauntlet import Gauntlet
    from llmtrain.eval.run_config import EvalRun
    from llmtrain.eval.tasks.config import TaskConfig
    from llmtrain.schema.config import Config

    pages = [
        *run_pages(Config, "run.md", "The YAML of `llmtrain train`"),
        whole_page(EvalRun, "llmtrain-eval.md", "The YAML of `llmtrain eval`"),
        whole_page(TaskConfig, "task.md", "The YAML of a task"),
        whole_page(Gauntlet, "gauntlet.md", "The YAML of a gauntlet"),
    ]
    return render(pages, _ABOUT)


_ABOUT = """Every key of every YAML, generated from the classes that decode it. Unknown keys and values of another type
are errors; `llmtrain check FILE` reports all of them at once, and the rules that connect several keys.

Any value may be an interpolation: `${section.key}` is the value of another key, `${oc.env:NAME}` that of an environment
variable. A length of training is a number with a unit: `300 steps`, `26e9 tokens`, `2 epochs`, or `5 %` of the run.

*On resume*: a key that "may change" can have another value when the same run is started again. A change of a "fixed" key
is refused, because it would be another experiment; `llmtrain train FILE --fresh` then starts anew."""
