"""A whole training YAML of LLM Foundry as one of ours."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmtrain.config.base import Problem
from llmtrain.config.config_type import is_foundry_evaluation
from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import YamlSource, read_file
from llmtrain.convert.foundry import data, run
from llmtrain.convert.foundry.adapters import read_adapters
from llmtrain.convert.foundry.finetuning import is_finetuning, read_finetuning
from llmtrain.convert.foundry.model import read_model
from llmtrain.convert.foundry.optimization import read_optimization
from llmtrain.convert.foundry.run import read_name
from llmtrain.convert.foundry.settings import Notes, Settings, note_unread
from llmtrain.convert.foundry.source import read_foundry
from llmtrain.convert.foundry.write import flow_text, write

_DTYPES = {"fp32": "float32", "amp_bf16": "bfloat16", "amp_fp16": "float16"}
_GAUNTLET = (
    "averages over categories of other tasks; `gauntlet: core` or `gauntlet: seed` are those that are shipped here"
)
_LOADER = "losses over shards are logged while a model trains (data.validation); a task of type perplexity reads texts"
_LOADED = (
    "init_device",
    "pretrained",
    "use_auth_token",
    "trust_remote_code",
    "use_flash_attention_2",
    "device",
    "name",
)
"""Settings of a model by which LLM Foundry loads it, and that ours needs not."""


def read_evaluation(root: Settings, file: Path, known_tasks: Collection[str]) -> dict[str, Any]:
    """The sections of our YAML; what has no equal is noted. known_tasks: names of our tasks."""
    sections: dict[str, Any] = {"name": read_name(root, file.stem), "convention": "foundry"}
    entries = root.take("models", list, [])
    sections["models"] = [model for number, entry in enumerate(entries) if (model := _model(root, number, entry))]
    sections["tasks"] = read_tasks(root, file, known_tasks)
    sections["max_length"] = root.take("max_seq_len", int) or root.take("icl_seq_len", int)
    root.skip(
        "icl_seq_len", "seed", "device_eval_batch_size", "fsdp_config", "loggers", "python_log_level", "dist_timeout"
    )
    sections["dtype"] = _DTYPES.get(root.take("precision", str, ""))
    for key in ("eval_gauntlet", "eval_gauntlet_str"):
        if root.data.get(key):
            root.left(key, _GAUNTLET)
    for key in ("eval_loader", "eval_loaders"):
        if root.data.get(key):
            root.left(key, _LOADER)
    if root.data.get("eval_subset_num_batches", -1) not in (-1, None):
        root.left("eval_subset_num_batches", "`limit: N` takes the first N documents of every task")
    note_unread(root)
    return {key: value for key, value in sections.items() if value}


def _model(root: Settings, number: int, entry: Any) -> dict[str, Any] | None:
    """An entry of `models`; None where ours has no such model, with a note."""
    found = Settings(entry, root.notes, f"models.{number}")
    model, tokenizer = found.section("model"), found.section("tokenizer")
    kind, name = model.take("name", str, ""), found.take("model_name", str)
    path = found.take("load_path", str) or model.take("pretrained_model_name_or_path", str)
    if not path or kind not in ("hf_causal_lm", "mpt_causal_lm"):
        what = "is no model that ours can load" if kind else "names no model"
        found.left("model", f"{what}; name a run, a checkpoint or a folder in Hugging Face format in `models`")
        return None
    if "load_path" in found:
        found.left(
            "load_path",
            "a checkpoint of Composer is read once `llmtrain checkpoint convert --to llmtrain` has written it",
        )
    for key in model.data.keys() - {"pretrained_model_name_or_path", *_LOADED}:
        if kind == "hf_causal_lm" and model.data[key] not in (None, False, {}):
            model.left(key, "is not set here: a model is read as its folder has it (an adapter: merged into it first)")
    own = tokenizer.take("name", str)
    made = {"path": path, "name": name and name.rpartition("/")[2], "tokenizer": own if own != path else None}
    return {key: value for key, value in made.items() if value}


@dataclass(frozen=True)
class Migration:
    """text: our YAML. notes: what it says at its top. tasks: the eval YAML that eval.icl needs, if the file has tasks."""

    text: str
    sections: dict[str, Any]
    notes: Notes
    tasks: str | None


def _validates(section: dict[str, Any]) -> bool:
    return "validation" in section or section.get("prepare", {"validation_fraction": 0}).get("validation_fraction") != 0


def migrate(path: str | Path, known_tasks: Collection[str] = (), tasks_file: str | None = None) -> Migration:
    """Translate a file. known_tasks: names of our tasks. tasks_file: where the eval YAML will be, for eval.icl.

    Raises ConfigError for a file that is not LLM Foundry's, or that LLM Foundry itself could not read.
    """
    file = Path(path)
    source, variables = read_foundry(path)
    notes = Notes()
    root = Settings(source.data, notes)
    root.skip("variables", "tokenizer", *variables)
    if is_foundry_evaluation(source.data):
        sections = read_evaluation(root, file, known_tasks)
        if not sections.keys() & {"models", "tasks"} and not notes.problems:
            raise ConfigError(
                source.title,
                [Problem("", None, "is an evaluation YAML of LLM Foundry with no model and no task that ours has too")],
            )
        made = _finished(source, file, sections, {}, notes, None)
        return replace(made, text=made.text.replace("yamls/schema.json", "eval/schema.json", 1))
    seq_len = data.read_seq_len(root)
    length = run.read_length(root, seq_len)
    interval = run.eval_interval(root, length)

    sections: dict[str, Any] = {"name": run.read_name(root, file.stem), "run_dir": None}
    comments: dict[str, str] = {}
    if (seed := root.take("seed", int)) is not None:
        sections["seed"] = seed
    sections["model"] = read_model(root.section("model"), seq_len)
    sections["adapt"] = read_adapters(root.section("model"), sections["model"])
    if is_finetuning(root):
        sections["objective"] = "completion"
        sections["data"], remarks = read_finetuning(root, seq_len, interval is not None)
    else:
        sections["data"], remarks = data.read_data(root, seq_len, interval is not None)
    comments |= {f"data.{key}": text for key, text in remarks.items()}
    sections["train"], remarks = run.read_train(root, length)
    comments |= {f"train.{key}": text for key, text in remarks.items()}
    sections["optimizer"], sections["schedule"], remarks = read_optimization(root, length)
    comments |= {f"optimizer.{key}": text for key, text in remarks.items()}
    tasks = read_tasks(root, file, known_tasks)
    sections["eval"] = run.read_eval(root, interval, _validates(sections["data"]), bool(tasks))
    icl_seq_len = root.take("icl_seq_len", int)
    if icl_seq_len and not tasks:
        root.harmless("icl_seq_len", "there are no tasks")
    if tasks and tasks_file:
        sections["eval"]["icl"] = {"file": tasks_file} | ({"interval": interval} if interval else {})
    elif tasks:
        names = ", ".join(task["task"] for task in tasks)
        root.left(
            "icl_tasks", f"--icl FILE writes an eval YAML of those that ours has too ({names}) and names it in eval.icl"
        )
    top, sections["checkpoint"] = run.read_checkpoint(root, length)
    sections |= top
    sections["logging"] = run.read_logging(root)
    note_unread(root)
    sections = {key: value for key, value in sections.items() if value is not None and value != {}}
    made = eval_yaml(file.name, tasks, icl_seq_len) if tasks else None
    return _finished(source, file, sections, comments, notes, made)


def _finished(
    source: YamlSource, file: Path, sections: dict[str, Any], comments: dict[str, str], notes: Notes, tasks: str | None
) -> Migration:
    if notes.problems:
        raise ConfigError(source.title, notes.problems, source.origins)
    return Migration(write(file.name, sections, comments, notes), sections, notes, tasks)


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
