"""The YAML of `llmtrain eval`: models, tasks and convention. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from llmtrain.config.base import OrOne, PositiveInt, Problem, Section
from llmtrain.config.config_type import check_config_type
from llmtrain.config.decode import decode
from llmtrain.config.interpolation import resolve
from llmtrain.config.output_folder import unwritable_reason
from llmtrain.config.overrides import apply_override
from llmtrain.config.regular_file import read_bytes
from llmtrain.config.report import ConfigError
from llmtrain.config.shipped import config_title, find_config
from llmtrain.config.texts import LocalPath, PathText, RunName
from llmtrain.config.yaml_source import YamlSource, read_file
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.errors import first_few
from llmtrain.eval.choices import ModelChoice, ModelOrModels, Models, Tasks, TemplateSetting
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.groups import Group, GroupRun, Leaf, leaves
from llmtrain.eval.lm_eval.task import make_task
from llmtrain.eval.native_task import load_task
from llmtrain.eval.prompts.chat import PromptStyle, chat_template
from llmtrain.eval.report.gauntlet import Gauntlet, check_metric, load_gauntlet
from llmtrain.eval.task import Task
from llmtrain.eval.task_names import Named, TaskNames, is_lm_eval_file
from llmtrain.eval.tasks.config import Convention
from llmtrain.eval.tasks.load import find_yaml
from llmtrain.eval.tasks.sections import Shots
from llmtrain.schema.adapt import WeightFormat
from llmtrain.schema.wandb import WandbConfig

Paths = Annotated[list[PathText], OrOne(str)]
ShotCounts = Annotated[Shots, OrOne(int)]
_STYLE = ("chat_template", "system_instruction", "fewshot_as_multiturn")


class EvalRun(Section):
    """One run of `llmtrain eval`."""

    name: RunName = "eval"
    """Name of the run."""
    out: LocalPath = "results/${name}"
    """The folder of results."""
    cache: LocalPath | None = "${out}/cache"
    """Folder of stored responses, with which an interrupted run continues and a repeated one needs no model; null: none."""
    models: Models = []
    """Models to evaluate: paths, or mappings with further settings."""
    model: ModelOrModels | None = None
    """A model, or several, in place of `models`: `llmtrain eval FILE model=PATH`. Each is written as in `models`."""
    tasks: Tasks = []
    """Tasks to run: names, or mappings with the numbers of examples. With a gauntlet, its tasks are run as well."""
    shots: ShotCounts | None = None
    """Numbers of few-shot examples of all `tasks`, in place of their own: `5`, or `[0, 5]`. A gauntlet's tasks keep theirs."""
    gauntlet: PathText | None = None
    """The name of a shipped gauntlet, or the path of one: averages over categories of tasks."""
    lm_eval_folders: Paths = []
    """Folders of lm-evaluation-harness's task files, beside those of an installed one, which they replace by name."""
    allow_code: Paths = []
    """Folders whose Python files the tasks of lm-evaluation-harness may run (`!function`)."""
    convention: Convention = "lm-eval"
    """Convention of prompts, tokenisation and normalisation: `foundry` or `lm-eval`."""
    chat_template: TemplateSetting = False
    """Prompts as the turns of a chat: true, in the template of the model's tokenizer; or the path of a Jinja file. As
    lm-evaluation-harness applies it, so for convention lm-eval. The texts of perplexity tasks stay as they are."""
    system_instruction: str = ""
    """Text of the system's turn, before a task's preamble; without a chat template, the beginning of the prompt."""
    fewshot_as_multiturn: bool = True
    """With a chat template, few-shot examples are turns of their own; false: one user turn has all examples and the question."""
    data_dir: PathText | None = None
    """A folder of local JSONL files, in place of the tasks' sources."""
    limit: PositiveInt | None = None
    """Number of documents of each task (of each category) to evaluate, the first ones; for trials, not for results."""
    skip_bad_documents: bool = False
    """Leave out documents that cannot be used (a record that is no JSON or lacks a field, a choice without a token of its own, a
    continuation too long for the model), and say how many in every report. Otherwise a task with such a document fails."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type of weights and activations; default: bfloat16 on a GPU, float32 on a CPU."""
    weights: WeightFormat | None = None
    """Format of linear layers' weights, in 8 bits; default: `dtype`."""
    max_length: PositiveInt | None = None
    """Most tokens a model may read; default: that of its config."""
    max_batch_tokens: PositiveInt | None = None
    """Tokens read at a time, padding included. Results do not depend on it; memory does."""
    share_prefixes: bool = True
    """Read a prefix that several requests share once. Results do not depend on it."""
    pmi: bool = True
    """Also score the choices after the premise alone, in tasks with `pmi`; more work for one more metric."""
    wandb: WandbConfig | None = None
    """Log the results to Weights & Biases."""

    def chosen_models(self) -> list[ModelChoice]:
        return list(self.models if self.model is None else self.model)

    def prompt_style(self, tokenizer: TextTokenizer, model: ModelChoice | None = None) -> PromptStyle:
        """The model's prompts: plain text or a chat template. Raises EvalError for a template that cannot be used."""
        own = model.model_dump(include=set(_STYLE), exclude_none=True) if model else {}
        template, system, multiturn = ({name: getattr(self, name) for name in _STYLE} | own).values()
        return PromptStyle(chat_template(tokenizer, template), system, multiturn)

    def problems(self) -> Iterator[Problem]:
        if not self.tasks and self.gauntlet is None:
            yield Problem("tasks", None, "there is nothing to run; name tasks, or a gauntlet")
        if not self.tasks and self.gauntlet is not None and self.shots is not None:
            yield Problem("shots", None, "a gauntlet says with how many shots its tasks run; name `tasks` for others")
        titles = [model.title for model in self.chosen_models()]
        for title in sorted({title for title in titles if titles.count(title) > 1}):
            yield Problem("models", title, "two models have this name; give each a `name` of its own")


def load_eval_run(path: str | Path | None, overrides: Sequence[str] = (), *, needs_models: bool = True) -> EvalRun:
    """Read and check an eval YAML, given by path or by name (`llmtrain.config.shipped`). overrides: `a.b=c`, in order, which are
    all there is where path is None.

    Raises ConfigError that lists every problem. Tasks and gauntlet are loaded too, data and models are not.
    """
    source = YamlSource("llmtrain eval", {}) if path is None else _read(path)
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
        problems += _folder_problems(run) or _task_problems(run)
        problems += _style_problems(run)
        problems += _unwritable(run) if needs_models else ()
    if problems or run is None:
        raise ConfigError(source.title, problems, source.origins)
    return run


def _folder_problems(run: EvalRun) -> list[Problem]:
    return [
        Problem(key, folder, "is a file; name its folder" if Path(folder).is_file() else "no such folder")
        for key in ("lm_eval_folders", "allow_code")
        for folder in getattr(run, key)
        if not Path(folder).expanduser().is_dir()
    ]


def _read(path: str | Path) -> YamlSource:
    file = find_config(path)
    if file.is_file() and not read_bytes(file).strip():
        raise ConfigError(str(path), [Problem("", None, "is empty; it needs tasks, or a gauntlet")])
    source = read_file(file)
    source.title = config_title(path)
    check_config_type(source, "evaluation")
    return source


def _task_problems(run: EvalRun) -> Iterator[Problem]:
    names = TaskNames(run.lm_eval_folders)
    sources: dict[str, Path | Leaf] = {}
    refused: dict[str, str] = {}
    for number, choice in enumerate(run.tasks):
        try:
            for task, source in _tasks(run, names.find(choice.task)):
                _check_same(task.name, sources.setdefault(task.name, source), source)
                if any(run.shots or ()) and (reason := _keeps_no_examples(task, source)):
                    refused[task.name] = f"task {task.name}: {reason}"
        except EvalError as error:
            yield Problem(f"tasks.{number}", None, str(error))
    yield from (Problem("shots", None, reason) for reason in refused.values())
    if run.gauntlet is not None:
        try:
            gauntlet = load_gauntlet(run.gauntlet)
            for group in gauntlet.categories.values():
                for benchmark in group:
                    task = _task(run, _of_gauntlet(names, benchmark.task))
                    check_metric(gauntlet, benchmark, task.metric, task.measured(run.pmi))
        except EvalError as error:
            yield Problem("gauntlet", None, str(error))


def _of_gauntlet(names: TaskNames, text: str) -> Path | Leaf:
    """One task by the name or path that a gauntlet has. Raises EvalError for a group."""
    file = find_yaml(text, "tasks")
    [found] = names.find(str(file)) if is_lm_eval_file(file) else [file]
    if isinstance(found, Group):
        raise EvalError(f"{file}: is a group; a gauntlet names its tasks, each with its baseline")
    return found


def gauntlet_task_name(run: EvalRun, text: str) -> str:
    """Name in results of the task that a gauntlet names so."""
    return _task(run, _of_gauntlet(TaskNames(run.lm_eval_folders), text)).name


def _keeps_no_examples(task: Task, source: Path | Leaf) -> str | None:
    """Reason why `shots` cannot give a task few-shot examples; None if it can."""
    if task.without_examples:
        return f"{task.without_examples} has no few-shot examples"
    if isinstance(source, Leaf) and source.settings.get("num_fewshot") == 0:
        return (
            "its num_fewshot is 0, which lm-evaluation-harness keeps whatever number is asked for; evaluate it apart, or give it "
            f"examples all the same by an entry of its own in a YAML: {{task: {task.name}, shots: [5]}}"
        )
    return None


def _style_problems(run: EvalRun) -> Iterator[Problem]:
    sections = [("", run), *((f"models.{number}.", choice) for number, choice in enumerate(run.models))]
    for place, section in sections:
        if run.convention != "lm-eval":
            for name in ("chat_template", "system_instruction"):
                if value := getattr(section, name):
                    yield Problem(place + name, value, f"convention {run.convention} has none; set convention: lm-eval")
        elif isinstance(file := section.chat_template, str) and not Path(file).expanduser().is_file():
            yield Problem(f"{place}chat_template", file, "there is no such file; expected true, false or a Jinja file")


def _unwritable(run: EvalRun) -> Iterator[Problem]:
    for name, folder in (("out", run.out), ("cache", run.cache)):
        if folder is not None and (reason := unwritable_reason(folder)):
            yield Problem(name, folder, reason)


def _tasks(run: EvalRun, found: Sequence[Named]) -> list[tuple[Task, Path | Leaf]]:
    """Tasks, with what they are made from. Raises EvalError with the reasons of those that cannot run."""
    sources = [leaf for one in found for leaf in ([one] if isinstance(one, Path) else leaves(one))]
    made: list[tuple[Task, Path | Leaf]] = []
    reasons: list[str] = []
    for source in sources:
        try:
            made.append((_task(run, source), source))
        except EvalError as error:
            reasons.append(str(error))
    if reasons:
        some = first_few(reasons, 5, "\n    ")
        raise EvalError(
            some if len(sources) == 1 else f"{len(reasons)} of {len(sources)} tasks cannot run:\n    {some}"
        )
    return made


def _task(run: EvalRun, source: Path | Leaf) -> Task:
    """Load a task. Raises ConfigError or EvalError, also for a headline metric that `pmi: false` leaves out."""
    if isinstance(source, Leaf):
        if run.convention != "lm-eval":
            raise EvalError(
                f"task {source.name}: {source.file} is a file of lm-evaluation-harness, which says how its prompts are "
                f"written and scored; it has no convention {run.convention}"
            )
        data_dir = None if run.data_dir is None else Path(run.data_dir).expanduser()
        code = [Path(folder).expanduser() for folder in run.allow_code]
        task = make_task(source.settings, source.file, data_dir=data_dir, allow_code=code)
    else:
        task = load_task(source, run.convention, run.data_dir)
    if task.metric not in task.measured(run.pmi):
        raise EvalError(
            f"task {task.name}: its headline is {task.metric}, which `pmi: false` leaves out; set pmi: true"
        )
    return task


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
    names = TaskNames(run.lm_eval_folders)
    wanted: list[tuple[Sequence[Named], list[int] | None]] = [
        (names.find(choice.task), run.shots or choice.shots) for choice in run.tasks
    ]
    wanted += [([_of_gauntlet(names, name)], [shots]) for name, shots in (gauntlet.benchmarks() if gauntlet else [])]
    made: dict[tuple[str, int], TaskRun] = {}
    sources: dict[str, Path | Leaf] = {}
    for found, counts in wanted:
        for task, source in _tasks(run, found):
            _check_same(task.name, sources.setdefault(task.name, source), source)
            for shots in counts or task.shots:
                made.setdefault((task.name, shots), TaskRun(task, shots))
    return list(made.values())


def _check_same(name: str, first: Path | Leaf, second: Path | Leaf) -> None:
    """Check that two tasks of one name are one, but for their shots. Raises EvalError."""
    files = [one.resolve() if isinstance(one, Path) else one.file.resolve() for one in (first, second)]
    if files[0] != files[1]:
        raise EvalError(f"{files[0]} and {files[1]} are both called '{name}'; rename one of them, or run them apart")
    if isinstance(first, Leaf) and isinstance(second, Leaf):
        keys = (first.settings.keys() | second.settings.keys()) - {"num_fewshot"}
        if differ := sorted(key for key in keys if first.settings.get(key) != second.settings.get(key)):
            raise EvalError(
                f"task {name} is asked for twice, with another {', '.join(differ)} in one of its groups; evaluate the groups "
                "in runs of their own"
            )


def group_runs(run: EvalRun) -> list[GroupRun]:
    """Groups of lm-evaluation-harness among the tasks; one that is within another is not listed by itself as well."""
    names = TaskNames(run.lm_eval_folders)
    made: dict[tuple[str, int | None], GroupRun] = {}
    for choice in run.tasks:
        for one in names.find(choice.task):
            for shots in run.shots or choice.shots or [None]:
                if isinstance(one, Group):
                    made.setdefault((one.name, shots), GroupRun(one, shots))
    within = {
        (child.name, shots)
        for (_, shots), one in made.items()
        for child in one.group.groups()
        if child is not one.group
    }
    return [one for key, one in made.items() if key not in within]
