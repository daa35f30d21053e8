"""Launch parameters of kernels: dataclasses that pydantic validates when they are read, and their text. No torch here."""

import dataclasses
import functools
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from llmtrain.errors import UserError

Count = Annotated[int, Field(gt=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
MOST_WARPS = 32
"""Warps of the largest thread block of CUDA, 1,024 threads."""
LEAST_SIDE = 16
"""Shortest side of a matrix product in Triton."""


def _check_warps(count: int) -> int:
    if count & (count - 1) or count > MOST_WARPS:
        raise UserError(f"num_warps must be a power of two from 1 to {MOST_WARPS}, not {count}")
    return count


def _check_power(size: int) -> int:
    if size & (size - 1):
        raise UserError(f"expected a power of two, not {size}")
    return size


def _check_side(size: int) -> int:
    if size < LEAST_SIDE or size & (size - 1):
        raise UserError(f"expected a power of two from {LEAST_SIDE} on, not {size}")
    return size


def _check_triton_options(options: dict[str, int]) -> dict[str, int]:
    if "num_warps" in options:
        _check_warps(options["num_warps"])
    return options


Power = Annotated[Count, AfterValidator(_check_power)]
"""Side of a tile, as Triton's ranges have."""
Side = Annotated[Count, AfterValidator(_check_side)]
"""Side of a tile that is multiplied."""
Warps = Annotated[Count, AfterValidator(_check_warps)]
"""Warps of a program, as many as Triton takes."""
TritonOptions = Annotated[dict[str, Count], AfterValidator(_check_triton_options)]
"""Launch options of Triton by name, such as num_warps."""

# Names of parameters in tables written before 2026-11-23, and what they are called now, by the dataclass that has them.
RENAMED: dict[str, tuple[str, ...]] = {
    "warps": ("num_warps",),
    "stages": ("num_stages",),
    "described": ("use_tma",),
    "registers": ("maxnreg",),
    "merged": ("single_loop",),
    "columns": ("block_headdim", "block_columns"),
    "rows": ("block_dstate", "block_rows"),
    "share": ("programs_per_sm",),
    "programs": ("programs_per_sm",),
    "run": ("run_tokens", "max_tiles"),
    "walkers": ("parallel_runs",),
    "group": ("step_tokens",),
    "channels": ("block_channels",),
    "ahead": ("prefetch",),
    "again": ("reload",),
    "tokens": ("block_tokens",),
    "heads": ("block_heads",),
    "chunk": ("chunk_size",),
    "chunk_backward": ("chunk_size_bwd",),
    "walk": ("sequential_scan",),
    "pair": ("sequential_scan_shared_sm",),
    "scan": ("chunk_scan",),
    "passing": ("state_passing",),
    "both": ("state_passing_bwd",),
    "wide": ("state_passing_bwd_wide",),
    "pairs": ("intra_chunk_bwd",),
    "halves": ("intra_chunk_halves_bwd",),
    "states": ("inter_chunk_bwd",),
    "half": ("fp16_states",),
    "precision": ("input_precision",),
    "processors": ("num_sms",),
}


class Options:
    """Base of all dataclasses of launch parameters.

    An operator takes them as text, so a compiled graph holds how its kernels run, the same on every rank.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def dump(self) -> str:
        """JSON of the fields that differ from their defaults: equal parameters have equal texts."""
        return json.dumps(encode(self), sort_keys=True)

    def refusal(self, kernel: str, arch: str, shape: Mapping[str, int]) -> str | None:
        """Reason why no kernel computes rightly by these parameters in a row of `kernel` for `arch` and `shape`, or None."""
        return None

    @classmethod
    def parse(cls, dumped: str) -> Self:
        """The inverse of `dump`. Raises UserError that names the wrong field. Cached."""
        return _parse(cls, dumped)


@functools.cache
def _parse(kind: type, dumped: str) -> Any:
    return decode(kind, json.loads(dumped), "launch")


def encode(launch: Any) -> dict[str, Any]:
    """The fields of a launch that differ from their defaults, as plain data."""
    return _adapter(type(launch)).dump_python(launch, exclude_defaults=True)


def decode(kind: type, fields: Any, where: str) -> Any:
    """The dataclass `kind` from plain data. Raises UserError with a line for every mistake, each beginning with `where`."""
    try:
        return _adapter(kind).validate_python(fields)
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: {text}" for text in _mistakes(kind, error))) from None


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _mistakes(kind: type, error: ValidationError) -> Iterator[str]:
    renamed_to: set[tuple[Any, ...]] = set()  # where a field is missing because the old name stands there
    for one in sorted(error.errors(), key=lambda one: one["type"] == "missing"):
        *path, name = one["loc"] or ("",)
        if one["loc"] in renamed_to:
            continue
        before = "".join(f"{part}: " for part in path)
        owner = _class_at(kind, path)
        if one["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            known = [field.name for field in dataclasses.fields(owner)]
            now = next((new for new in RENAMED.get(str(name), ()) if new in known), None)
            renamed_to.add((*path, now))
            renamed = f" ('{name}' is now called '{now}')" if now else ""
            yield f"{before}{owner.__name__} has no '{name}'{renamed}; it has {', '.join(known)}"
        elif one["type"] == "dataclass_type":
            inside = f"{before}{name}: " if name else ""
            yield f"{inside}expected the fields of a {_class_at(kind, one['loc']).__name__}, not {one['input']!r}"
        else:
            yield before + mistake(str(name), one)


def mistake(name: str, error: Mapping[str, Any]) -> str:
    """A sentence about one field from an entry of pydantic's `errors()`."""
    kinds = {
        "int": "a positive integer",
        "greater_than": "a positive integer",
        "greater_than_equal": "at least 0",
        "bool": "a bool",
        "dict": "a mapping",
        "string": "text",
    }
    what = kinds.get(error["type"], kinds.get(error["type"].partition("_")[0], error["msg"]))
    if error["type"] == "missing":
        return f"'{name}' is missing"
    if error["type"] == "literal_error":
        what = f"one of {error['ctx']['expected'].replace(' or ', ', ')}".replace("'", "")
    elif error["type"] in ("value_error", "assertion_error"):
        reason = str(error["ctx"]["error"])
        return f"{name}: {reason}" if reason.startswith("expected") else reason
    return f"{name} must be {what}, not {error['input']!r}"


def _class_at(kind: type, path: Any) -> type:
    """The dataclass that stands at a path of field names."""
    for name in path:
        hint = typing.get_type_hints(kind).get(str(name))
        found = [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]
        if not found:
            break
        kind = typing.cast(type, found[0])
    return kind
