"""Tuning tables as files: reading, with every mistake named, and writing. No torch here."""

from __future__ import annotations

import dataclasses
import importlib
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain.errors import UserError
from llmtrain.kernels.tuning import KERNELS, Row, Table

_HEADER = {"arch": str, "l2_budget": int, "rows": list}
_NEEDED = {"kernel", "dtype", "shape", "launch", "shared", "provenance"}
_OPTIONAL = {"seq_len", "variant"}
_MEASURED = {"device": str, "date": str, "commit": str, "ms": float}
_RATES = ("tflops", "gbps")
_DTYPES = ("bfloat16", "float16", "float32")
COMPILED_ONLY = "compiled only"


def load(file: Path, arch: str, own: bool = False) -> Table:
    """The table in `file`. own: a user's; it needs no l2_budget.

    Raises UserError with the file, the row and what is wrong with it.
    """
    import yaml

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the tuning table {file}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: a tuning table has the keys {', '.join(_HEADER)}")
    header: dict[str, Any] = {"l2_budget": 1} | content if own else content
    for name in header.keys() - _HEADER.keys():
        raise UserError(f"{file}: unknown key '{name}'; a tuning table has {', '.join(_HEADER)}")
    for name, kind in _HEADER.items():
        if not isinstance(header.get(name), kind):
            raise UserError(f"{file}: '{name}' must be a {kind.__name__}, not {header.get(name)!r}")
    if header["arch"] != arch:
        raise UserError(f"{file} holds rows for {header['arch']}, but this machine is {arch}; name another file")
    rows: dict[tuple[Any, ...], Row] = {}
    for number, fields in enumerate(header["rows"], 1):
        where = f"{file}: row {number}"
        row = _row(fields, where, own)
        if row.key in rows:
            raise UserError(f"{where}: a second row for {row.label}")
        rows[row.key] = row
    return Table(arch, header["l2_budget"], tuple(rows.values()))


def save(file: Path, arch: str, rows: list[Row], l2_budget: int | None = None) -> None:
    """Writes rows into `file`, in place of those with the same key; the rest and the comment at its top stay."""
    comment, kept, budget = "", {}, l2_budget
    if file.exists():
        text = file.read_text(encoding="utf-8")
        old = load(file, arch, own=l2_budget is None)
        lines = text.splitlines(keepends=True)
        top = next((i for i, line in enumerate(lines) if not line.startswith("#")), 0)
        comment, kept = "".join(lines[:top]), {row.key: row for row in old.rows}
        budget = old.l2_budget if "\nl2_budget:" in f"\n{text}" else None
    kept |= {row.key: row for row in rows}
    order = list(KERNELS)
    ordered = sorted(
        kept.values(), key=lambda r: (order.index(r.kernel), r.dtype, r.shape, r.variant or "", r.seq_len or 0)
    )
    head = f"arch: {arch}\n" + (f"l2_budget: {budget}\n" if budget else "")
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    aside.write_text(comment + head + "rows:\n" + "".join(map(dump_row, ordered)), encoding="utf-8")
    aside.replace(file)


def dump_row(row: Row) -> str:
    """As YAML, one line per field."""
    import yaml

    def flow(value: Any) -> str:
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
        return text.removesuffix("\n").removesuffix("\n...")

    fields: dict[str, Any] = {
        "kernel": row.kernel,
        "dtype": row.dtype,
        "shape": dict(zip(KERNELS[row.kernel].shape, row.shape, strict=True)),
        "seq_len": row.seq_len,
        "variant": row.variant,
        "launch": encode(row.launch),
        "shared": row.shared,
        "provenance": row.provenance if isinstance(row.provenance, str) else {"measured": dict(row.provenance)},
    }
    lines = [f"{name}: {flow(value)}\n" for name, value in fields.items() if value is not None]
    return "- " + "  ".join(lines)


def encode(launch: Any) -> dict[str, Any]:
    """A launch's fields that differ from their defaults, as plain data."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(launch):
        value = getattr(launch, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default:
            plain[field.name] = encode(value) if dataclasses.is_dataclass(value) else value
    return plain


def decode(kind: type, fields: Any, where: str) -> Any:
    """The dataclass `kind` from plain data. Raises UserError for unknown, missing and mistyped fields."""
    if not isinstance(fields, Mapping):
        raise UserError(f"{where}: expected the fields of a {kind.__name__}, not {fields!r}")
    known, hints = {field.name: field for field in dataclasses.fields(kind)}, typing.get_type_hints(kind)
    for name in fields.keys() - known.keys():
        raise UserError(f"{where}: {kind.__name__} has no '{name}'; it has {', '.join(known)}")
    made = {}
    for name, field in known.items():
        if name in fields:
            made[name] = _value(hints[name], fields[name], f"{where}: {name}")
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: '{name}' is missing")
    try:
        return kind(**made)
    except AssertionError as error:
        raise UserError(f"{where}: {error}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    option = next(option for option in options if option is not type(None))
    if dataclasses.is_dataclass(option):
        return decode(typing.cast(type, option), value, where)
    if typing.get_origin(option) is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{where} must be a mapping, not {value!r}")
        inner = typing.get_args(option)[1]
        return {str(name): _value(inner, each, f"{where}.{name}") for name, each in value.items()}
    if typing.get_origin(option) is typing.Literal:
        if value not in typing.get_args(option):
            raise UserError(f"{where} must be one of {', '.join(typing.get_args(option))}, not {value!r}")
        return value
    if type(value) is not option or (type(value) is int and value <= 0):
        raise UserError(f"{where} must be a {'positive ' * (option is int)}{option.__name__}, not {value!r}")
    return value


def _row(fields: Any, where: str, own: bool) -> Row:
    if not isinstance(fields, dict):
        raise UserError(f"{where}: expected a mapping, not {fields!r}")
    for name in fields.keys() - _NEEDED - _OPTIONAL:
        raise UserError(f"{where}: unknown field '{name}'; a row has {', '.join(sorted(_NEEDED | _OPTIONAL))}")
    for name in sorted(_NEEDED - fields.keys()):
        raise UserError(f"{where}: '{name}' is missing")
    kernel = fields["kernel"]
    if kernel not in KERNELS:
        raise UserError(f"{where}: no kernel '{kernel}'; there is {', '.join(KERNELS)}")
    where += f" ({kernel})"
    if fields["dtype"] not in _DTYPES:
        raise UserError(f"{where}: dtype must be one of {', '.join(_DTYPES)}, not {fields['dtype']!r}")
    names = KERNELS[kernel].shape
    shape = fields["shape"]
    if not isinstance(shape, dict) or set(shape) != set(names):
        raise UserError(f"{where}: shape must have {', '.join(names)}, not {shape!r}")
    sizes = {"shared": fields["shared"], "seq_len": fields.get("seq_len", 1), **shape}
    for name, size in sizes.items():
        if type(size) is not int or size < 0 or (size == 0 and name != "shared"):
            raise UserError(f"{where}: {name} must be a positive integer, not {size!r}")
    variant = fields.get("variant")
    if not isinstance(variant, str | None):
        raise UserError(f"{where}: variant must be a word, not {variant!r}")
    module, _, kind = KERNELS[kernel].launch.partition(":")
    launch = decode(getattr(importlib.import_module(module), kind), fields["launch"], f"{where}: launch")
    return Row(
        kernel,
        fields["dtype"],
        tuple(shape[name] for name in names),
        launch,
        fields["shared"],
        _provenance(fields["provenance"], where),
        fields.get("seq_len"),
        variant,
        own,
    )


def _provenance(value: Any, where: str) -> str | dict[str, Any]:
    if value == COMPILED_ONLY:
        return value
    measured = value.get("measured") if isinstance(value, dict) and len(value) == 1 else None
    rates = [name for name in _RATES if isinstance(measured, dict) and name in measured]
    if not isinstance(measured, dict) or measured.keys() != {*_MEASURED, *rates} or len(rates) != 1:
        wanted = f"{', '.join(_MEASURED)} and {' or '.join(_RATES)}"
        raise UserError(f"{where}: provenance must be '{COMPILED_ONLY}' or `measured:` with {wanted}, not {value!r}")
    for name in ("ms", rates[0]):
        if type(measured[name]) not in (int, float) or not measured[name] > 0:
            raise UserError(f"{where}: provenance: {name} must be a positive number, not {measured[name]!r}")
    # YAML reads a date, and a commit of digits alone, as something else than text.
    return {name: str(each) if _MEASURED.get(name) is str else each for name, each in measured.items()}
