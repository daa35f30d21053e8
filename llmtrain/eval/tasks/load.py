"""Task and gauntlet YAMLs: finding and decoding them, with all errors reported at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from llmtrain.config.base import Problem, Section
from llmtrain.config.decode import decode
from llmtrain.config.regular_file import read_bytes
from llmtrain.config.report import ConfigError, suggest
from llmtrain.config.schema_tree import with_defaults
from llmtrain.config.shipped import eval_yamls
from llmtrain.config.yaml_source import read_file
from llmtrain.eval.errors import EvalError

S = TypeVar("S", bound=Section)


def read_section(path: str | Path, schema: type[S]) -> S:
    """Decode a YAML file. Raises ConfigError whose text lists every error with file, line, dotted path and what to change."""
    file = Path(path)
    if file.is_file() and not read_bytes(file).strip():
        raise ConfigError(str(path), [Problem("", None, f"is empty; it needs {', '.join(_required(schema))}")])
    source = read_file(path)
    made, problems = decode(schema, with_defaults(schema, source.data), source.unreadable)
    if made is None or problems or source.problems:
        raise ConfigError(source.title, [*source.problems, *problems], source.origins)
    return made


def _required(schema: type[Section]) -> list[str]:
    return [name for name, field in schema.model_fields.items() if field.is_required()]


def find_yaml(name: str | Path, kind: str) -> Path:
    """Path of a YAML file that is given by path, or by the name of a shipped one. kind: "tasks" or "gauntlets".

    Raises EvalError for an unknown name.
    """
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    shipped = eval_yamls(kind)
    if str(name) not in shipped:
        raise EvalError(
            f"there is no {kind[:-1]} '{name}': {suggest(str(name), shipped, f'{kind} are')} (or give the path of a .yaml)"
        )
    return shipped[str(name)]


def check_known(value: str, allowed: Sequence[str], what: str) -> str:
    """Return the value. Raises EvalError that lists the allowed values if it is none of them."""
    if value not in allowed:
        raise EvalError(f"unknown {what} '{value}'; {suggest(value, allowed, 'expected one of')}")
    return value
