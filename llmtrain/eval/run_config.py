"""The YAML of `llmtrain eval`: which models, which tasks, by which convention. No torch here."""

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
    """Of a section that may be written as the text of one key: says so in the JSON schema."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


def _from_text(key: str) -> BeforeValidator:
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class ModelChoice(Section):
    """A model to evaluate; only its path, where nothing else is said."""

    path: str
    """A run's folder (its newest checkpoint), a checkpoint, either also in a store (s3://bucket/prefix), or a folder or hub
    name in Hugging Face format."""
    name: str | None = None
    """In results; default: the last part of the path (of a checkpoint, its run's and its own)."""
    tokenizer: str | None = None
    """A folder, tokenizer.json or hub name; default: the model's own."""
    backend: Literal["auto", "llmtrain", "transformers"] = "auto"
    """transformers: as AutoModelForCausalLM loads it. auto: llmtrain's own model wherever it can be read as one."""
    max_length: PositiveInt | None = None
    """Most tokens it may read; default: the run's setting, or what its config says."""

    @property
    def title(self) -> str:
        if self.name:
            return self.name
        path = Path(self.path)
        inside = path.name.startswith("step-") and path.parent.name == "checkpoints"
        return f"{path.parents[1].name}/{path.name}" if inside else path.name or self.path


class TaskChoice(Section):
    """A task to run; only its name, where nothing else is said."""

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
    """Of the run."""
    out: str = "results/${name}"
    """The folder of results."""
    cache: str | None = "${out}/cache"
    """Where answers are kept, so that an interrupted run continues and a repeated one need not ask again; null: nowhere."""
    model: Texts | None = None
    """A model, or several, in place of `models`: `llmtrain eval FILE model=PATH`."""
    models: Models = []
    """What to evaluate; a path, or a mapping with more to say."""
    tasks: Tasks = []
    """What to run; a name, or a mapping with the number of examples. With a gauntlet, its tasks are run as well."""
    gauntlet: str | None = None
    """The name of a shipped gauntlet, or the path of one: averages over categories of tasks."""
    convention: Convention = "lm-eval"
    """Whose prompts, tokenisation and normalisation: `foundry` or `lm-eval`."""
    data_dir: str | None = None
    """A folder of local JSONL files, in place of the tasks' sources."""
    limit: PositiveInt | None = None
    """Evaluate only the first so many documents of each task (of each category); for a try, not for a result."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Of weights and activations; default: bfloat16 on a GPU, float32 on a CPU."""
    max_length: PositiveInt | None = None
    """Most tokens a model may read; default: what its config says."""
    max_batch_tokens: PositiveInt | None = None
    """Tokens read at a time, padding included. Results do not depend on it; memory does."""
    share_prefixes: bool = True
    """Read what requests begin with alike once. Results do not depend on it."""
    pmi: bool = True
    """Also ask for the scores of choices without their question, in tasks that say how; more work for one more metric."""
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
    """Reads and checks an eval YAML. overrides: `a.b=c`, applied in order.

    Raises ConfigError, which holds every problem; tasks and gauntlet are looked for too, but no data and no model.
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
        problems += _missing(run)
        problems += _unwritable(run) if needs_models else ()
    if problems or run is None:
        raise ConfigError(source.title, problems, source.origins)
    return run


def _missing(run: EvalRun) -> Iterator[Problem]:
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
    """Raises ConfigError, EvalError."""
    task = load_task(name, run.convention, run.data_dir)
    if task.metric not in _measured(run, task):
        raise EvalError(
            f"task {task.name}: its headline is {task.metric}, which `pmi: false` leaves out; set pmi: true"
        )
    return task


def _measured(run: EvalRun, task: Task) -> list[str]:
    return [name for name in task.config.metrics(run.convention) if run.pmi or name != "acc_pmi"]


@dataclass(frozen=True)
class Chosen:
    """A task with a number of examples. title: what results call it."""

    task: Task
    shots: int

    @property
    def title(self) -> str:
        return f"{self.task.name} ({self.shots}-shot)"


def chosen_tasks(run: EvalRun, gauntlet: Gauntlet | None) -> list[Chosen]:
    """In the order of the YAML, then of the gauntlet; each pair of task and shots once. Raises ConfigError, EvalError."""
    wanted = [(choice.task, choice.shots) for choice in run.tasks]
    wanted += [(name, [shots]) for name, shots in (gauntlet.benchmarks() if gauntlet else [])]
    made: dict[tuple[str, int], Chosen] = {}
    files: dict[str, Path] = {}
    for name, counts in wanted:
        task, file = _task(run, name), find_yaml(name, "tasks").resolve()
        if files.setdefault(task.name, file) != file:
            raise EvalError(f"{files[task.name]} and {file} are both called '{task.name}'; rename one of them")
        for shots in counts or task.shots:
            made.setdefault((task.name, shots), Chosen(task, shots))
    return list(made.values())
