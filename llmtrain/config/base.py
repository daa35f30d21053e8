"""Building blocks of the YAML's sections: strict sections, problems with a path, and durations.

Nothing under `llmtrain.config` or `llmtrain.schema` (nor `llmtrain.models.config`) imports torch, so that `llmtrain check`
needs less than a second.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from llmtrain.config.setting_texts import setting_texts
from llmtrain.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One error in a config, in the user's terms.

    path: dotted path of the setting, relative to the section that reports it.
    found: the value as the user wrote it.
    message: what is allowed or what to change, as a sentence fragment.
    """

    path: str
    found: Any
    message: str


class Section(BaseModel):
    """A mapping in the YAML. Unknown keys and coercions ("3" for 3) are errors.

    Rules between fields go into `problems()`, which yields every violation; it runs once
    the section's own fields have decoded.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        made = handler(schema)
        settings = handler.resolve_ref_schema(made)["properties"]
        for name, text in setting_texts(cls).items():
            if name in settings:
                settings[name].setdefault("description", text)
        return made

    def problems(self) -> Iterator[Problem]:
        yield from ()

    def problem_at(self, path: str, message: str) -> Problem:
        """A problem of the setting at a dotted path below this section, with the value that it has there."""
        found = functools.reduce(getattr, path.split("."), self)
        return Problem(path, str(found) if isinstance(found, Duration) else found, message)

    @model_validator(mode="after")
    def _report_problems(self):
        found = list(self.problems())
        if found:
            message = "; ".join(f"{p.path}: {p.message}" for p in found)
            # The full list travels in the context: one validator can raise only once.
            raise PydanticCustomError("rules", "{message}", {"message": message, "problems": found})
        return self


@dataclass(frozen=True)
class ByType:
    """Marks one section, or a union of sections distinguished by `type`, where a mapping without `type` means `default`.

    `Field(discriminator="type")` is the same where `type` must be written. by_name: in a YAML the name of a type alone means
    `{type: NAME}` (schema_tree.with_defaults).
    """

    default: str
    by_name: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sections = get_args(source)
        if not sections:
            return handler(source)
        choices = {
            name: handler.generate_schema(section)
            for section in sections
            for name in get_args(section.model_fields["type"].annotation)
        }
        return core_schema.tagged_union_schema(choices, discriminator=self.tag)

    def tag(self, value: Any) -> Any:
        """The `type` that a value is written for."""
        return value.get("type", self.default) if isinstance(value, dict) else getattr(value, "type", self.default)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        union = {**handler(schema), "default_type": self.default}
        return {"anyOf": [{"enum": list(schema["choices"])}, union]} if self.by_name else union


class OrOne:
    """Mark of a list that may also be written as its only entry: a value of one of `kinds`."""

    def __init__(self, *kinds: type) -> None:
        self.kinds = kinds

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: [value] if isinstance(value, self.kinds) else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        made = handler(schema)
        return {"anyOf": [*made["items"].get("anyOf", [made["items"]]), made]}


def free(default: Any = ..., **kwargs: Any) -> Any:
    """Declare a field that may change when a run is resumed, because it does not alter what is learned."""
    extra: dict[str, Any] = {"resume": "free"}
    if isinstance(default, type) or (callable(default) and default is not ...):
        return Field(default_factory=default, json_schema_extra=extra, **kwargs)
    return Field(default, json_schema_extra=extra, **kwargs)


def setting_error(message: str) -> PydanticCustomError:
    """The error of a type's own validator. message: what is allowed, in the user's terms; the value found is added to it."""
    return PydanticCustomError("setting", "{message}", {"message": message})


Unit = Literal["steps", "tokens", "epochs", "fraction"]
_DURATION = re.compile(r"^\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*(steps?|tokens?|epochs?|%)\s*$")
_MOST = {"steps": 1e10, "tokens": 1e18, "epochs": 1e6}


@dataclass(frozen=True)
class Duration:
    """A length of training: `300 steps`, `26e9 tokens`, `2 epochs` or `5 %` of the run."""

    value: float
    unit: Unit

    @classmethod
    def parse(cls, text: Any) -> Duration:
        if isinstance(text, Duration):
            return text
        match = _DURATION.match(text) if isinstance(text, str) else None
        if not match:
            raise setting_error("expected a number and a unit: '300 steps', '26e9 tokens', '2 epochs' or '5 %'")
        number = float(match[1].replace("_", ""))
        if match[2] == "%":
            if number > 100:
                raise setting_error("a percentage lies between 0 and 100")
            return cls(number / 100, "fraction")
        unit = match[2].rstrip("s") + "s"
        if number > _MOST[unit]:
            raise setting_error(f"expected at most {_MOST[unit]:g} {unit}")
        if unit in ("steps", "tokens") and number != int(number):
            raise setting_error(f"expected a whole number of {unit}")
        return cls(number, unit)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.unit == "fraction":
            return f"{self.value * 100:g} %"
        return f"{int(self.value) if self.value == int(self.value) else self.value} {self.unit}"

    def steps(self, *, tokens_per_step: int, steps_per_epoch: int | None, total_steps: int | None) -> int:
        """This duration in optimizer steps (at least 0), rounded up for tokens, to nearest for fractions."""
        if self.unit == "steps":
            return int(self.value)
        if self.unit == "tokens":
            return -(-int(self.value) // tokens_per_step)
        if self.unit == "epochs":
            if steps_per_epoch is None:
                raise UserError(f"'{self}' needs the length of an epoch, which is not known here; give steps or tokens")
            return round(self.value * steps_per_epoch)
        if total_steps is None:
            raise UserError(f"'{self}' needs the length of the run, which is not known here; give steps or tokens")
        return round(self.value * total_steps)


DurationField = Annotated[
    Duration,
    BeforeValidator(Duration.parse),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _DURATION.pattern, "examples": ["300 steps", "26e9 tokens", "5 %"]}),
]


def _refuse_zero_in_fp32(value: float) -> float:
    if 0 < value < 1e-30:
        raise setting_error("is as good as 0 in fp32, in which training computes")
    return value


# Types of numbers, by what they count. Their upper bounds lie where nonsense begins, far above what anybody trains.
PositiveInt = Annotated[int, Field(gt=0, le=2**24)]
"""Tokens of a sequence or vocabulary; samples, sequences or steps."""
Width = Annotated[int, Field(gt=0, le=2**17)]
"""Channels, heads, ranks or states of a layer."""
Processes = Annotated[int, Field(gt=0, le=1024)]
ByteCount = Annotated[int, Field(gt=0, lt=2**63)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e6), AfterValidator(_refuse_zero_in_fp32)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e6)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]


def _whole_number(value: Any) -> Any:
    """5000000000 for 5e9, which YAML reads as a float; any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


PositiveTokens = Annotated[int, BeforeValidator(_whole_number), Field(gt=0, le=10**18)]
Tokens = Annotated[int, BeforeValidator(_whole_number), Field(ge=0, le=10**18)]
"""Numbers of tokens, also written 5e9."""


def parse_share(value: Any) -> Any:
    """The number of `0.1 %`; any other value as it is, for the type to judge."""
    if not isinstance(value, str):
        return value
    try:
        return float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        raise setting_error("expected a share such as 0.001 or '0.1 %'") from None


Share = Annotated[
    float,
    Field(ge=0, le=1),
    BeforeValidator(parse_share),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.]+\s*%$", "examples": ["0.1 %"]},
            ]
        }
    ),
]
Probability = Annotated[float, Field(ge=0, lt=1)]
