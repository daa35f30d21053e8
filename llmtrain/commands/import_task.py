"""`llmtrain eval import-task`. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain.errors import UserError


def import_task(arguments: Sequence[str], folders: Sequence[str]) -> int:
    """Print our YAML for a task of lm-evaluation-harness, given by file or by name. folders: where names are found as well.

    Raises UserError that names every setting without a counterpart.
    """
    from llmtrain.eval.lm_eval_tasks.convert import as_yaml, own_settings, own_task
    from llmtrain.eval.lm_eval_tasks.groups import leaves
    from llmtrain.eval.task_names import TaskNames

    if len(arguments) != 1:
        raise UserError("usage: llmtrain eval import-task FILE, a task file of lm-evaluation-harness or a task's name")
    [text] = arguments
    found = TaskNames(folders).lm_eval(text)
    tasks = [leaf for one in found for leaf in leaves(one)]
    if len(tasks) != 1:
        names = ", ".join(leaf.name for leaf in tasks[:3])
        raise UserError(f"{text} stands for {len(tasks)} tasks ({names}, ...); import one at a time")
    [leaf] = tasks
    origin = f"{leaf.name} of {leaf.file}"
    settings = own_settings(leaf.settings, leaf.file)
    own_task(settings, f"{origin}, as a task of ours")
    print(as_yaml(settings, origin), end="", flush=True)
    return 0
