"""The YAMLs that come with llmtrain, by name from any folder. No torch here."""

import os.path
from pathlib import Path

from llmtrain.config.base import Problem
from llmtrain.config.report import ConfigError, suggest

_PACKAGE = Path(__file__).parents[1]
ROOT = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
"""The folder of eval/ and yamls/: in an installed package shipped/ (pyproject.toml), in a checkout its top."""

_SUFFIXES = (".yaml", ".yml")


def find_config(file: str | Path) -> Path:
    """Path of a YAML for `train` or `eval`, given by path or by name: NAME, NAME.yaml in this folder, or a shipped one.

    Raises ConfigError for a name that is none of them, and for a missing file that has the name of a shipped one. Other paths
    are returned whether or not they exist.
    """
    path, known = Path(file), configs()
    if os.path.isfile(file):  # Path.is_file raises for a name that is too long
        return path
    if path.suffix in _SUFFIXES:
        parts = path.with_suffix("").parts
        for name in ("/".join(parts[start:]) for start in range(len(parts))):
            if name in known and not os.path.exists(file):
                wrong = f"no such file; llmtrain brings one of that name, which is found as {name}"
                raise ConfigError(str(file), [Problem("", None, wrong)])
        return path
    for suffix in _SUFFIXES:
        if os.path.isfile(here := f"{file}{suffix}"):
            return Path(here)
    if str(file) in known:
        return known[str(file)]
    if os.path.exists(file):
        return path
    names = {found: name for name, found in sorted(known.items(), key=lambda item: -len(item[0]))}.values()
    here = [
        str(found.with_suffix(""))
        for found in path.parent.glob("*")
        if found.suffix in _SUFFIXES and not found.name.startswith(".")
    ]
    near = suggest(str(file), [*here, *names], "there are")
    raise ConfigError(
        str(file), [Problem("", None, f"is neither a file nor the name of a YAML that llmtrain brings; {near}")]
    )


def config_title(file: str | Path) -> str:
    """Name of a YAML in messages: what the user gave, with the file behind it if that was a name alone."""
    path = find_config(file)
    return str(file) if path == Path(file) else f"{file} ({path})"


def configs() -> dict[str, Path]:
    """Shipped YAMLs for `train` and `eval` by name, such as quickstart, pretrain/mpt-1b, and mpt-1b for short.

    Where several folders have a file of one name, the short name is that of pretrain's.
    """
    folder = ROOT / "yamls"
    yamls = sorted(folder.rglob("*.yaml"), key=lambda file: (file.parent.name == "pretrain", file))
    short = {file.stem: file for file in yamls}
    full = {file.relative_to(folder).with_suffix("").as_posix(): file for file in yamls}
    return {**short, **full, **{file.stem: file for file in (ROOT / "eval").glob("*.yaml")}}


def eval_yamls(kind: str) -> dict[str, Path]:
    """Shipped tasks or gauntlets by name. kind: "tasks" or "gauntlets"."""
    return {file.stem: file for file in (ROOT / "eval" / kind).glob("*.yaml")}
