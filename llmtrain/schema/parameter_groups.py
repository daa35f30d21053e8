"""Learning rate and weight decay of each parameter, by `optimizer.groups`. No torch here: the names come from a model."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from llmtrain.config.base import Problem
from llmtrain.errors import UserError
from llmtrain.schema.optimizers import OptimizerSection, ParameterGroup


class NamedParameter(Protocol):
    """The part of models.parameters.ParameterInfo that is needed here."""

    @property
    def name(self) -> str: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def decay(self) -> bool: ...


@dataclass(frozen=True)
class ParameterSettings:
    """lr: the peak. matched: patterns of the entries that match the parameter, in order."""

    lr: float
    weight_decay: float
    matched: tuple[str, ...] = ()


def parameter_settings(
    config: OptimizerSection, parameters: Iterable[NamedParameter], whole: bool = True
) -> dict[str, ParameterSettings]:
    """Settings of every trained parameter by name. Raises UserError for entries that `group_problems` reports of a whole model."""
    parameters = [parameter for parameter in parameters if parameter.trainable]
    if whole and (problems := list(group_problems(config, parameters))):
        raise UserError("\n".join(f"{problem.path} = {problem.found}: {problem.message}" for problem in problems))
    found = {}
    for parameter in parameters:
        name, lr, decay = parameter.name, config.lr, config.weight_decay if parameter.decay else 0.0
        matched = [group for group in config.groups if fnmatchcase(name, group.match)]
        for group in matched:
            if group.lr is not None:
                lr = group.lr
            elif group.lr_factor is not None:
                lr = group.lr_factor * config.lr
            if group.weight_decay is not None:
                decay = group.weight_decay
        found[name] = ParameterSettings(lr, decay, tuple(group.match for group in matched))
    return found


def group_problems(config: OptimizerSection, parameters: Iterable[NamedParameter]) -> Iterator[Problem]:
    """Entries that match no trained parameter, or of which later ones replace every setting."""
    parameters = list(parameters)
    names = [parameter.name for parameter in parameters if parameter.trainable]
    trained = "" if len(names) == len(parameters) else "trained "
    matches = [{name for name in names if fnmatchcase(name, group.match)} for group in config.groups]
    for i, (group, matched) in enumerate(zip(config.groups, matches, strict=True)):
        if not matched:
            examples = ", ".join(names[:3])
            yield Problem(
                f"optimizer.groups.{i}.match",
                group.match,
                f"matches no {trained}parameter of the model, whose names are such as {examples}; `*` stands for any characters",
            )
            continue
        for setting in _settings(group):
            later = [
                other
                for other, entry in zip(matches[i + 1 :], config.groups[i + 1 :], strict=True)
                if setting in _settings(entry)
            ]
            if matched <= set().union(*later):
                yield Problem(
                    f"optimizer.groups.{i}.match",
                    group.match,
                    f"has no effect on {setting}: later entries give another for all that matches; put the general entry first",
                )


def _settings(group: ParameterGroup) -> list[str]:
    found = ["lr"] if group.lr is not None or group.lr_factor is not None else []
    return found + (["weight_decay"] if group.weight_decay is not None else [])
