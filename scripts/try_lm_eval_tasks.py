"""Load every task and group of the installed lm-evaluation-harness, without data, and print which are refused and why.

    uv run python scripts/try_lm_eval_tasks.py [--list REASON]     # a table in Markdown; --list: the tasks of a reason

No code is imported and nothing is downloaded: what loads may still fail on its data.
"""

import argparse
import re
from collections import Counter, defaultdict
from pathlib import Path

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.groups import Leaf, by_name
from llmtrain.eval.lm_eval.index import TaskIndex, installed_folder
from llmtrain.eval.lm_eval.task import make_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="REASON", help="print the tasks whose refusal contains this text")
    args = parser.parse_args()
    folder = installed_folder()
    if folder is None:
        raise SystemExit("lm-evaluation-harness is not installed: pip install 'llmtrain[lm-eval]'")
    index = TaskIndex([folder])
    outcomes: Counter[str] = Counter()
    refused: dict[str, list[str]] = defaultdict(list)
    for name, entry in index.entries.items():
        if entry.kind in ("task", "class"):
            outcome, reasons = try_task(name, index, folder)
        elif entry.kind == "group":
            outcome, reasons = try_group(name, index)
        else:
            outcome, reasons = "tags", []
        outcomes[outcome] += 1
        for reason in reasons:
            refused[reason].append(name)
    if args.list:
        for reason, names in refused.items():
            if args.list in reason:
                print(f"{reason}\n" + "".join(f"  {name}\n" for name in names), end="")
        return
    print("| names of the installed lm-evaluation-harness | |\n| --- | ---: |")
    for outcome, count in sorted(outcomes.items()):
        print(f"| {outcome} | {count:,} |")
    print("\n| refused, also with --allow-code | names |\n| --- | ---: |")
    for reason, names in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"| {reason} | {len(names):,} |")


_EACH = re.compile(r"; (?=[a-z_][\w.]*: )")
"""Between the reasons of one error, each of which begins with its key."""


def try_task(name: str, index: TaskIndex, folder: Path) -> tuple[str, list[str]]:
    """(what becomes of a task, reasons why it is refused)."""
    try:
        [leaf] = by_name(name, index)
        assert isinstance(leaf, Leaf)
        make_task(leaf.settings, leaf.file, allow_code=[folder])
    except EvalError as error:
        return "tasks refused", [general(reason, name) for reason in _EACH.split(str(error))]
    try:
        make_task(leaf.settings, leaf.file)
    except EvalError:
        return "tasks that load with --allow-code", []
    return "tasks that load as they are", []


def try_group(name: str, index: TaskIndex) -> tuple[str, list[str]]:
    try:
        by_name(name, index)
    except EvalError as error:
        return "groups refused", [general(str(error), name)]
    return "groups that can be put together", []


def general(reason: str, name: str) -> str:
    """A reason without what is particular to one task."""
    if "makes it a Python class" in reason:
        return "class: a task that is a Python class"
    reason = re.sub(rf"^(?:\S+: )?(?:task|group) {re.escape(name)}: ", "", reason.splitlines()[0]).partition("; ")[0]
    reason = re.sub(r"/\S+", "FILE", re.sub(r"'[^']*'|\{.*\}|\[.*\]", "...", reason))
    return reason if len(reason) <= 110 else f"{reason[:106]} ..."


if __name__ == "__main__":
    main()
