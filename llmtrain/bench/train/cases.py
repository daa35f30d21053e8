"""The cases of a sweep, each with the config of its run. No torch here."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.bench.train.sweep import Precision, Sweep, key_of
from llmtrain.config.base import Problem
from llmtrain.config.report import ConfigError, format_value
from llmtrain.config.shipped import find_config
from llmtrain.schema.config import Config
from llmtrain.schema.load import check_for_world, load_config

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


def cases(sweep: Sweep, out: Path) -> list[Case]:
    """Every case, checked. out: folder of the runs. Raises ConfigError with all that cannot be."""
    if problems := list(label_problems(sweep.models)):
        raise sweep.error(problems)
    found: list[Case] = []
    for i, (model, label) in enumerate(zip(sweep.models, labels(sweep.models), strict=True)):
        base = load_config(model)
        lengths = sweep.seq_lens or [base.data.seq_len]
        for seq_len, gpus, precision in itertools.product(lengths, sweep.gpus, sweep.precisions):
            keys = {
                "seq_lens": f"seq_lens.{lengths.index(seq_len)}" if sweep.seq_lens else f"models.{i}",
                "gpus": f"gpus.{sweep.gpus.index(gpus)}",
                "precisions": f"precisions.{sweep.precisions.index(precision)}",
                "models": f"models.{i}",
            }
            name = f"{label}-{seq_len}-{gpus}gpu-{precision}"
            settings = _settings(sweep, out, name, min(base.model.vocab_size, 4096), seq_len, precision)
            try:
                config = load_config(model, settings)
                if sweep.batch_tokens is not None and gpus % config.train.parallel.unit == 0:
                    batch = _batch(sweep, model, config, gpus)
                    settings.append(f"train.global_batch_size={batch}")
                    config = load_config(model, settings)
            except ConfigError as error:
                problems += [_of_sweep(problem, sweep, model, keys) for problem in error.problems]
                continue
            problems += [_of_world(problem, model, gpus, keys) for problem in check_for_world(config, gpus)]
            found.append(Case(name, label, model, seq_len, gpus, precision, tuple(settings), config))
    if problems:
        raise sweep.error(list({(problem.path, problem.message): problem for problem in problems}.values()))
    return found


def _batch(sweep: Sweep, model: str, config: Config, gpus: int) -> int:
    """Sequences of batch_tokens on every GPU, in whole microbatches. Raises ConfigError where that is none."""
    tokens, size, seq_len = sweep.batch_tokens or 0, config.train.least_microbatch, config.data.seq_len
    unit = gpus // config.train.parallel.ranks * size
    if microbatches := tokens * gpus // (unit * seq_len):
        return microbatches * unit
    least = -(-unit * seq_len // gpus)
    text = f"is less than one microbatch of {_run(model, gpus)}, {size} x {seq_len} tokens; use at least {least}"
    raise sweep.error([Problem("batch_tokens", tokens, text)])


_SWEEP_KEYS = {
    "data.seq_len": "seq_lens",
    "data.prepare": "seq_lens",
    "train.precision": "precisions",
    "train.float8": "precisions",
    "train.parallel": "gpus",
}
"""Settings of a run that come from keys of the sweep."""


def _of_sweep(problem: Problem, sweep: Sweep, model: str, keys: dict[str, str]) -> Problem:
    """A problem of a run, at the key of the sweep that makes it. keys: the entry of each key that is the run's."""
    path = problem.path
    if path == "batch_tokens":
        return problem
    place = next(
        (keys[key] for start, key in _SWEEP_KEYS.items() if f"{path}.".startswith(f"{start}.")), keys["models"]
    )
    for i, setting in enumerate(sweep.settings):
        if f"{path}.".startswith(f"{key_of(setting)}."):
            place = f"settings.{i}"
    return Problem(place, None, f"{model}: {_told(problem)}")


def _of_world(problem: Problem, model: str, gpus: int, keys: dict[str, str]) -> Problem:
    """A setting that so many GPUs cannot have, at their number in the sweep."""
    more = ", or give the sweep batch_tokens" if problem.path == "train.global_batch_size" else ""
    return Problem(keys["gpus"], None, f"{_run(model, gpus)}: {_told(problem)}{more}")


def _told(problem: Problem) -> str:
    value = "" if problem.found in (None, problem.path.rpartition(".")[2]) else f" = {format_value(problem.found)}"
    return f"{problem.path}{value}: {problem.message}" if problem.path else problem.message


def _run(model: str, gpus: int) -> str:
    return f"{model} on {gpus} GPU{'s' * (gpus > 1)}"


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
