"""One model's side of a comparison, read from a folder of results. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.config.checksums import KEY, DamagedError, decode
from llmtrain.config.regular_file import read_bytes
from llmtrain.config.report import suggest
from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.document_scores import Line, read_lines

Key = tuple[str, int]
"""Task and shots."""


@dataclass(frozen=True)
class Side:
    """Results of one model. rows: those of results.json, by task and shots. gauntlet, groups: its parts of it.
    failed: reasons of tasks that failed, by title."""

    model: str
    folder: Path
    settings: Mapping[str, Any]
    rows: Mapping[Key, Mapping[str, Any]]
    gauntlet: Mapping[str, Any] | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def convention(self) -> str:
        return next(iter(self.rows.values()))["convention"]

    def documents(self, key: Key) -> list[Line]:
        """Lines of every document of a task. Raises EvalError where they are missing or damaged."""
        file = self.rows[key].get("documents_file")
        if file is None:
            raise EvalError(
                f"{self.folder}: was written before documents were kept; run the same `llmtrain eval` again, which asks nothing "
                "anew"
            )
        return read_lines(self.folder / file, self.rows[key].get("documents_xxh3_128"))


def read_sides(a: Path, b: Path | None, model_a: str | None, model_b: str | None) -> tuple[Side, Side]:
    """Both sides of a comparison. b: None where both models are of one result.

    Raises EvalError for a result that is not there, and where a model must be named, or is unknown.
    """
    first = _content(a)
    second = first if b is None else _content(b)
    if b is None and model_a is None and model_b is None:
        names = _models(first)
        if len(names) != 2:
            raise EvalError(
                f"{a} has {_listed(names)}; name the two to compare by --model-a and --model-b, or a second result"
            )
        model_a, model_b = names
    sides = _side(a, first, model_a, "--model-a"), _side(b or a, second, model_b, "--model-b")
    if sides[0].model == sides[1].model and sides[0].folder.resolve() == sides[1].folder.resolve():
        raise EvalError(f"{a}: {sides[0].model} would be compared with itself; name two results, or two models of one")
    return sides


def _content(path: Path) -> dict[str, Any]:
    file = path / "results.json" if path.is_dir() else path
    try:
        content, _ = decode(read_bytes(file))
        rows = content["results"]
        assert rows and all(one["documents"] and one["metrics"] and one["convention"] for one in rows)
        return content
    except FileNotFoundError:
        inside = sorted(path.glob("icl/step-*"))
        hint = f"; the evaluations of this run are {inside[0]} … {inside[-1]}" if inside else ""
        raise EvalError(
            f"{file}: no such file; expected a folder that `llmtrain eval` wrote, or its results.json{hint}"
        ) from None
    except OSError as error:
        raise EvalError(f"{file}: {error.strerror}") from None
    except DamagedError as error:
        if f'"{KEY}"'.encode() not in read_bytes(file):
            raise EvalError(f"{file}: is no results.json of `llmtrain eval`") from None
        raise EvalError(f"{file} {error}; run the same `llmtrain eval` again, which asks nothing anew") from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise EvalError(f"{file}: is no results.json of `llmtrain eval`") from None


def _models(content: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(one["model"] for one in content["results"]))


def _listed(names: list[str]) -> str:
    return f"{len(names)} model{'s' * (len(names) != 1)} ({', '.join(names)})"


def _side(path: Path, content: Mapping[str, Any], model: str | None, flag: str) -> Side:
    names = _models(content)
    if model is None:
        if len(names) > 1:
            raise EvalError(f"{path} has {_listed(names)}; choose one by {flag}")
        model = names[0]
    if model not in names:
        raise EvalError(f"{flag} {model}: {path} has no such model; {suggest(model, names, 'it has')}")
    rows = {(one["task"], one["shots"]): one for one in content["results"] if one["model"] == model}
    gauntlet = content.get("gauntlet", {})
    scores = gauntlet.get(model)
    folder = path if path.is_dir() else path.parent
    groups = [one for one in content.get("groups", ()) if one["model"] == model]
    failed = {one["title"]: one["reason"] for one in content.get("failed", ()) if model in one["models"]}
    shown = scores and {"name": gauntlet["name"], **scores}
    return Side(model, folder, content.get("settings", {}), rows, shown, groups, failed)


def labels(a: Side, b: Side) -> tuple[str, str]:
    """Names of both sides that tell them apart."""
    if a.model != b.model:
        return a.model, b.model
    return f"{a.model} ({a.folder})", f"{b.model} ({b.folder})"
