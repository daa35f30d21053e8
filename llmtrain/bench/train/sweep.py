"""The YAML of `llmtrain bench train`, and the cases that it names. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from llmtrain.bench.train.models import label_problems, labels
from llmtrain.bench.train.own_settings import own_setting_problems
from llmtrain.config.base import PositiveInt, Problem, Processes, Section
from llmtrain.config.decode import decode
from llmtrain.config.interpolation import resolve
from llmtrain.config.report import ConfigError
from llmtrain.config.shipped import find_config
from llmtrain.config.yaml_source import read_file
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

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


@dataclass(frozen=True)
class Case:
    """One run: a YAML with settings on so many GPUs. name: of its folder and its results. label: of the model in both."""

    name: str
    label: str
    model: str
    seq_len: int
    gpus: int
    precision: Precision
    settings: tuple[str, ...]
    config: Config


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


def cases(sweep: Sweep, out: Path) -> list[Case]:
    """Every case, checked. out: folder of the runs. Raises ConfigError for a run that cannot be."""
    if problems := list(label_problems(sweep.models)):
        raise sweep.error(problems)
    found = []
    for model, label in zip(sweep.models, labels(sweep.models), strict=True):
        base = load_config(model)
        lengths = sweep.seq_lens or [base.data.seq_len]
        for seq_len, gpus, precision in itertools.product(lengths, sweep.gpus, sweep.precisions):
            name = f"{label}-{seq_len}-{gpus}gpu-{precision}"
            vocabulary = min(base.model.vocab_size, 4096)
            settings = _settings(sweep, out, name, vocabulary, seq_len, precision)
            config = _config(sweep, model, settings, gpus)
            found.append(Case(name, label, model, seq_len, gpus, precision, tuple(settings), config))
    return found


def _settings(sweep: Sweep, out: Path, name: str, vocabulary: int, seq_len: int, precision: Precision) -> list[str]:
    steps = sweep.warmup + sweep.steps
    folder = out / "data" / f"stdlib-{vocabulary}-{seq_len}"
    data = f"{{sources: [stdlib], out: {folder}, vocab_size: {vocabulary}, seq_len: {seq_len}}}"
    return [
        f"name={name}",
        f"run_dir={out / 'runs' / name}",
        "data.train=null",
        "data.validation=null",
        f"data.prepare={data}",
        f"data.seq_len={seq_len}",
        f"train.precision={'fp32' if precision == 'fp32' else 'amp_bf16'}",
        f"train.float8={'null' if precision in ('fp32', 'bf16') else f'{{recipe: {precision}}}'}",
        # Longer than is measured: neither the validation nor the checkpoint at the end of a run is wanted.
        f"train.duration={100 * steps} steps",
        "schedule={type: constant}",
        f"eval.interval={100 * steps} steps",
        f"checkpoint={{interval: {100 * steps} steps, background: false}}",
        "logging={tensorboard: false, progress_bar: false}",
        *sweep.settings,
    ]


def _config(sweep: Sweep, model: str, settings: list[str], gpus: int) -> Config:
    """The config of a run. Adds to `settings` the batch that batch_tokens makes."""
    config = load_config(model, settings)
    groups = gpus // config.train.parallel.ranks
    if sweep.batch_tokens is not None and groups:  # else the ranks are what is wrong
        unit = groups * config.train.least_microbatch
        microbatches = sweep.batch_tokens * gpus // (unit * config.data.seq_len)
        if not microbatches:
            least = -(-unit * config.data.seq_len // gpus)
            run, size = f"{model} on {gpus} GPU{'s' * (gpus > 1)}", config.train.least_microbatch
            text = f"is less than one microbatch of {run}, {size} x {config.data.seq_len} tokens; use at least {least}"
            raise sweep.error([Problem("batch_tokens", sweep.batch_tokens, text)])
        settings.append(f"train.global_batch_size={microbatches * unit}")
    return load_config(model, settings, world_size=gpus)
