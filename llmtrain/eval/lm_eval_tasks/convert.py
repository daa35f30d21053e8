"""Translation of lm-evaluation-harness's tasks into ours: `llmtrain eval import-task`.

What a task of ours cannot say is refused by name, all of it at once; nothing is dropped that changes a prompt or a score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmtrain.config.decode import decode
from llmtrain.config.report import ConfigError
from llmtrain.config.schema_tree import with_defaults
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval_tasks.generation import LENGTHS, read_generation
from llmtrain.eval.lm_eval_tasks.yaml_file import Function
from llmtrain.eval.prompts.encode import GenerationLimits
from llmtrain.eval.tasks.config import TaskConfig

_TYPES = {
    "multiple_choice": "multiple_choice",
    "loglikelihood": "language_modeling",
    "loglikelihood_rolling": "perplexity",
    "generate_until": "generation",
}
_METRICS = {
    "multiple_choice": {
        "acc": "acc_sum",
        "acc_norm": "acc_per_char",
        "acc_bytes": "acc_per_byte",
        "acc_mutual_info": "acc_pmi",
    },
    "language_modeling": {"acc": "acc", "perplexity": "perplexity"},
    "perplexity": {name: name for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")},
    "generation": {"exact_match": "exact_match"},
}
"""Our names of lm-evaluation-harness's metrics, the default headline first."""

_WITHOUT_EFFECT = {
    "task": "",
    "task_alias": "the name in lm-evaluation-harness's tables",
    "tag": "",
    "group": "",
    "task_list": "",
    "metadata": "",
    "should_decontaminate": "`llmtrain decontaminate` takes any task",
    "doc_to_decontamination_query": "`llmtrain decontaminate` takes any task",
}
_TRANSLATED = {
    *("dataset_path", "dataset_name", "dataset_kwargs", "training_split", "validation_split", "test_split"),
    *("fewshot_split", "fewshot_config", "num_fewshot", "output_type", "doc_to_text", "doc_to_target", "doc_to_choice"),
    *(
        "description",
        "target_delimiter",
        "fewshot_delimiter",
        "metric_list",
        "generation_kwargs",
        "filter_list",
        "repeats",
    ),
}
_REFUSED = {
    "custom_dataset": "is code that makes the data",
    "process_docs": "is code; write `source.fields` with templates instead",
    "process_results": "is code; there is no place for it",
    "use_prompt": "is a prompt of another package",
    "gen_prefix": "has no counterpart; move it into the templates",
    "doc_to_image": "is for models that see",
    "doc_to_audio": "is for models that hear",
    "unsafe_code": "runs what a model writes",
    "class": "is a Python class",
}

_ONE_EXPRESSION = re.compile(r"\{\{((?:(?!\{\{|\}\}).)*)\}\}", re.DOTALL)
_NUMBER = re.compile(
    r"\d+|[{ ]*(?:label|gold|target|idx|index|(?:correct_?)?answer(?:_?key|_?idx|_?index|_?num)?)[} ]*", re.I
)
"""What gives the number of an alternative, not a text."""
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_NOT_TEXT = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that some reader of YAML takes for something else."""


def own_settings(data: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Settings of the task of ours that means the same. data: merged settings of lm-evaluation-harness, `task` its name.

    Raises EvalError that names every setting for which there is no counterpart.
    """
    return _Translation(data, file).made()


def as_yaml(settings: Mapping[str, Any], origin: str) -> str:
    """YAML of a task of ours, readable by people. settings: from `own_settings`. origin: what it was translated from."""
    lines = [f"# {line}" for line in (f"Translated from {origin}", "by `llmtrain eval import-task`.")]
    for key, value in settings.items():
        if key == "lm_eval":
            lines += ["lm_eval:", *(f"  {name}: {_flow(one)}" for name, one in value.items())]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value in one line: texts as in JSON, plain words without quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(one) for one in value) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_/.-]*", value):
        return json.dumps(value) if value.lower() in _NOT_TEXT else value
    return json.dumps(value, ensure_ascii=False)


def own_task(settings: Mapping[str, Any], title: str) -> TaskConfig:
    """The task of ours with such settings. Raises ConfigError."""
    task, problems = decode(TaskConfig, with_defaults(TaskConfig, settings))
    if problems or task is None:
        raise ConfigError(title, problems)
    return task


class _Translation:
    def __init__(self, data: Mapping[str, Any], file: Path):
        self._data = {key: value for key, value in data.items() if value is not None}
        self._file = file
        self._refusals: list[str] = []
        self._type = _TYPES.get(str(self._data.get("output_type", "generate_until")))

    def made(self) -> dict[str, Any]:
        self._refuse_keys()
        made: dict[str, Any] = {}
        if self._type is None:
            self._refuse("output_type", f"{self._data['output_type']}: there are {', '.join(_TYPES)}")
        else:
            made = {"name": self._data.get("task"), "type": self._type}
            prompting: dict[str, Any] = {}
            made["source"] = self._source(prompting)
            made |= self._templates(prompting)
            if description := self._text("description"):
                made["preamble"] = description
            if shots := self._data.get("num_fewshot"):
                made["shots"] = [shots]
            self._scoring(made, prompting)
            if prompting:
                made["lm_eval"] = prompting
        if self._refusals:
            lines = "\n  ".join(self._refusals)
            raise EvalError(f"task {self._data.get('task')} of {self._file}: a task of ours cannot say\n  {lines}")
        return made

    def _refuse(self, key: str, reason: str) -> None:
        self._refusals.append(f"{key}: {reason}")

    def _refuse_keys(self) -> None:
        for key, value in self._data.items():
            if isinstance(value, Function):
                self._refuse(key, f"!function {value.reference}: {_REFUSED.get(key, 'is code').removeprefix('is ')}")
            elif key in _REFUSED and value is not False:
                self._refuse(key, _REFUSED[key])
            elif key not in _TRANSLATED and key not in _WITHOUT_EFFECT and key not in _REFUSED:
                self._refuse(key, "is no setting of lm-evaluation-harness 0.4.13")
        if self._data.get("repeats", 1) != 1:
            self._refuse("repeats", f"{self._data['repeats']}: an answer is generated once")

    # --- data ---

    def _source(self, prompting: dict[str, Any]) -> dict[str, Any]:
        data = self._data
        evaluated = data.get("test_split") or data.get("validation_split")
        fewshot = self._fewshot()
        split = fewshot.get("split", data.get("fewshot_split"))
        examples = split or data.get("training_split") or data.get("validation_split") or data.get("test_split")
        if evaluated is None:
            self._refuse("test_split", "missing, and no validation_split either; nothing says what is evaluated")
        # A document is left out of its own examples where these two are the same, also where both are missing.
        excluded = split == data.get("test_split")
        if excluded != (examples == evaluated):
            prompting["avoid_document"] = excluded
        if fewshot.get("sampler", "default") == "first_n":
            prompting["sampler"] = "first_n"
        place = self._place(str(evaluated))
        if examples is not None and examples != evaluated:
            other = self._place(str(examples))
            place["few_shot"] = {key: other[key] for key in ("path", "split") if key in other}
        return place

    def _fewshot(self) -> Mapping[str, Any]:
        config = self._data.get("fewshot_config", {})
        if not isinstance(config, Mapping):
            self._refuse("fewshot_config", "expected a mapping")
            return {}
        for key, value in config.items():
            known = (key == "sampler" and value in ("default", "first_n")) or (
                key == "split" and isinstance(value, str)
            )
            if not known and value is not None and value != self._data.get(key):
                shown = f"!function {value.reference}" if isinstance(value, Function) else _short(value)
                self._refuse(f"fewshot_config.{key}", f"{shown}: examples are written as documents are")
        return config

    def _place(self, split: str) -> dict[str, Any]:
        path, kwargs = self._data.get("dataset_path"), dict(self._data.get("dataset_kwargs") or {})
        kwargs.pop("trust_remote_code", None)
        files = kwargs.pop("data_files", None)
        for key in kwargs:
            self._refuse(f"dataset_kwargs.{key}", "has no counterpart")
        if not isinstance(path, str):
            self._refuse(
                "dataset_path", "missing; nothing says where the data are" if path is None else "expected a name"
            )
            return {"path": "?"}
        if path in ("json", "csv", "parquet", "text", "arrow"):
            found = files.get(split) if isinstance(files, Mapping) else files
            found = found[0] if isinstance(found, list) and len(found) == 1 else found
            if path != "json" or not isinstance(found, str):
                self._refuse("dataset_path", f"{path}: only one JSONL file for each split, as data_files, can be said")
                return {"path": "?"}
            return {"path": str(Path(found).expanduser().absolute())}
        if files is not None:
            self._refuse("dataset_kwargs.data_files", "has no counterpart for a data set of the hub")
        place = {"hub": path, "split": split}
        if (name := self._data.get("dataset_name")) is not None:
            place["config"] = str(name)
        return place

    # --- templates ---

    def _templates(self, prompting: dict[str, Any]) -> dict[str, Any]:
        delimiter = self._data.get("target_delimiter", " ")
        if delimiter != " " and self._type != "perplexity":
            prompting["continuation_delimiter"] = delimiter
        if (between := self._data.get("fewshot_delimiter", "\n\n")) != "\n\n":
            prompting["example_delimiter"] = between
        match self._type:
            case "multiple_choice":
                if _NUMBER.fullmatch(str(self._data.get("doc_to_text", ""))):
                    reason = "a number, which chooses one of several contexts; write a task of type schema"
                    self._refuse("doc_to_text", f"{_short(self._data['doc_to_text'])}: may be {reason}")
                return {
                    "query": self._text("doc_to_text"),
                    "choices": self._choices(),
                    "gold": self._text("doc_to_target"),
                }
            case "language_modeling":
                self._refuse_choices()
                return {"context": self._text("doc_to_text"), "continuation": self._text("doc_to_target")}
            case "perplexity":
                return {"text": self._text("doc_to_target")}
            case _:
                self._refuse_choices()
                return self._question()

    def _refuse_choices(self) -> None:
        if "doc_to_choice" in self._data:
            self._refuse("doc_to_choice", f"with output_type {self._data.get('output_type', 'generate_until')}")

    def _text(self, key: str) -> str:
        """A template; a column's name becomes a template of it."""
        value = self._data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | str):
            if value is None and key != "description":
                self._refuse(key, "missing")
            elif value is not None and not isinstance(value, Function):
                self._refuse(key, f"{_short(value)}: expected a template or the name of a column")
            return ""
        text = str(value)
        if isinstance(value, int) or text.isdigit():
            return text
        return _column_or_text(text) if key == "description" else _as_template(text)

    def _question(self) -> dict[str, Any]:
        answer = self._text("doc_to_target")
        return {"context": self._text("doc_to_text"), "answer": answer}

    def _choices(self) -> Any:
        value = self._data.get("doc_to_choice")
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            if not all(isinstance(one, str) for one in value) or any("{{" in one or "{%" in one for one in value):
                self._refuse("doc_to_choice", f"{_short(value)}: expected texts without templates")
            return value
        if isinstance(value, str):
            template = _as_template(value)
            if not _ONE_EXPRESSION.fullmatch(template):
                self._refuse("doc_to_choice", f"{_short(value)}: a list must be one expression, " + "{{[a, b]}}")
            return template
        if not isinstance(value, Function):
            self._refuse(
                "doc_to_choice", "missing" if value is None else f"{_short(value)}: expected a list or template"
            )
        return []

    # --- scoring ---

    def _scoring(self, made: dict[str, Any], prompting: dict[str, Any]) -> None:
        assert self._type is not None
        names = _METRICS[self._type]
        wanted = self._metrics(names)
        if self._type == "generation":
            self._generation(prompting)
            return
        if "filter_list" in self._data:
            self._refuse(
                "filter_list", f"filters are for answers that are generated, not for {self._data['output_type']}"
            )
        if "generation_kwargs" in self._data:
            self._refuse("generation_kwargs", f"nothing is generated with {self._data['output_type']}")
        if "acc_mutual_info" in wanted:
            made["pmi"] = ""
        if wanted and wanted[0] != next(iter(names)):
            prompting["metric"] = names[wanted[0]]

    def _metrics(self, names: Mapping[str, str]) -> list[str]:
        """Names of the metrics; refuses those that ours has not, and settings that it cannot express."""
        listed = self._data.get("metric_list")
        if listed is None:
            return []
        wanted: list[str] = []
        for item in listed if isinstance(listed, list) else [listed]:
            name = item.get("metric") if isinstance(item, Mapping) else item
            if not isinstance(item, Mapping) or not isinstance(name, str) or name not in names:
                shown = f"!function {name.reference}" if isinstance(name, Function) else name
                self._refuse("metric_list", f"{shown}: a {self._type} task has {', '.join(names)}")
                continue
            wanted.append(name)
            for key, value in item.items():
                if (check := _METRIC_SETTINGS.get(key)) is None and self._type != "generation":
                    self._refuse("metric_list", f"{name}: {key} has no counterpart")
                elif check is not None and not check(name, value):
                    self._refuse("metric_list", f"{name}: {key}: {_short(value)} is not how it is computed here")
        return wanted

    def _generation(self, prompting: dict[str, Any]) -> None:
        kwargs = self._data.get("generation_kwargs") or {}
        try:
            limits = read_generation(kwargs, (), 0)
        except EvalError as error:
            key, _, reason = str(error).partition(": ")
            self._refuse(f"generation_kwargs.{key}", reason)
            limits = GenerationLimits((), 1)
        if kwargs.get("until") is not None:
            prompting["stops"] = list(limits.stops)
        if any(kwargs.get(key) is not None for key in LENGTHS):
            prompting["max_new_tokens"] = limits.max_new_tokens
        if (sampling := limits.sampling) is not None:
            drawn = (
                f"do_sample with temperature {sampling.temperature}" if sampling.temperature else "repetition_penalty"
            )
            self._refuse("generation_kwargs", f"{drawn}: answers are greedy")
        for item in self._data.get("metric_list") or ():
            for key, value in item.items() if isinstance(item, Mapping) else ():
                if key in _EXACT_MATCH:
                    prompting[_EXACT_MATCH[key]] = [value] if isinstance(value, str) else value
                elif key not in _METRIC_SETTINGS and value not in (None, False):
                    self._refuse("metric_list", f"{item.get('metric')}: {key} has no counterpart")
        filters = self._data.get("filter_list")
        for item in filters if isinstance(filters, list) else [] if filters is None else [filters]:
            self._filter(item, prompting)

    def _filter(self, item: Any, prompting: dict[str, Any]) -> None:
        steps = item.get("filter") if isinstance(item, Mapping) else None
        if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
            self._refuse("filter_list", f"{_short(item)}: expected name and filter")
            return
        name = str(item.get("name"))
        kinds = [step.get("function") for step in steps]
        if kinds == ["regex", "take_first"]:
            rule = {"pattern": steps[0].get("regex_pattern", r"#### (\-?[0-9\.\,]+)")}
            rule |= {"match": steps[0]["group_select"]} if steps[0].get("group_select") else {}
            rule |= {"otherwise": steps[0]["fallback"]} if "fallback" in steps[0] else {}
            prompting.setdefault("extract", {})[name] = rule
        elif kinds == ["remove_whitespace", "take_first"] and len(self._data["filter_list"]) == 1:
            prompting["strip"] = True
        elif kinds != ["take_first"] or len(self._data["filter_list"]) > 1:
            shown = ", ".join(f"!function {one.reference}" if isinstance(one, Function) else str(one) for one in kinds)
            self._refuse("filter_list", f"{name}: {shown}: there are regex with take_first, and remove_whitespace")


_METRIC_SETTINGS: dict[str, Callable[[str, Any], bool]] = {
    "metric": lambda name, value: True,
    "aggregation": lambda name, value: (
        value == (name if "perplexity" in name or name == "bits_per_byte" else "mean")
        or (name, value) in (("word_perplexity", "weighted_perplexity"), ("byte_perplexity", "weighted_perplexity"))
    ),
    "higher_is_better": lambda name, value: value == (not ("perplexity" in name or name == "bits_per_byte")),
    "weight_by_size": lambda name, value: True,
    "hf_evaluate": lambda name, value: value is False,
}
"""Settings of a metric: whether a value is how ours computes it."""
_EXACT_MATCH = {
    "ignore_case": "ignore_case",
    "ignore_punctuation": "ignore_punctuation",
    "regexes_to_ignore": "ignore",
}


def _as_template(text: str) -> str:
    """A template; of a text without any template in it, which may be a column's name, a template of that column."""
    return f"{{{{{text}}}}}" if _FIELD.fullmatch(text) else _column_or_text(text)


def _column_or_text(text: str) -> str:
    if not text or "{{" in text or "{%" in text or not text[-1].isalnum() or "\n" in text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return f"{{{{record.get({quoted}, {quoted})}}}}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:56] + " ..."
