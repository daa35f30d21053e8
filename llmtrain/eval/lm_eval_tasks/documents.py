"""Documents of a lm-evaluation-harness task: its data set's splits, and the parts of a document from a record.

The `datasets` library reads everything, as in the harness, so that a record has the same types there and here, and
`process_docs` gets the Dataset that it was written for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval_tasks.code import load_function
from llmtrain.eval.lm_eval_tasks.config import Field, Settings
from llmtrain.eval.lm_eval_tasks.yaml_file import Function
from llmtrain.eval.tasks.documents import joined_text

_SUFFIXES = {
    **dict.fromkeys((".jsonl", ".jsonl.gz", ".jsonl.zst", ".json"), "json"),
    ".csv": "csv",
    ".parquet": "parquet",
}
"""Local files that stand in for a split, and the `datasets` builder that reads them."""
_BUILDERS = ("json", "csv", "parquet", "text", "arrow", "xml")

Records = Sequence[dict[str, Any]]


# Data sets


@dataclass(frozen=True)
class DataSet:
    """Splits of a task's data set, loaded when first needed. data_dir: folder of local files in place of the data set:
    NAME/SPLIT.jsonl or DATASET/[CONFIG/]SPLIT.jsonl (also .json, .csv, .parquet; .jsonl.gz and .jsonl.zst)."""

    settings: Settings
    data_dir: Path | None

    @property
    def title(self) -> str:
        """Data set and configuration, as errors name them."""
        settings = self.settings
        config = f" ({settings.dataset_name})" if settings.dataset_name else ""
        return f"{settings.dataset_path or settings.custom_dataset}{config}"

    def split(self, name: str, process: Function | None) -> Any:
        """A split as a Dataset, through the task's function `process`. Raises EvalError for what there is not."""
        splits = self._local if self.data_dir is not None else self._splits
        if name not in splits:
            source = splits.folder if isinstance(splits, _Files) else self.title
            raise EvalError(f"{source} has no split '{name}'; there are {', '.join(map(str, splits)) or 'none'}")
        found = splits[name]
        if process is None:
            return found
        function = load_function(process)
        with _failures(f"process_docs ({process.reference}) failed at {self.title} [{name}]"):
            return function(found)

    @cached_property
    def _splits(self) -> Mapping[str, Any]:
        settings = self.settings
        if settings.custom_dataset is not None:
            made = load_function(settings.custom_dataset)
            with _failures(f"custom_dataset ({settings.custom_dataset.reference}) failed"):
                return made(**settings.metadata, **settings.dataset_kwargs)
        options = {key: value for key, value in settings.dataset_kwargs.items() if key != "trust_remote_code"}
        for key in ("data_files", "data_dir"):
            if key in options:
                options[key] = self._beside(options[key])
        path: Any = settings.dataset_path
        if path in _BUILDERS and not options.keys() & {"data_files", "data_dir"}:
            raise EvalError(
                f"{self.title}: dataset_kwargs names no data_files; without them, all files of the current folder would be read"
            )
        path = path if path in _BUILDERS else self._beside(path)
        advice = "" if path in _BUILDERS else "; without it, put its splits into a folder and name that with --data-dir"
        return _load(path, settings.dataset_name, options, f"{self.title}: cannot be loaded{advice}")

    def _beside(self, value: Any) -> Any:
        """Relative paths below the current folder, as in the harness, or else below the task file's."""
        if isinstance(value, dict):
            return {key: self._beside(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._beside(inner) for inner in value]
        beside = self.settings.file.parent / str(value)
        return str(beside) if not Path(str(value)).exists() and beside.exists() else value

    @cached_property
    def _local(self) -> Mapping[str, Any]:
        assert self.data_dir is not None
        settings, root = self.settings, self.data_dir.expanduser()
        if not root.is_dir():
            raise EvalError(f"there is no data folder {root}")
        folders = [root / settings.task]
        if settings.dataset_path:
            folders.append(root / settings.dataset_path / (settings.dataset_name or ""))
        for folder in folders:
            files = {
                file.name.removesuffix(suffix): (str(file), builder)
                for suffix, builder in _SUFFIXES.items()
                for file in sorted(folder.glob(f"*{suffix}"))
            }
            if files:
                return _Files(folder, files)
        looked = " or ".join(str(folder / "SPLIT.jsonl") for folder in folders)
        raise EvalError(f"the data folder has no files of this task; looked for {looked}")


class _Files(Mapping[str, Any]):
    """Splits from the files of a folder, each loaded when it is taken."""

    def __init__(self, folder: Path, files: Mapping[str, tuple[str, str]]):
        self.folder, self._files = folder, files

    def __getitem__(self, split: str) -> Any:
        file, builder = self._files[split]
        return _load(builder, None, {"data_files": {"it": file}}, f"{file}: cannot be read")["it"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _load(path: str, name: str | None, options: Mapping[str, Any], failure: str) -> Any:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    if options.get("split") is not None:
        raise EvalError(f"{failure}: dataset_kwargs.split: the task's test_split and its like choose splits; remove it")
    with _failures(failure):
        try:
            return datasets.load_dataset(path, name, **options)
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None  # it says no more than that it failed
        except StopIteration:
            raise EvalError(f"{failure}: there are no records in it") from None


@contextmanager
def _failures(lead: str) -> Iterator[None]:
    """Context in which any exception, of a library or of a task's code, becomes an EvalError that begins with `lead`."""
    try:
        yield
    except EvalError:
        raise
    except Exception as error:
        raise EvalError(f"{lead}: {_reason(error)}") from None


def _quotes(found: Any) -> str:
    """Advice on what YAML 1.1 made of yes and no."""
    return (
        "; put yes and no in quotes" if isinstance(found, list) and any(isinstance(one, bool) for one in found) else ""
    )


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# Parts of a document


def _environment() -> SandboxedEnvironment:
    # As in the harness, null is the text None, and lists may be changed; a constant is not computed when it is read.
    made = SandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, optimized=False
    )
    made.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(pattern, new, text, count=count)
    return made


_ENVIRONMENT = _environment()


@cache
def _compiled(template: str) -> Any:
    return _ENVIRONMENT.from_string(template)


def check_templates(settings: Settings) -> None:
    """Compile all templates; raises EvalError that names the key of one that is none."""
    examples = settings.examples
    for key, template in {
        "doc_to_text": settings.doc_to_text,
        "doc_to_target": settings.doc_to_target,
        "doc_to_choice": settings.doc_to_choice,
        "description": settings.description,
        "gen_prefix": settings.gen_prefix,
        "fewshot_config.doc_to_text": examples.doc_to_text,
        "fewshot_config.doc_to_target": examples.doc_to_target,
        "fewshot_config.doc_to_choice": examples.doc_to_choice,
        "fewshot_config.gen_prefix": examples.gen_prefix,
    }.items():
        if isinstance(template, str):
            try:
                _compiled(template)
            except (TemplateError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
                raise EvalError(f"task {settings.task}: {key}: not a template: {_reason(error)}") from None


@dataclass(frozen=True)
class Fields:
    """Text, target and choices of records.

    columns: names of the evaluated data set's columns; a setting that is one of them is no template. several_contexts,
    several_right: the task's kind, which the first record decides: doc_to_text gives the number of a choice (one context for
    each choice); doc_to_target gives a list (several right answers). Raises EvalError that names the setting.
    """

    settings: Settings
    columns: frozenset[str]
    several_contexts: bool = False
    several_right: bool = False

    def text(self, record: Mapping[str, Any], written: Field | None = None) -> Any:
        written = self.settings.doc_to_text if written is None else written
        with _failures("`doc_to_text`"):
            if isinstance(written, str) and written not in self.columns:
                text = _compiled(written).render(record)
                return ast.literal_eval(text) if self._is_number(text) else text
            return self._value(written, record)

    def target(self, record: Mapping[str, Any], written: Field | None = None) -> Any:
        written = self.settings.doc_to_target if written is None else written
        with _failures("`doc_to_target`"):
            if not isinstance(written, str) or written in self.columns:
                return self._value(written, record)
            text = _compiled(written).render(record)
            if self._is_number(text):
                return ast.literal_eval(text)
            if len(text) >= 2 and (text[0], text[-1]) == ("[", "]"):
                try:
                    return ast.literal_eval(text)
                except (SyntaxError, ValueError):
                    return text
            return text

    def choices(self, record: Mapping[str, Any], written: Field | None = None) -> list[str]:
        written = self.settings.doc_to_choice if written is None else written
        with _failures("`doc_to_choice`"):
            if isinstance(written, str) and written not in self.columns:
                found = ast.literal_eval(_compiled(written).render(record))
            elif isinstance(written, dict):
                found = list(written.values())
            else:
                found = self._value(written, record)
            if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str) for one in found):
                raise EvalError(f"`doc_to_choice` gives {found!r}; expected a list of texts{_quotes(found)}")
            return list(found)

    def description(self, record: Mapping[str, Any]) -> str:
        return self._resolved("description", self.settings.description, record, record) or ""

    def prefix(self, record: Mapping[str, Any], written: str | None, *, example: bool = False) -> str | None:
        """gen_prefix: the beginning of the answer. example: its own columns count, not those of the evaluated data."""
        return self._resolved("gen_prefix", written, record, record if example else self.columns)

    def _resolved(self, key: str, written: str | None, record: Mapping[str, Any], columns: Any) -> str | None:
        if not written:
            return None
        with _failures(f"`{key}`"):
            return record[written] if written in columns else _compiled(written).render(record)

    def _is_number(self, text: str) -> bool:
        return text.isdigit() and self.settings.doc_to_choice is not None

    def _value(self, written: Any, record: Mapping[str, Any]) -> Any:
        if isinstance(written, Function):
            return load_function(written)(record)
        return record[written] if isinstance(written, str) else written


@dataclass(frozen=True)
class LmEvalDocument:
    """One document. index: its number in the evaluated split. where: data set, split and row (from 1)."""

    index: int
    where: str
    record: dict[str, Any] = field(repr=False)
    fields: Fields = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        """The document with its right answer as plain text, without examples."""
        texts = self.texts
        return joined_text(texts["prompt"], texts["right"]) if "right" in texts else texts["prompt"]

    @property
    def texts(self) -> dict[str, Any]:
        """Texts for reports: the question (prompt), the right answer, and the choices or further right answers."""
        fields, record = self.fields, self.record
        if fields.settings.output_type == "loglikelihood_rolling":
            return {"prompt": str(fields.target(record))}
        asked, answer = fields.text(record), fields.target(record)
        choices = fields.choices(record) if fields.settings.doc_to_choice is not None else []
        answers = answer if isinstance(answer, list) else [answer]
        asked, *right = (
            choices[one] if isinstance(one, int) and 0 <= one < len(choices) else str(one) for one in (asked, *answers)
        )
        texts: dict[str, Any] = {"prompt": asked, "right": right[0] if right else ""}
        return texts | ({"choices": choices} if choices else {"aliases": right[1:]} if right[1:] else {})


def evaluated_documents(data: DataSet, limit: int | None) -> list[LmEvalDocument]:
    """The first documents of test_split, or of validation_split where there is none. Raises EvalError for an empty split."""
    settings = data.settings
    split = settings.test_split or settings.validation_split
    assert split is not None
    rows = data.split(split, settings.process_docs)
    records = _records(data, split, rows, limit)
    if not records:
        raise EvalError(f"{data.title} [{split}] holds no documents")
    columns = getattr(rows, "features", None) or records[0]
    fields = Fields(settings, frozenset(columns))
    text, target = fields.text(records[0]), fields.target(records[0])
    has_choices = settings.doc_to_choice is not None
    fields = Fields(settings, fields.columns, isinstance(text, int) and has_choices, isinstance(target, list))
    return [_document(data, split, number, one, fields) for number, one in enumerate(records)]


def example_documents(data: DataSet, fields: Fields) -> list[LmEvalDocument]:
    """Documents that few-shot examples are drawn from: of fewshot_split, or fewshot_config.samples; else of the training,
    validation or test split, the first that is named."""
    settings, examples = data.settings, data.settings.examples
    if examples.split is not None:
        split, rows = examples.split, data.split(examples.split, examples.process_docs)
    elif examples.samples is not None:
        split, rows = "fewshot_config.samples", examples.samples
        if isinstance(rows, Function):
            with _failures("`fewshot_config.samples`"):
                rows = load_function(rows)()
    else:
        split = settings.training_split or settings.validation_split or settings.test_split
        assert split is not None
        rows = data.split(split, settings.process_docs)
    records = _records(data, split, rows, None)
    return [_document(data, split, number, one, fields) for number, one in enumerate(records)]


def _records(data: DataSet, split: str, rows: Any, limit: int | None) -> list[dict[str, Any]]:
    """The first rows of a split, which code may have made, or which are read only now. Raises EvalError."""
    with _failures(f"{data.title} [{split}] cannot be read"):
        records = list(islice(iter(rows), limit))
    for number, one in enumerate(records, 1):
        if not isinstance(one, Mapping):
            raise EvalError(f"{data.title} [{split}]:{number}: expected a record, a mapping, found {one!r}")
    return records


def _document(data: DataSet, split: str, number: int, record: Any, fields: Fields) -> LmEvalDocument:
    return LmEvalDocument(number, f"{data.title} [{split}]:{number + 1}", record, fields)
