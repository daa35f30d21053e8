"""Models and tasks as the YAML of `llmtrain eval` names them. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from llmtrain.config.base import OrOne, PositiveInt, Section, setting_error
from llmtrain.config.texts import PathText, path_problem
from llmtrain.eval.tasks.sections import Shots
from llmtrain.schema.adapt import WeightFormat


class _OrText:
    """JSON schema of a section that may also be written as a string, the value of one key."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


def _from_text(key: str) -> BeforeValidator:
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def _template_setting(value: Any) -> bool | str:
    if not isinstance(value, bool | str):
        raise setting_error("expected true, false or the path of a Jinja file")
    if isinstance(value, str) and (reason := path_problem(value)):
        raise setting_error(reason)
    return value


TemplateSetting = Annotated[bool | str, BeforeValidator(_template_setting)]


class ModelChoice(Section):
    """A model to evaluate; a string is its path."""

    path: PathText
    """A run's folder (its newest checkpoint), a checkpoint, either also in a store (s3://bucket/prefix), or a folder or hub
    name in Hugging Face format."""
    name: str | None = None
    """Name in results; default: the last part of the path (of a checkpoint, its run's and its own)."""
    tokenizer: PathText | None = None
    """A folder, tokenizer.json or hub name; default: the model's own."""
    backend: Literal["auto", "llmtrain", "transformers"] = "auto"
    """transformers: as AutoModelForCausalLM loads it. auto: llmtrain's own model wherever it can be read as one."""
    max_length: PositiveInt | None = None
    """Most tokens it may read; default: the run's setting, or that of its config."""
    chat_template: TemplateSetting | None = None
    """As the run's setting, for this model."""
    system_instruction: str | None = None
    """As the run's setting, for this model."""
    fewshot_as_multiturn: bool | None = None
    """As the run's setting, for this model."""
    weights: WeightFormat | None = None
    """As the run's setting, for this model. Its default name ends in -int8 or -float8."""
    ema: bool = False
    """The moving average of its weights, which a run with train.ema keeps. Its default name ends in -ema."""
    adapter: PathText | None = None
    """Adapters beside its weights: a folder of peft's, or a run of adapters. Its default name ends in theirs."""

    @property
    def title(self) -> str:
        own = f"{self._last_part}+{Path(self.adapter).name}" if self.adapter else self._last_part
        return self.name or own + "-ema" * self.ema + (f"-{self.weights}" if self.weights else "")

    @property
    def _last_part(self) -> str:
        path = Path(self.path)
        inside = path.name.startswith("step-") and path.parent.name == "checkpoints"
        return f"{path.parents[1].name}/{path.name}" if inside else path.name or self.path


class TaskChoice(Section):
    """A task to run; a string is its name."""

    task: PathText
    """The name of a shipped task, or the path of a task's YAML, ours or lm-evaluation-harness's; or a name, group, tag or
    pattern (mmlu_*) of the installed lm-evaluation-harness and of lm_eval_folders, with lm_eval: before it where a shipped task
    has that name too."""
    shots: Shots | None = None
    """Numbers of few-shot examples; default: the task's own."""


Models = list[Annotated[ModelChoice, _from_text("path"), _OrText()]]


def _check_kind(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict | list):
        raise setting_error("expected a path, a mapping with path, or a list of these")
    return value


ModelOrModels = Annotated[Models, OrOne(str, dict), BeforeValidator(_check_kind)]
Tasks = list[Annotated[TaskChoice, _from_text("task"), _OrText()]]
