"""Tasks of a run that cannot be evaluated, while the others can."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from llmtrain.errors import UserError
from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.metrics import Failure
from llmtrain.eval.scoring.data_parallel import DataParallel

Made = TypeVar("Made")


class Failures:
    """Failures by model and title of the task. models: titles of all models of the run."""

    def __init__(self, models: Sequence[str]):
        self._models = list(models)
        self._reasons: dict[tuple[str, str], str] = {}

    def add(self, title: str, error: UserError, models: Sequence[str] | None = None) -> None:
        """Add the failure of a task for these models, or for all."""
        for model in self._models if models is None else models:
            self._reasons.setdefault((model, title), str(error))

    def attempt(
        self, titles: Sequence[str], make: Callable[[], Made], models: Sequence[str] | None = None
    ) -> Made | None:
        """Return make(), or None where it raises a UserError: tasks of these titles have then failed."""
        try:
            return make()
        except UserError as error:
            for title in titles:
                self.add(title, error, models)
            return None

    def agree(self, ranks: DataParallel) -> None:
        """Take over the failures of all ranks, so that each has the same."""
        merged: dict[tuple[str, str], str] = {}
        for reasons in ranks.all_gather(self._reasons):
            merged = {**reasons, **merged}
        self._reasons = merged

    def has(self, model: str, title: str) -> bool:
        return (model, title) in self._reasons

    def listed(self) -> list[Failure]:
        """One failure for each task and reason, in the order in which they were found."""
        found: dict[tuple[str, str], list[str]] = {}
        for (model, title), reason in self._reasons.items():
            found.setdefault((title, reason), []).append(model)
        return [Failure(title, reason, models) for (title, reason), models in found.items()]


def failure_line(failure: Failure) -> str:
    return f"{failure.title}, {', '.join(failure.models)}: not evaluated: {failure.reason}"


def failed_tasks(failures: Sequence[Failure]) -> EvalError:
    """Error that lists them all; the reasons alone, where all tasks have the same."""
    reasons = list(dict.fromkeys(one.reason for one in failures))
    return EvalError(reasons[0] if len(reasons) == 1 else "\n".join(failure_line(one) for one in failures))
