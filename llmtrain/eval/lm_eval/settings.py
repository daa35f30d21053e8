"""Settings of a task file of lm-evaluation-harness, checked by name before anything of it is loaded: no data is read, no code runs.

What keys, filters, metrics and aggregations there are, lm_eval's own classes and registries say.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from llmtrain.config.report import suggest
from llmtrain.eval.errors import EvalError, prefixed
from llmtrain.eval.lm_eval.code import references, refusal
from llmtrain.eval.lm_eval.generation import read_generation
from llmtrain.eval.lm_eval.yaml_file import Function
from llmtrain.eval.prompts.encode import GenerationLimits
from llmtrain.eval.tasks.templates import compiled

OUTPUT_TYPES = ("loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until")

_REFUSED = {
    "class": "the task is a Python class; only tasks that YAML describes can run",
    "use_prompt": "prompts of the promptsource library are not supported; write doc_to_text and doc_to_target",
    "doc_to_image": "images are not supported",
    "doc_to_audio": "audio is not supported",
    "unsafe_code": "the task runs code that a model writes, which is not supported",
}
_UNUSED = {"should_decontaminate", "doc_to_decontamination_query"}
"""Keys that are never used, nor their code run: `llmtrain decontaminate` compares a document's text with its right answer."""
_WRITES = ("cache_dir", "save_infos", "download_config")
"""Settings of `load_dataset` by which a task file would choose where files are written."""
_TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix")

MOST_REPEATS = 10_000
"""Answers that are drawn for a document."""

SEED = 1234
"""Seed of few-shot examples and of answers that are drawn; the harness's, there for torch."""

_ALSO = {"doc_to_text": (int,), "doc_to_target": (int, list), "metadata": (int, float, str, list)}
"""Types of values beside those of lm_eval's annotations, where it takes more."""
_TYPES = {"Callable": Function, "str": str, "list": list, "dict": dict, "int": int, "bool": bool, "OutputType": str}
_CODE = ("custom_dataset", "process_docs", "process_results")
_KINDS = {str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list", dict: "a mapping"}
_KINDS |= {Function: "!function"}


@dataclass(frozen=True)
class Metric:
    """One entry of `metric_list`. name, aggregation: of a registry of lm_eval's, or code. arguments: its further settings."""

    name: str
    aggregation: str | Function
    higher_is_better: bool
    function: Function | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """A task's settings. data: the file's, without null values. file: the YAML, which errors and paths refer to."""

    task: str
    file: Path
    data: Mapping[str, Any]
    metrics: tuple[Metric, ...]
    generation: GenerationLimits | None

    @property
    def output_type(self) -> str:
        return self.data.get("output_type", "generate_until")

    @property
    def num_fewshot(self) -> int:
        return self.data.get("num_fewshot", 0)

    @property
    def repeats(self) -> int:
        return self.data.get("repeats", 1)

    @property
    def chains(self) -> list[str]:
        """Names of the filter chains."""
        return [str(one["name"]) for one in self.data.get("filter_list", [{"name": "none"}])]

    @property
    def own_scoring(self) -> bool:
        """True if code of the task computes metrics or filters answers."""
        scored = {key: self.data.get(key) for key in ("process_results", "metric_list", "filter_list")}
        return any(True for _ in references(scored))


def read_settings(data: Mapping[str, Any], file: Path, allow_code: Sequence[Path]) -> Settings:
    """Settings from a task file's content. allow_code: folders whose code may run.

    Raises EvalError that names the task, and every key with what is wrong with it.
    """
    name = data.get("task")
    if not isinstance(name, str) or not name:
        raise EvalError(f"{file}: task: expected the task's name, found {name!r}")
    if find_spec("lm_eval") is None:
        raise EvalError(
            f"task {name}: is a file of lm-evaluation-harness, which is not installed: pip install 'llmtrain[lm-eval]'"
        )
    problems = [f"{key}: {why}" for key, why in _REFUSED.items() if data.get(key)]
    problems += _wrong_keys(data, {**_known("TaskConfig"), **dict.fromkeys((*_REFUSED, *_UNUSED), (object,))}, "")
    run = {key: value for key, value in data.items() if key not in {*_UNUSED, *_REFUSED}}
    problems += refusal(references(run), allow_code)
    if problems:
        raise EvalError(f"task {name}: {'; '.join(problems)}")
    with prefixed(f"task {name}"):
        return _settings({key: value for key, value in run.items() if value is not None}, file)


@cache
def _known(section: str) -> dict[str, tuple[type, ...]]:
    """Keys of a section of lm_eval's configuration, and the types of their values by its annotations."""
    from lm_eval.config import task

    found: dict[str, tuple[type, ...]] = {}
    for one in fields(getattr(task, section)):
        text = str(one.type)
        while text != (outer := re.sub(r"\[[^\[\]]*\]", "", text)):
            text = outer
        kinds = tuple(kind for name, kind in _TYPES.items() if re.search(rf"\b{name}\b", text))
        found[one.name] = (Function,) if one.name in _CODE else (*kinds, *_ALSO.get(one.name, ()))
    return found


def _wrong_keys(data: Mapping[str, Any], known: Mapping[str, tuple[type, ...]], prefix: str) -> Iterator[str]:
    for key, value in data.items():
        if key not in known:
            yield f"{prefix}{key}: unknown; {suggest(str(key), known)}"
        elif value is not None and (
            not isinstance(value, known[key]) or (isinstance(value, bool) and not {bool, object} & {*known[key]})
        ):
            wanted = " or ".join(dict.fromkeys(_KINDS[kind] for kind in known[key]))
            yield f"{prefix}{key}: expected {wanted}, found {value!r}"


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
    if data.get("repeats", 1) > MOST_REPEATS:
        raise EvalError(f"repeats: {data['repeats']}; expected at most {MOST_REPEATS:,}")
    for key in _WRITES:
        if key in data.get("dataset_kwargs", ()):
            raise EvalError(
                f"dataset_kwargs.{key}: a task's file may not say where files are written; remove it (HF_DATASETS_CACHE moves the "
                "cache of data sets)"
            )
    _check_examples(data.get("fewshot_config", {}))
    _check_filters(data.get("filter_list"), output_type)
    _check_templates(data)
    metrics = tuple(_metrics(data.get("metric_list"), output_type, "process_results" in data))
    return Settings(data["task"], file, data, metrics, _generation(data) if output_type == "generate_until" else None)


def _check_examples(given: Mapping[str, Any]) -> None:
    from lm_eval.api.samplers import SAMPLER_REGISTRY

    if wrong := list(_wrong_keys(given, _known("FewshotConfig"), "fewshot_config.")):
        raise EvalError("; ".join(wrong))
    if (sampler := given.get("sampler", "default")) not in SAMPLER_REGISTRY:
        raise EvalError(f"fewshot_config.sampler: '{sampler}'; expected {' or '.join(SAMPLER_REGISTRY)}")
    samples = given.get("samples")
    if isinstance(samples, list) and not all(isinstance(one, dict) for one in samples):
        raise EvalError("fewshot_config.samples: expected a list of mappings, one for each example")


def _check_templates(data: Mapping[str, Any]) -> None:
    named = {key: data.get(key) for key in (*_TEMPLATES, "description")}
    named |= {f"fewshot_config.{key}": data.get("fewshot_config", {}).get(key) for key in _TEMPLATES}
    for key, template in named.items():
        if isinstance(template, str):
            faults = TemplateError, ValueError, SyntaxError, RecursionError, MemoryError
            with prefixed(f"{key}: not a template", *faults):
                compiled(template)


def _generation(data: Mapping[str, Any]) -> GenerationLimits:
    try:
        return read_generation(data.get("generation_kwargs", {}), [data.get("fewshot_delimiter", "\n\n")], SEED)
    except EvalError as error:
        raise EvalError(f"generation_kwargs.{error}") from None


# Metrics


def _metrics(given: Any, output_type: str, own_results: bool) -> Iterator[Metric]:
    """Entries of `metric_list`, or those of the output type. own_results: process_results computes them, so that any name goes."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY, DEFAULT_METRIC_REGISTRY, get_metric, metric_registry

    get_metric("acc")  # fills the registries
    if given is None:
        given = [{"metric": name} for name in DEFAULT_METRIC_REGISTRY[output_type]]
    if not given:
        raise EvalError("metric_list: empty; nothing would be measured")
    for number, entry in enumerate(given):
        key = f"metric_list.{number}"
        if not isinstance(entry, dict) or "metric" not in entry:
            raise EvalError(f"{key}: expected a mapping with `metric`, found {entry!r}")
        function = entry["metric"] if isinstance(entry["metric"], Function) else None
        if function is not None and own_results:
            continue  # process_results computes everything; the harness never calls this function
        name = function.reference.rpartition(".")[2] if function else str(entry["metric"])
        aggregation, higher = _defaults(name)
        aggregation = entry.get("aggregation", aggregation)
        if aggregation is None or not isinstance(aggregation, str | Function):
            known = suggest(str(aggregation), AGGREGATION_REGISTRY, "there are")
            raise EvalError(f"{key}: {name} needs an aggregation; {known}")
        if isinstance(aggregation, str) and aggregation not in AGGREGATION_REGISTRY:
            known = suggest(aggregation, AGGREGATION_REGISTRY, "there are")
            raise EvalError(f"{key}: there is no aggregation '{aggregation}'; {known}")
        no_arguments = ("metric", "aggregation", "higher_is_better", "hf_evaluate")
        arguments = {name: value for name, value in entry.items() if name not in no_arguments}
        if function is None and not own_results:
            if entry.get("hf_evaluate") and output_type == "generate_until" and name != "exact_match":
                raise EvalError(f"{key}: {name} of the `evaluate` library (hf_evaluate) is not supported")
            if name not in metric_registry:
                raise EvalError(f"{key}: there is no metric '{name}'; {suggest(name, metric_registry, 'there are')}")
            if name == "exact_match" and output_type == "generate_until":
                _check_exact_match(key, arguments)
        yield Metric(name, aggregation, bool(entry.get("higher_is_better", higher)), function, arguments)


def _defaults(name: str) -> tuple[str | None, bool]:
    """(aggregation, whether higher is better) of a metric of lm_eval's."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY, get_metric_aggregation, is_higher_better, metric_registry

    if name not in metric_registry:
        return None, True
    function = get_metric_aggregation(name)
    aggregation = next((key for key, known in AGGREGATION_REGISTRY.items() if known is function), None)
    return aggregation, bool(is_higher_better(name))


def _check_exact_match(key: str, arguments: Mapping[str, Any]) -> None:
    from lm_eval.api.metrics import exact_match_hf_evaluate

    known = list(inspect.signature(exact_match_hf_evaluate).parameters)[2:]
    for setting in arguments:
        if setting not in known:
            raise EvalError(f"{key}: exact_match has no setting '{setting}'; {suggest(setting, known)}")
    _check_patterns(f"{key}: regexes_to_ignore", arguments.get("regexes_to_ignore"))


# Filters


def _check_filters(given: Any, output_type: str) -> None:
    if given is None:
        return
    if not given or not isinstance(given, list):
        raise EvalError(f"filter_list: expected a list of chains, found {given!r}; without it, the first is taken")
    names = []
    for number, chain in enumerate(given):
        key = f"filter_list.{number}"
        if not isinstance(chain, dict) or not isinstance(chain.get("filter"), list) or "name" not in chain:
            raise EvalError(f"{key}: expected name and filter, a list of functions")
        for one in chain["filter"]:
            _check_filter(f"{key}.filter", one)
        if chain["name"] in names:
            raise EvalError(f"filter_list: two chains are called '{chain['name']}'; their scores would have one name")
        names.append(chain["name"])
        if output_type != "generate_until" and chain["filter"] != [{"function": "take_first"}]:
            raise EvalError(
                f"filter_list: {chain['name']}: log-likelihoods can pass take_first alone; filters are for texts"
            )


def _check_filter(key: str, given: Any) -> None:
    from lm_eval.api.registry import filter_registry, get_filter
    from lm_eval.filters import build_filter_ensemble

    assert build_filter_ensemble  # its module fills the registry
    if not isinstance(given, dict) or "function" not in given:
        raise EvalError(f"{key}: expected a mapping with `function`, found {given!r}")
    function, arguments = given["function"], {name: value for name, value in given.items() if name != "function"}
    if isinstance(function, Function):
        return
    if function == "custom":
        if not isinstance(arguments.get("filter_fn"), Function):
            raise EvalError(f"{key}: custom needs filter_fn: !function of a Python file")
        return
    names = [name for name in filter_registry if name != "decontaminate"]  # that one reads a file of the machine
    if function not in names:
        raise EvalError(f"{key}: there is no filter '{function}'; {suggest(str(function), names, 'filters are')}")
    made = get_filter(function)
    own = "__init__" in vars(made)
    known = [one for one in inspect.signature(made).parameters if one != "kwargs"] if own else []
    known += ["k"] if function == "take_first_k" else []
    for name in arguments:
        if name not in known:
            raise EvalError(f"{key}: {function} has no setting '{name}'; {suggest(name, known)}")
    if function == "take_first_k" and (type(arguments.get("k")) is not int or arguments["k"] < 1):
        raise EvalError(f"{key}: take_first_k needs k, a number of answers")
    if function == "map":
        _check_mapping(key, arguments.get("mapping_dict"))
    _check_pattern(f"{key}: {function}", arguments.get("regex_pattern", ""))
    _check_patterns(f"{key}: {function}: regexes_to_ignore", arguments.get("regexes_to_ignore"))


def _check_mapping(key: str, mapping: Any) -> None:
    """Check that an answer, which is a text, can equal each key: YAML 1.1 reads `yes` as true and `1` as a number."""
    if not isinstance(mapping, dict):
        raise EvalError(f"{key}: map needs mapping_dict, a mapping of answers, found {mapping!r}")
    if wrong := [one for one in mapping if not isinstance(one, str)]:
        advice = "put yes, no and the like in quotes" if isinstance(wrong[0], bool) else "put it in quotes"
        raise EvalError(f"{key}: mapping_dict: the key {wrong[0]!r} is no text, and no answer can equal it; {advice}")


def _check_patterns(key: str, patterns: Any) -> None:
    """Check a list of regular expressions, or None: of a text, every letter would be a pattern."""
    if patterns is not None and not isinstance(patterns, list):
        raise EvalError(f"{key}: expected a list of regular expressions, found {patterns!r}")
    for pattern in patterns or ():
        _check_pattern(key, pattern)


def _check_pattern(key: str, pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise EvalError(f"{key}: expected a regular expression, found {pattern!r}")
    with prefixed(f"{key}: {pattern!r} is not a regular expression", re.error, OverflowError, RecursionError):
        re.compile(pattern)


# As results keep them


def described(settings: Settings) -> dict[str, Any]:
    """Settings on which prompts and scores depend, as JSON; functions by their names, as folders differ between machines."""
    data, limits = settings.data, settings.generation
    own = data.get("fewshot_config", {})
    delimiters = {"fewshot_delimiter": "\n\n", "target_delimiter": " "}
    examples = {"sampler": own.get("sampler", "default"), "samples": own.get("samples")}
    examples["split"] = own.get("split", data.get("fewshot_split"))
    examples |= {key: own.get(key, data.get(key)) for key in ("process_docs", *_TEMPLATES)}
    for key in ("doc_to_text", "doc_to_target"):
        examples[key] = data[key] if examples[key] is None else examples[key]
    for key, value in delimiters.items():
        examples[key] = own[key] if own.get(key) is not None else data.get(key, value)
    first = [{"name": "none", "filter": [{"function": "take_first"}]}]
    made = {
        **{key: data.get(key) for key in (*_TEMPLATES, "training_split", "validation_split", "test_split")},
        **{key: data.get(key) for key in ("process_docs", "process_results")},
        **{key: data.get(key, value) for key, value in delimiters.items()},
        "description": data.get("description", ""),
        "output_type": settings.output_type,
        "repeats": settings.repeats,
        "examples": examples,
        "metrics": [vars(one) for one in settings.metrics],
        "filters": [
            {
                "name": str(chain["name"]),
                "filters": [
                    {"function": one["function"], "arguments": {k: v for k, v in one.items() if k != "function"}}
                    for one in chain["filter"]
                ],
            }
            for chain in data.get("filter_list", first)
        ],
        "generation": limits and {**vars(limits), "sampling": limits.sampling and vars(limits.sampling)},
    }
    return _plain(made)


def _plain(value: Any) -> Any:
    if isinstance(value, Function):
        return f"!function {value.reference}"
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | None) else str(value)  # a date, in YAML
