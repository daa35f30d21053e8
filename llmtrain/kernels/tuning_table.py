"""Tables of launch parameters, one file per architecture: the model of a row, reading and writing. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from llmtrain.config.output_folder import replace_file
from llmtrain.errors import UserError
from llmtrain.kernels import row_tiles
from llmtrain.kernels.attention import triton_launch as attention
from llmtrain.kernels.conv1d import triton_launch as conv1d
from llmtrain.kernels.gated_norm import triton_launch as gated_norm
from llmtrain.kernels.kimi_delta import triton_launch as kimi_delta
from llmtrain.kernels.options import Count, Options, decode, encode, mistake
from llmtrain.kernels.platform import DTYPES
from llmtrain.kernels.rotary import triton_launch as rotary
from llmtrain.kernels.ssd import triton_launch as ssd

COMPILED_ONLY = "compiled only"
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 4 << 20, 200_000, 32
"""Largest file, most values (an alias counts as what it stands for) and deepest nesting that are read."""
_MEASURED = {"device": str, "date": str, "commit": str, "ms": float}
_RATES = ("tflops", "gbps")


@plain_dataclass(frozen=True)
class Kernel:
    """Kind of a kernel's rows. shape: names of its sizes; launch: the dataclass of its parameters; searched: by `llmtrain bench
    tune` of its operation."""

    shape: tuple[str, ...]
    launch: type[Options]
    searched: bool = True


KERNELS: dict[str, Kernel] = {
    "attention.forward": Kernel(("head_dim",), attention.Launch),
    "attention.dq": Kernel(("head_dim",), attention.Launch),
    "attention.dkdv": Kernel(("head_dim",), attention.Launch),
    # In place of dq and dkdv, for the very shapes and variants that have a row.
    "attention.dscores": Kernel(("head_dim",), attention.StoredLaunch, searched=False),
    # Of products in float8; dtype: of queries, keys and values.
    "attention.float8_forward": Kernel(("head_dim",), attention.Launch, searched=False),
    "attention.float8_dq": Kernel(("head_dim",), attention.Launch, searched=False),
    "attention.float8_dkdv": Kernel(("head_dim",), attention.Launch, searched=False),
    # All kernels of a scan: they share chunks of one size.
    "ssd": Kernel(("head_dim", "d_state"), ssd.Launch),
    # Channels are in no key: a program does the same for any number of them.
    "conv1d.forward": Kernel(("width",), conv1d.Tile),
    "conv1d.backward": Kernel(("width",), conv1d.Tile),
    "gated_norm.forward": Kernel(("group_size",), gated_norm.Tile),
    "gated_norm.backward": Kernel(("group_size",), gated_norm.Tile),
    "norm.forward": Kernel(("dim",), row_tiles.Tile),
    "norm.backward": Kernel(("dim",), row_tiles.Tile),
    # Both directions: the gradient is a rotation.
    "rotary": Kernel(("head_dim",), rotary.Launch),
    # All kernels of the rule: they share chunks of one size. Channels of values are in no key: a program takes a block of them.
    "kimi_delta": Kernel(("key_head_dim",), kimi_delta.Launch),
}


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Row:
    """One line of a table.

    shape: sizes, in the order of Kernel.shape. seq_len, variant: None: any.
    shared: bytes of shared memory that a program takes at this shape, the most of its kernels.
    provenance: `compiled only`, or how it was measured: device, date, commit, ms, tflops or gbps.
    """

    kernel: str
    dtype: str
    shape: tuple[int, ...]
    launch: Any
    shared: Annotated[int, Field(ge=0, strict=True)]
    provenance: Any
    seq_len: Count | None = None
    variant: Annotated[str, Field(strict=True)] | None = None

    @field_validator("kernel", mode="before")
    @classmethod
    def _known(cls, kernel: Any) -> Any:
        if kernel not in list(KERNELS):
            raise UserError(f"no kernel '{kernel}'; there is {', '.join(KERNELS)}")
        return kernel

    @field_validator("dtype", mode="before")
    @classmethod
    def _of_a_kernel(cls, dtype: Any) -> Any:
        if dtype not in list(DTYPES):
            raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        return dtype

    @field_validator("shape", mode="before")
    @classmethod
    def _sizes(cls, shape: Any, info: ValidationInfo) -> Any:
        if (kernel := info.data.get("kernel")) is None or isinstance(shape, tuple):
            return shape if isinstance(shape, tuple) else ()
        names = KERNELS[kernel].shape
        if not isinstance(shape, dict) or set(shape) != set(names):
            raise UserError(f"shape must have {', '.join(names)}, not {shape!r}")
        for name, size in shape.items():
            if type(size) is not int or size <= 0:
                raise UserError(f"{name} must be a positive integer, not {size!r}")
        return tuple(shape[name] for name in names)

    @field_validator("launch")
    @classmethod
    def _parameters(cls, launch: Any, info: ValidationInfo) -> Any:
        kernel = info.data.get("kernel")
        return launch if kernel is None else decode(KERNELS[kernel].launch, launch, "launch")

    @field_validator("provenance")
    @classmethod
    def _measured(cls, value: Any) -> str | dict[str, Any]:
        if value == COMPILED_ONLY:
            return value
        # In a file under `measured:`, which says what the mapping is; in a Row the mapping itself.
        measured = value["measured"] if isinstance(value, Mapping) and value.keys() == {"measured"} else value
        rates = [name for name in _RATES if isinstance(measured, Mapping) and name in measured]
        if not isinstance(measured, Mapping) or measured.keys() != {*_MEASURED, *rates} or len(rates) != 1:
            wanted = f"{', '.join(_MEASURED)} and {' or '.join(_RATES)}"
            raise UserError(f"provenance must be '{COMPILED_ONLY}' or `measured:` with {wanted}, not {value!r}")
        for name in ("ms", rates[0]):
            if type(measured[name]) not in (int, float) or not measured[name] > 0:
                raise UserError(f"provenance: {name} must be a positive number, not {measured[name]!r}")
        # YAML reads a date, and a commit of digits alone, as something else than text.
        return {name: str(each) if _MEASURED.get(name) is str else each for name, each in measured.items()}

    @property
    def key(self) -> tuple[Any, ...]:
        """Two rows of one table with the same key contradict each other."""
        return (self.kernel, self.dtype, self.shape, self.seq_len, self.variant)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(KERNELS[self.kernel].shape, self.shape, strict=True))

    @property
    def label(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.sizes.items()]
        more = [f"seq_len={self.seq_len}"] * (self.seq_len is not None) + [self.variant] * (self.variant is not None)
        return " ".join(filter(None, [self.kernel, self.dtype, *sizes, *more]))


class Table(BaseModel):
    """l2_budget: bytes of the L2 cache for the tiles that concurrent programs read again and again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arch: Annotated[str, Field(strict=True)]
    l2_budget: Count
    rows: tuple[Row, ...]


def load(file: Path, arch: str | None, own: bool = False) -> Table:
    """The table in `file`. arch: the architecture that its rows must be for; None: any. own: a user's; it needs no l2_budget.

    Raises UserError with a line for every mistake: the file, the row and what is wrong with it.
    """
    content = _read(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: a tuning table has the keys {', '.join(Table.model_fields)}")
    try:
        table = Table.model_validate({"l2_budget": 1} | content if own else content)
    except ValidationError as error:
        lines = [line for one in error.errors() for line in _explain(content, one).split("\n")]
        raise UserError("\n".join(f"{file}: {line}" for line in lines)) from None
    wrong = [
        f"{file}: row {number} ({row.kernel}): launch: {reason}"
        for number, row in enumerate(table.rows, 1)
        if (reason := row.launch.refusal(row.kernel, table.arch, row.sizes))
    ]
    if wrong:
        raise UserError("\n".join(wrong))
    if arch is not None and table.arch != arch:
        raise UserError(f"{file} holds rows for {table.arch}, where rows for {arch} are needed; name another file")
    known: set[tuple[Any, ...]] = set()
    for number, row in enumerate(table.rows, 1):
        if row.key in known:
            raise UserError(f"{file}: row {number}: a second row for {row.label}")
        known.add(row.key)
    return table


def _read(file: Path) -> Any:
    """The content of a YAML file. Raises UserError of one line, with the place of what is no YAML or beyond the limits above."""
    import yaml

    from llmtrain.config.yaml_text import check_extent, syntax

    encoded, loader = b"", getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        encoded = read_bounded(file)
        check_extent(yaml.parse(encoded.decode(), Loader=loader), MAX_VALUES, MAX_DEPTH)
        return yaml.load(encoded.decode(), Loader=loader)
    except yaml.MarkedYAMLError as error:
        reason = syntax(error)
    except yaml.reader.ReaderError as error:  # its position counts bytes, as libyaml does
        line = encoded.count(b"\n", 0, error.position) + 1
        reason = f"line {line}: YAML does not allow the character {chr(error.character)!r}"
    except (OSError, ValueError) as error:  # a ValueError: bytes that are not UTF-8, or a date that is none
        reason = str(error)
    raise UserError(f"cannot read the tuning table {file}: {reason}")


class TableTooLargeError(UserError, ValueError):
    """A table beyond MAX_BYTES."""


def read_bounded(file: Path) -> bytes:
    """The content of a file of at most MAX_BYTES. Raises TableTooLargeError for a longer one, OSError also for what is no regular
    file."""
    from llmtrain.config.regular_file import open_regular

    with open_regular(file) as opened:
        encoded = opened.read(MAX_BYTES + 1)
    if len(encoded) > MAX_BYTES:
        raise TableTooLargeError(f"longer than {MAX_BYTES:,} bytes")
    return encoded


def _explain(content: dict[str, Any], error: Any) -> str:
    """A line, or several, about one of pydantic's errors."""
    section, *place = error["loc"]
    if section != "rows" or not place:
        if error["type"] in ("extra_forbidden", "invalid_key"):
            return f"unknown key '{section}'; a tuning table has {', '.join(Table.model_fields)}"
        kind = {"arch": "text", "l2_budget": "a positive integer", "rows": "a list"}[section]
        return f"'{section}' must be {kind}, not {content.get(section)!r}"
    number, *field = place
    where, row = f"row {number + 1}", content["rows"][number]
    if isinstance(row, dict) and row.get("kernel") in list(KERNELS):
        where += f" ({row['kernel']})"
    if not field:
        return f"{where}: expected a mapping, not {row!r}"
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        fields = ", ".join(sorted(Row.__dataclass_fields__))
        return f"{where}: unknown field '{field[0]}'; a row has {fields}"
    return "\n".join(f"{where}: {line}" for line in mistake(str(field[0]), error).split("\n"))


def save(file: Path, arch: str, rows: list[Row], l2_budget: int | None = None) -> None:
    """Write rows into `file`, in place of those with the same key; the rest and the comment at its top stay."""
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
    replace_file(file, (comment + head + "rows:\n" + "".join(map(dump_row, ordered))).encode())


def dump_row(row: Row) -> str:
    """YAML of a row, one line per field."""
    import yaml

    def flow(value: Any) -> str:
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
        return text.removesuffix("\n").removesuffix("\n...")

    fields: dict[str, Any] = {
        "kernel": row.kernel,
        "dtype": row.dtype,
        "shape": row.sizes,
        "seq_len": row.seq_len,
        "variant": row.variant,
        "launch": encode(row.launch),
        "shared": row.shared,
        "provenance": row.provenance if isinstance(row.provenance, str) else {"measured": dict(row.provenance)},
    }
    lines = [f"{name}: {flow(value)}\n" for name, value in fields.items() if value is not None]
    return "- " + "  ".join(lines)


def searched(operation: str) -> list[str]:
    """The kernels of an operation whose launches `llmtrain bench tune` finds."""
    return [name for name, kernel in KERNELS.items() if name.partition(".")[0] == operation and kernel.searched]
