"""The YAML of `llmtrain bench train`. No torch here."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from llmtrain.config.base import PositiveInt, Problem, Processes, Section
from llmtrain.config.decode import decode
from llmtrain.config.interpolation import resolve
from llmtrain.config.report import ConfigError
from llmtrain.config.shipped import find_config
from llmtrain.config.yaml_source import read_file

_DATA = "is Python's standard library in every run; leave it out"
_UNSEEN = "has no part in the steps that are measured; leave it out"
_OWN = {
    "name": "is made of model, length, GPUs and precision; rename the model's YAML",
    "run_dir": "is in the folder of the results; use --out",
    "data.train": _DATA,
    "data.validation": _DATA,
    "data.prepare": _DATA,
    "data.seq_len": "is of the sweep; use seq_lens",
    "train.precision": "is of the sweep; use precisions",
    "train.float8": "is of the sweep; use precisions",
    "train.duration": "is of the sweep; use steps and warmup",
    "schedule": "is constant in every run; leave it out",
    "eval.interval": _UNSEEN,
    "checkpoint": _UNSEEN,
    "logging": _UNSEEN,
}
"""Keys, each with what to do instead."""


def key_of(setting: str) -> str:
    return setting.partition("=")[0].strip()


def own_setting_problems(settings: Sequence[str], *, batch: bool, float8: bool) -> Iterator[Problem]:
    """Settings that would contradict what the sweep says of its runs.

    batch: True if batch_tokens sets the batch. float8: True if every precision is a recipe, whose details may be set.
    """
    own = _OWN | (
        {"train.global_batch_size": "is of batch_tokens, which is given too; use one of the two"} if batch else {}
    )
    for i, setting in enumerate(settings):
        if "=" not in setting:
            yield Problem(f"settings.{i}", setting, "is no setting; write a.b=c")
        elif wrong := _wrong(key_of(setting), own, float8):
            yield Problem(f"settings.{i}", None, wrong)


def _wrong(key: str, own: dict[str, str], float8: bool) -> str | None:
    if float8 and key.startswith("train.float8.") and key != "train.float8.recipe":
        return None
    for one, instead in own.items():
        if key == one or key.startswith(f"{one}."):
            return f"{key} {instead}"
    if below := [one for one in own if one.startswith(f"{key}.")]:
        return f"{key} as a whole would replace {', '.join(below)}, which the sweep sets; write {key}.KEY=VALUE"
    return None


Precision = Literal["fp32", "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"]


class Sweep(Section):
    """Every model at every length, number of GPUs and precision, in this order, a process (or one per GPU) each."""

    models: Annotated[list[str], Field(min_length=1)]
    """YAMLs of runs, by path or shipped name. Their data is replaced by Python's standard library, so that any machine has it."""
    seq_lens: list[PositiveInt] = []
    """Tokens per sequence. Default: each YAML's own."""
    gpus: Annotated[list[Processes], Field(min_length=1)] = [1]
    """Processes per run."""
    precisions: Annotated[list[Precision], Field(min_length=1)] = ["bf16"]
    """fp32, bf16, or a recipe of train.float8."""
    batch_tokens: PositiveInt | None = None
    """Tokens per step and GPU, rounded down to whole microbatches. Default: each YAML's global_batch_size: strong scaling."""
    settings: list[str] = []
    """Further settings of every run, `a.b=c`; none that the sweep makes itself."""
    steps: PositiveInt = 20
    """Steps to measure."""
    warmup: PositiveInt = 5
    """Steps before, the first of which compiles."""
    timeout: PositiveInt = 1800
    """Seconds after which a run that has not finished is given up."""

    _file: str = PrivateAttr("the sweep")
    _lines: dict[str, int | str] = PrivateAttr(default_factory=dict)

    def read_from(self, file: str, lines: dict[str, int | str]) -> None:
        """Remember the file and the lines of its keys, for errors."""
        self._file, self._lines = file, lines

    def error(self, problems: Sequence[Problem]) -> ConfigError:
        return ConfigError(self._file, problems, self._lines)

    def problems(self) -> Iterator[Problem]:
        for key, values in {"seq_lens": self.seq_lens, "gpus": self.gpus, "precisions": self.precisions}.items():
            for i, value in enumerate(values):
                if value in values[:i]:
                    yield Problem(f"{key}.{i}", value, "is there twice; a case is measured once")
        float8 = not {"fp32", "bf16"} & set(self.precisions)
        yield from own_setting_problems(self.settings, batch=self.batch_tokens is not None, float8=float8)


def load_sweep(path: str | Path) -> Sweep:
    """Raises ConfigError with everything that is wrong."""
    source = read_file(find_config(path))
    resolve(source, Sweep)
    sweep, found = decode(Sweep, source.data, source.unreadable)
    problems = [*source.problems, *found]
    if problems or sweep is None:
        raise ConfigError(str(path), problems, source.origins)
    sweep.read_from(str(path), source.origins)
    return sweep
