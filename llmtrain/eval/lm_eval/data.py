"""Data of lm-evaluation-harness' tasks: splits by name, from the hub, from files, from code, or from the folder of --data-dir.

The `datasets` library reads everything, as in the harness, so that a record has the same types there and here, and
`process_docs` gets the Dataset that it was written for.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from llmtrain.errors import first_line
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.code import load_function

_SUFFIXES = {
    **dict.fromkeys((".jsonl", ".jsonl.gz", ".jsonl.zst", ".json"), "json"),
    ".csv": "csv",
    ".parquet": "parquet",
}
"""Local files that stand in for a split, and the `datasets` builder that reads them."""
_BUILDERS = ("json", "csv", "parquet", "text", "arrow", "xml")


class DataSet(Mapping[str, Any]):
    """Splits of a task's data set as Datasets, loaded when first needed.

    given: the task's settings. file: its YAML, to whose folder relative paths refer too. data_dir: folder of local files in place
    of the data set: NAME/SPLIT.jsonl or DATASET/[CONFIG/]SPLIT.jsonl (also .json, .csv, .parquet; .jsonl.gz and .jsonl.zst).
    Raises EvalError for what there is not.
    """

    def __init__(self, given: Mapping[str, Any], file: Path, data_dir: Path | None):
        self._given, self._file, self._data_dir = given, file, data_dir

    @property
    def title(self) -> str:
        """Data set and configuration, as errors name them."""
        name = self._given.get("dataset_name")
        return f"{self._given.get('dataset_path') or self._given.get('custom_dataset')}{f' ({name})' if name else ''}"

    def __getitem__(self, split: str) -> Any:
        splits = self._splits if self._data_dir is None else self._local
        if split not in splits:
            source = splits.folder if isinstance(splits, _Files) else self.title
            raise EvalError(f"{source} has no split '{split}'; there are {', '.join(map(str, splits)) or 'none'}")
        return splits[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self._splits if self._data_dir is None else self._local)

    def __len__(self) -> int:
        return len(self._splits if self._data_dir is None else self._local)

    @cached_property
    def _splits(self) -> Mapping[str, Any]:
        given, options = self._given, dict(self._given.get("dataset_kwargs") or {})
        if (custom := given.get("custom_dataset")) is not None:
            made = load_function(custom)
            with failures(f"custom_dataset ({custom.reference}) failed"):
                return made(**given["metadata"], **options)
        options.pop("trust_remote_code", None)
        for key in ("data_files", "data_dir"):
            if key in options:
                options[key] = self._beside(options[key])
        path: Any = given.get("dataset_path")
        if path in _BUILDERS and not options.keys() & {"data_files", "data_dir"}:
            raise EvalError(
                f"{self.title}: dataset_kwargs names no data_files; without them, all files of the current folder would be read"
            )
        path = path if path in _BUILDERS else self._beside(path)
        advice = "" if path in _BUILDERS else "; without it, put its splits into a folder and name that with --data-dir"
        return _load(path, given.get("dataset_name"), options, f"{self.title}: cannot be loaded{advice}")

    def _beside(self, value: Any) -> Any:
        """Relative paths below the current folder, as in the harness, or else below the task file's."""
        if isinstance(value, dict):
            return {key: self._beside(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._beside(inner) for inner in value]
        beside = self._file.parent / str(value)
        return str(beside) if not Path(str(value)).exists() and beside.exists() else value

    @cached_property
    def _local(self) -> Mapping[str, Any]:
        assert self._data_dir is not None
        given, root = self._given, self._data_dir.expanduser()
        if not root.is_dir():
            raise EvalError(f"there is no data folder {root}")
        folders = [root / given["task"]]
        if given.get("dataset_path"):
            folders.append(root / given["dataset_path"] / (given.get("dataset_name") or ""))
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
    with failures(failure):
        try:
            return datasets.load_dataset(path, name, **options)
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None  # it says no more than that it failed
        except StopIteration:
            raise EvalError(f"{failure}: there are no records in it") from None


@contextmanager
def failures(lead: str) -> Iterator[None]:
    """Context in which any exception, of a library or of a task's code, becomes an EvalError that begins with `lead`."""
    try:
        yield
    except EvalError:
        raise
    except Exception as error:
        raise EvalError(f"{lead}: {first_line(error)}") from None
