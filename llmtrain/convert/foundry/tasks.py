"""LLM Foundry's `icl_tasks` as an eval YAML of ours."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import read_file
from llmtrain.convert.foundry.settings import Settings
from llmtrain.convert.foundry.write import flow_text

_SAME_TASK = {"lambada_openai": "lambada", "triviaqa_sm_sub": "triviaqa", "openbookqa": "openbook_qa"}


def read_tasks(root: Settings, file: Path, known: Collection[str]) -> list[dict[str, Any]]:
    """The tasks that ours has too, with their numbers of examples; the others are noted. known: names of our tasks."""
    key = "icl_tasks_str" if "icl_tasks_str" in root else "icl_tasks"
    found = root.take(key, (str, list))
    if found is None:
        return []
    listed = _from_file(root, key, file) if isinstance(found, str) else found
    tasks, unknown = [], []
    for task in listed:
        label = str(task.get("label")) if isinstance(task, dict) else str(task)
        name = _SAME_TASK.get(label, label)
        if name not in known:
            unknown.append(label)
            continue
        shots = task.get("num_fewshot") if isinstance(task, dict) else None
        shots = [shots] if isinstance(shots, int) else shots
        tasks.append({"task": name} | ({"shots": [int(n) for n in shots]} if shots else {}))
    if tasks:
        root.harmless(
            key, "data, prompts and delimiters are those of our tasks of the same names, as LLM Foundry ships them"
        )
    if unknown:
        root.left(key, f"no such task is shipped: {', '.join(unknown)}. eval/README.md shows how to write one")
    return tasks


def _from_file(root: Settings, key: str, file: Path) -> list[Any]:
    """Tasks of the file that is named, which LLM Foundry looks for from its folder `scripts`."""
    named = Path(root.data[key])
    for folder in (Path(), *file.resolve().parents):
        if (folder / named).is_file():
            try:
                tasks = read_file(folder / named).data.get("icl_tasks")
            except ConfigError as error:
                root.left(key, f"cannot be read: {error}")
                return []
            return tasks if isinstance(tasks, list) else []
    root.left(key, f"{named} is not here; run the command where it is, such as LLM Foundry's folder scripts")
    return []


def eval_yaml(name: str, tasks: list[dict[str, Any]], max_length: int | None) -> str:
    """Text of the eval YAML, with LLM Foundry's prompts and scores."""
    lines = [
        f"# Tasks of {name}, with LLM Foundry's prompts and scores. `data_dir: FOLDER` takes its JSONL files.",
        "convention: foundry",
    ]
    lines += [f"max_length: {max_length}"] if max_length else []
    lines.append("tasks:")
    lines += [f"  - {flow_text(task)}" for task in tasks]
    return "\n".join(lines) + "\n"
