"""The YAML of `llmtrain eval`: models, tasks and convention. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from llmtrain.config.base import PositiveInt, Problem, Section
from llmtrain.config.config_type import check_config_type
from llmtrain.config.decode import decode
from llmtrain.config.interpolation import resolve
from llmtrain.config.output_folder import unwritable_reason
from llmtrain.config.overrides import apply_override
from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import read_file
from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.gauntlet import Gauntlet, check_metric, load_gauntlet
from llmtrain.eval.task import Task, load_task
from llmtrain.eval.tasks.config import Convention
from llmtrain.eval.tasks.load import find_yaml
from llmtrain.schema.wandb import WandbConfig


class _OrText:
    """JSON schema of a section that may also be written as a string, the value of one key."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


def _from_text(key: str) -> BeforeValidator:
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class ModelChoice(Section):
    """A model to evaluate; a string is its path."""

    path: str
    """A run's folder (its newest checkpoint), a checkpoint, either also in a store (s3://bucket/prefix), or a folder or hub
    name in Hugging Face format."""
    name: str | None = None
    """Name in results; default: the last part of the path (of a checkpoint, its run's and its own)."""
    tokenizer: str | None = None
    """A folder, tokenizer.json or hub name; default: the model's own."""
    backend: Literal["auto", "llmtrain", "transformers"] = "auto"
    """transformers: as AutoModelForCausalLM loads it. auto: llmtrain's own model wherever it can be read as one."""
    max_length: PositiveInt | None = None
    """Most tokens it may read; default: the run's setting, or that of its config."""

    @property
    def title(self) -> str:
        if self.name:
            return self.name
        path = Path(self.path)
        inside = path.name.startswith("step-") and path.parent.name == "checkpoints"
        return f"{path.parents[1].name}/{path.name}" if inside else path.name or self.path


class TaskChoice(Section):
    """A task to run; a string is its name."""

    task: str
    """The name of a shipped task, or the path of a task's YAML."""
    shots: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Numbers of few-shot examples; default: the task's own."""


Models = list[Annotated[ModelChoice, _from_text("path"), _OrText()]]
Tasks = list[Annotated[TaskChoice, _from_text("task"), _OrText()]]
Texts = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class EvalRun(Section):
    """One run of `llmtrain eval`."""

    name: str = Field("eval", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run."""
    out: str = "results/${name}"
    """The folder of results."""
    cache: str | None = "${out}/cache"
    """Folder of stored responses, with which an interrupted run continues and a repeated one needs no model; null: none."""
    model: Texts | None = None
    """A model, or several, in place of `models`: `llmtrain eval FILE model=PATH`."""
    models: Models = []
    """Models to evaluate: paths, or mappings with further settings."""
    tasks: Tasks = []
    """Tasks to run: names, or mappings with the numbers of examples. With a gauntlet, its tasks are run as well."""
    gauntlet: str | None = None
    """The name of a shipped gauntlet, or the path of one: averages over categories of tasks."""
    convention: Convention = "lm-eval"
    """Convention of prompts, tokenisation and normalisation: `foundry` or `lm-eval`."""
    data_dir: str | None = None
    """A folder of local JSONL files, in place of the tasks' sources."""
    limit: PositiveInt | None = None
    """Number of documents of each task (of each category) to evaluate, the first ones; for trials, not for results."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type of weights and activations; default: bfloat16 on a GPU, float32 on a CPU."""
    max_length: PositiveInt | None = None
    """Most tokens a model may read; default: that of its config."""
    max_batch_tokens: PositiveInt | None = None
    """Tokens read at a time, padding included. Results do not depend on it; memory does."""
    share_prefixes: bool = True
    """Read a prefix that several requests share once. Results do not depend on it."""
    pmi: bool = True
    """Also score the choices after the premise alone, in tasks with `pmi`; more work for one more metric."""
    details: bool = False
    """Also write every document's log-likelihoods and answers, to details/MODEL/TASK.jsonl."""
    wandb: WandbConfig | None = None
    """Log the results to Weights & Biases."""

    def chosen_models(self) -> list[ModelChoice]:
        return [ModelChoice(path=path) for path in self.model] if self.model is not None else list(self.models)

    def problems(self) -> Iterator[Problem]:
        if not self.tasks and self.gauntlet is None:
            yield Problem("tasks", None, "there is nothing to run; name tasks, or a gauntlet")
        titles = [model.title for model in self.chosen_models()]
        for title in sorted({title for title in titles if titles.count(title) > 1}):
            yield Problem("models", title, "two models have this name; give each a `name` of its own")


def load_eval_run(path: str | Path, overrides: Sequence[str] = (), *, needs_models: bool = True) -> EvalRun:
    """Read and check an eval YAML. overrides: `a.b=c`, applied in order.

    Raises ConfigError that lists every problem. Tasks and gauntlet are loaded too, data and models are not.
    """
    file = Path(path)
    if file.is_file() and not file.read_bytes().strip():
        raise ConfigError(str(path), [Problem("", None, "is empty; it needs tasks, or a gauntlet")])
    source = read_file(path)
    check_config_type(source, "evaluation")
    for override in overrides:
        apply_override(source, override, EvalRun)
    resolve(source, EvalRun)
    run, found = decode(EvalRun, source.data, source.unreadable)
    problems = [*source.problems, *found]
    if run is not None and not problems:
        if needs_models and not run.chosen_models():
            problems.append(
                Problem("models", None, "there is nothing to evaluate; name models here, or add model=PATH")
            )
        problems += _task_problems(run)
        problems += _unwritable(run) if needs_models else ()
    if problems or run is None:
        raise ConfigError(source.title, problems, source.origins)
    return run


def _task_problems(run: EvalRun) -> Iterator[Problem]:
    for number, choice in enumerate(run.tasks):
        try:
            _task(run, choice.task)
        except EvalError as error:
            yield Problem(f"tasks.{number}", None, str(error))
    if run.gauntlet is not None:
        try:
            gauntlet = load_gauntlet(run.gauntlet)
            for group in gauntlet.categories.values():
                for benchmark in group:
                    task = _task(run, benchmark.task)
                    check_metric(gauntlet, benchmark, task.metric, _measured(run, task))
        except EvalError as error:
            yield Problem("gauntlet", None, str(error))


def _unwritable(run: EvalRun) -> Iterator[Problem]:
    for name, folder in (("out", run.out), ("cache", run.cache)):
        if folder is not None and (reason := unwritable_reason(folder)):
            yield Problem(name, folder, reason)


def _task(run: EvalRun, name: str) -> Task:
    """Load a task. Raises ConfigError or EvalError, also for a headline metric that `pmi: false` leaves out."""
    task = load_task(name, run.convention, run.data_dir)
    if task.metric not in _measured(run, task):
        raise EvalError(
            f"task {task.name}: its headline is {task.metric}, which `pmi: false` leaves out; set pmi: true"
        )
    return task


def _measured(run: EvalRun, task: Task) -> list[str]:
    return [name for name in task.config.metrics(run.convention) if run.pmi or name != "acc_pmi"]


@dataclass(frozen=True)
class TaskRun:
    """A task with a number of few-shot examples."""

    task: Task
    shots: int

    @property
    def title(self) -> str:
        """Name in results."""
        return f"{self.task.name} ({self.shots}-shot)"


def task_runs(run: EvalRun, gauntlet: Gauntlet | None) -> list[TaskRun]:
    """Distinct pairs of task and shots, in the order of the YAML, then of the gauntlet. Raises ConfigError, EvalError."""
    wanted = [(choice.task, choice.shots) for choice in run.tasks]
    wanted += [(name, [shots]) for name, shots in (gauntlet.benchmarks() if gauntlet else [])]
    made: dict[tuple[str, int], TaskRun] = {}
    files: dict[str, Path] = {}
    for name, counts in wanted:
        task, file = _task(run, name), find_yaml(name, "tasks").resolve()
        if files.setdefault(task.name, file) != file:
            raise EvalError(f"{files[task.name]} and {file} are both called '{task.name}'; rename one of them")
        for shots in counts or task.shots:
            made.setdefault((task.name, shots), TaskRun(task, shots))
    return list(made.values())
