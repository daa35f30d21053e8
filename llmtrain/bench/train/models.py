"""Models of a sweep: a label for each file, by which its runs are named, and a digest of what a run trains. No torch here."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain.config.base import Problem
from llmtrain.config.shipped import find_config
from llmtrain.schema.config import Config

_WITHOUT_EFFECT = {
    **dict.fromkeys(("name", "run_dir", "eval", "checkpoint", "logging"), True),
    "data": {"prepare": {"out"}},
}
"""Places and names of a run, and what a sweep leaves out."""


def labels(models: Sequence[str]) -> list[str]:
    """The stem of each file; with its folder's name before it, `b-a` of b/a.yaml, where several files have that stem."""
    files = [find_config(model).resolve() for model in models]
    count = Counter(file.stem for file in dict.fromkeys(files))
    return [file.stem if count[file.stem] == 1 else f"{file.parent.name}-{file.stem}" for file in files]


def label_problems(models: Sequence[str]) -> Iterator[Problem]:
    """Files that are named twice, or whose runs would have the same names."""
    first: dict[str, tuple[str, Path]] = {}
    for i, (model, label) in enumerate(zip(models, labels(models), strict=True)):
        file = find_config(model).resolve()
        if label not in first:
            first[label] = model, file
            continue
        other, known = first[label]
        if known == file:
            yield Problem(f"models.{i}", model, "is there twice; name each model once")
        else:
            text = f"{other} and {model} would both be named {label} in the results; rename one file, or its folder"
            yield Problem(f"models.{i}", None, text)


def digest(config: Config) -> str:
    """Hash of every setting that a measured run depends on; where it is written and what it is called are none."""
    settings = config.model_dump(mode="json", exclude=_WITHOUT_EFFECT)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
