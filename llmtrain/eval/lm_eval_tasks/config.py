"""Settings of a task file of lm-evaluation-harness 0.4.13, checked by name; no data is read and no code imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.report import suggest
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval_tasks.code import references, refusal
from llmtrain.eval.lm_eval_tasks.filters import FilterChain, read_filters
from llmtrain.eval.lm_eval_tasks.generation import read_generation
from llmtrain.eval.lm_eval_tasks.metrics import MetricSettings, read_metrics
from llmtrain.eval.lm_eval_tasks.yaml_file import Function
from llmtrain.eval.prompts.encode import GenerationLimits

OUTPUT_TYPES = ("loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until")

_TEXT, _CODE = (str,), (str, Function)
_KEYS: dict[str, tuple[type, ...]] = {
    "task": _TEXT,
    "task_alias": _TEXT,
    "tag": (str, list),
    "group": (str, list),
    "custom_dataset": (Function,),
    "dataset_path": _TEXT,
    "dataset_name": _TEXT,
    "dataset_kwargs": (dict,),
    "training_split": _TEXT,
    "validation_split": _TEXT,
    "test_split": _TEXT,
    "fewshot_split": _TEXT,
    "process_docs": (Function,),
    "doc_to_text": (str, int, Function),
    "doc_to_target": (str, int, list, Function),
    "doc_to_choice": (str, list, dict, Function),
    "process_results": (Function,),
    "description": _TEXT,
    "target_delimiter": _TEXT,
    "fewshot_delimiter": _TEXT,
    "fewshot_config": (dict,),
    "num_fewshot": (int,),
    "metric_list": (list,),
    "output_type": _TEXT,
    "generation_kwargs": (dict,),
    "repeats": (int,),
    "filter_list": (list,),
    "should_decontaminate": (bool,),
    "doc_to_decontamination_query": _CODE,
    "gen_prefix": _TEXT,
    "unsafe_code": (bool,),
    "metadata": (dict, int, float, str, list),
}
"""Keys and the types of their values; null stands for the default."""

_REFUSED = {
    "class": "the task is a Python class; only tasks that YAML describes can run",
    "use_prompt": "prompts of the promptsource library are not supported; write doc_to_text and doc_to_target",
    "doc_to_image": "images are not supported",
    "doc_to_audio": "audio is not supported",
}
_EXAMPLE_KEYS: dict[str, tuple[type, ...]] = {
    "sampler": _TEXT,
    "split": _TEXT,
    "process_docs": (Function,),
    "fewshot_indices": (list,),
    "samples": (list, Function),
    "doc_to_text": (str, int, Function),
    "doc_to_choice": (str, list, dict, Function),
    "doc_to_target": (str, int, list, Function),
    "gen_prefix": _TEXT,
    "fewshot_delimiter": _TEXT,
    "target_delimiter": _TEXT,
}
_NOT_RUN = {"doc_to_decontamination_query"}
"""Keys whose code is never called: `llmtrain decontaminate` compares a document's text with its right answer."""

_SEED = 1234
"""Seed of answers that are drawn; the harness's for torch."""

Field = str | int | list | dict | Function


@dataclass(frozen=True)
class ExampleSettings:
    """Few-shot examples (`fewshot_config`), with what they inherit from the task."""

    sampler: str
    split: str | None
    process_docs: Function | None
    samples: list[Any] | Function | None
    doc_to_text: Field
    doc_to_choice: Field | None
    doc_to_target: Field
    gen_prefix: str | None
    fewshot_delimiter: str
    target_delimiter: str


@dataclass(frozen=True)
class Settings:
    """Settings of a task; names and meanings are lm-evaluation-harness's. file: the YAML, which errors and paths refer to."""

    task: str
    file: Path
    output_type: str
    doc_to_text: Field
    doc_to_target: Field
    doc_to_choice: Field | None
    examples: ExampleSettings
    metrics: tuple[MetricSettings, ...]
    filters: tuple[FilterChain, ...]
    generation: GenerationLimits | None
    dataset_path: str | None = None
    dataset_name: str | None = None
    dataset_kwargs: Mapping[str, Any] = field(default_factory=dict)
    custom_dataset: Function | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    training_split: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    process_docs: Function | None = None
    process_results: Function | None = None
    description: str = ""
    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"
    gen_prefix: str | None = None
    num_fewshot: int = 0
    repeats: int = 1


_OF_DATA = (
    "task",
    "file",
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "custom_dataset",
    "metadata",
    "num_fewshot",
)


def described(settings: Settings) -> dict[str, Any]:
    """Settings as JSON, without those of data and shots; functions by their names, as folders differ between machines."""
    return {one.name: _plain(getattr(settings, one.name)) for one in fields(settings) if one.name not in _OF_DATA}


def _plain(value: Any) -> Any:
    if isinstance(value, Function):
        return f"!function {value.reference}"
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | None) else str(value)  # a date, in YAML


def read_settings(data: Mapping[str, Any], file: Path, allow_code: Sequence[Path]) -> Settings:
    """Settings from a task file's content. Raises EvalError that names the task, and every key with what is wrong with it."""
    name = data.get("task")
    if not isinstance(name, str) or not name:
        raise EvalError(f"{file}: task: expected the task's name, found {name!r}")
    problems = [f"{key}: {reason}" for key, reason in _REFUSED.items() if data.get(key)]
    problems += _wrong_keys(data, {**_KEYS, **dict.fromkeys(_REFUSED, (object,))}, "")
    if data.get("unsafe_code"):
        problems.append("unsafe_code: the task runs code that a model writes, which is not supported")
    run = {key: value for key, value in data.items() if key not in {*_NOT_RUN, *_REFUSED}}
    problems += refusal(references(run), allow_code)
    if problems:
        raise EvalError(f"task {name}: {'; '.join(problems)}")
    try:
        return _settings({key: value for key, value in data.items() if value is not None}, file)
    except EvalError as error:
        raise EvalError(f"task {name}: {error}") from None


def _wrong_keys(data: Mapping[str, Any], known: Mapping[str, tuple[type, ...]], prefix: str) -> Iterator[str]:
    for key, value in data.items():
        if key not in known:
            yield f"{prefix}{key}: unknown; {suggest(str(key), known)}"
        elif value is not None and (
            not isinstance(value, known[key]) or (isinstance(value, bool) and not {bool, object} & {*known[key]})
        ):
            wanted = " or ".join(_KINDS[kind] for kind in known[key])
            yield f"{prefix}{key}: expected {wanted}, found {value!r}"


_KINDS = {str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list", dict: "a mapping"}
_KINDS |= {Function: "!function"}


def _settings(data: dict[str, Any], file: Path) -> Settings:
    output_type = data.get("output_type", "generate_until")
    if output_type not in OUTPUT_TYPES:
        raise EvalError(f"output_type: '{output_type}'; {suggest(output_type, OUTPUT_TYPES, 'expected one of')}")
    for key in ("doc_to_text", "doc_to_target", *(["doc_to_choice"] if output_type == "multiple_choice" else [])):
        if key not in data:
            raise EvalError(f"{key}: missing; a task of output_type {output_type} needs it")
    if "test_split" not in data and "validation_split" not in data:
        raise EvalError("test_split: missing; name it, or validation_split: one of them is evaluated")
    if "dataset_path" not in data and "custom_dataset" not in data:
        raise EvalError("dataset_path: missing; name a data set of the hub, or json with dataset_kwargs.data_files")
    for key, least in (("num_fewshot", 0), ("repeats", 1)):
        if data.get(key, least) < least:
            raise EvalError(f"{key}: {data[key]}; expected at least {least}")
    filters = read_filters(data.get("filter_list"), output_type, data.get("repeats", 1))
    metrics = read_metrics(data.get("metric_list"), output_type, "process_results" in data)
    plain = {"dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "training_split", "validation_split"}
    plain |= {"test_split", "process_docs", "process_results", "description", "target_delimiter", "fewshot_delimiter"}
    plain |= {"gen_prefix", "num_fewshot", "repeats"}
    metadata = data.get("metadata")
    return Settings(
        task=data["task"],
        file=file,
        output_type=output_type,
        doc_to_text=data["doc_to_text"],
        doc_to_target=data["doc_to_target"],
        doc_to_choice=data.get("doc_to_choice"),
        examples=_examples(data),
        metrics=metrics,
        filters=filters,
        generation=_generation(data) if output_type == "generate_until" else None,
        metadata=metadata if isinstance(metadata, dict) else {},
        **{key: data[key] for key in plain if key in data},
    )


def _examples(data: Mapping[str, Any]) -> ExampleSettings:
    given = data.get("fewshot_config", {})
    wrong = list(_wrong_keys(given, _EXAMPLE_KEYS, "fewshot_config."))
    if wrong:
        raise EvalError("; ".join(wrong))
    sampler = given.get("sampler", "default")
    if sampler not in ("default", "first_n"):
        raise EvalError(f"fewshot_config.sampler: '{sampler}'; expected default or first_n")
    samples = given.get("samples")
    if isinstance(samples, list) and not all(isinstance(one, dict) for one in samples):
        raise EvalError("fewshot_config.samples: expected a list of mappings, one for each example")
    inherited = {"split": data.get("fewshot_split"), "fewshot_delimiter": "\n\n", "target_delimiter": " "}
    made: dict[str, Any] = {}
    for key in ("split", "process_docs", "doc_to_text", "doc_to_choice", "doc_to_target", "gen_prefix"):
        made[key] = given[key] if key in given else inherited.get(key, data.get(key))
    for key in ("fewshot_delimiter", "target_delimiter"):
        made[key] = given[key] if given.get(key) is not None else data.get(key, inherited[key])
    for key in ("doc_to_text", "doc_to_target"):  # null in fewshot_config leaves the task's own
        made[key] = data[key] if made[key] is None else made[key]
    return ExampleSettings(sampler=sampler, samples=samples, **made)


def _generation(data: Mapping[str, Any]) -> GenerationLimits:
    try:
        return read_generation(data.get("generation_kwargs") or {}, [data.get("fewshot_delimiter", "\n\n")], _SEED)
    except EvalError as error:
        raise EvalError(f"generation_kwargs.{error}") from None
