"""Composer's lengths of time, `100ba`, `1ep`, `2e9tok`, `0.1dur`, as ours."""

import math
import re

from llmtrain.config.base import Duration
from llmtrain.convert.foundry.settings import Settings

_TIME = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([a-z]+)\s*")


def read_duration(text: object, batch_size: int | None) -> Duration | None:
    """A Composer time; a bare number is epochs, samples become steps of `batch_size`. None for one that ours cannot say."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return Duration(float(text), "epochs")
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if not match:
        return None
    value, unit = float(match[1].replace("_", "").replace(",", "")), match[2]
    if unit == "sp":
        return Duration(float(math.ceil(value / batch_size)), "steps") if batch_size else None
    if unit == "dur":
        return Duration(value, "fraction") if value <= 1 else None
    ours = {"ba": "steps", "tok": "tokens", "ep": "epochs"}.get(unit)
    return Duration(value, ours) if ours else None  # type: ignore[arg-type]


def take_duration(settings: Settings, key: str, batch_size: int | None, default: str | None = None) -> Duration | None:
    """The length under a key; None where there is none, with a note where it cannot be said."""
    value = settings.take(key, (str, int, float), default)
    if value is None:
        return None
    read = read_duration(value, batch_size)
    if read is None:
        settings.left(key, "is no length that ours has: steps, tokens, epochs or % of the run")
    return read


def same_length(a: Duration, b: Duration, tokens_per_step: int | None) -> bool:
    """True if two lengths are certainly equal."""
    return a == b or (None not in (x := in_steps(a, tokens_per_step), y := in_steps(b, tokens_per_step)) and x == y)


def in_steps(length: Duration, tokens_per_step: int | None) -> float | None:
    """Steps of a length, as far as they are known without data."""
    if length.unit == "steps":
        return length.value
    if length.unit == "tokens" and tokens_per_step:
        return math.ceil(length.value / tokens_per_step)
    return None
