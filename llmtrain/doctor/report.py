"""The report of `llmtrain doctor`: this machine, and which backends serve and compute correctly."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.bench import machine
from llmtrain.doctor import selftest
from llmtrain.errors import UserError, named_line
from llmtrain.flops.peaks import dense_peak, find_device
from llmtrain.kernels import platform, registry
from llmtrain.kernels.operation import Operation, Shape, operations
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Finding:
    """The state of a backend. reason: why it does not serve, or None. error: of the self-test. failed: in words."""

    operation: str
    what: str
    backend: str
    chosen: bool
    reason: str | None = None
    error: float | None = None
    failed: str | None = None
    seconds: float = 0.0

    @property
    def state(self) -> str:
        if self.reason is not None:
            return self.reason
        if self.failed is not None:
            return f"FAIL: {self.failed}"
        return "can serve" if self.error is None else f"pass, error {self.error:.1e}"


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 1 if a backend that `auto` chooses fails. Raises UserError for an unknown dtype."""
    here = platform.detect()
    dtype = args.dtype or ("float32" if here.vendor == "cpu" else "bfloat16")
    if dtype not in selftest.DTYPES:
        raise UserError(f"--dtype takes {', '.join(selftest.DTYPES)}, not '{dtype}'")
    selftest.check(here)
    show("this machine", ("", ""), [*machine.facts(here), *peak(here)])
    found = findings(here, dtype, test=not args.no_test)
    rows = [(f.operation, f.what, f.backend, "auto" * f.chosen, f.state) for f in found]
    show(f"kernels, {dtype}", ("operation", "", "backend", "", "state"), rows)
    broken = [f for f in found if f.chosen and f.failed is not None]
    for one in broken:
        print(
            f"{one.operation} ({one.what}): auto chooses {one.backend}, which fails here; name another backend until then"
        )
    failed = [f for f in found if f.failed is not None]
    if not args.no_test:
        tested = sum(f.error is not None for f in found)
        print(f"{tested} passed, {len(failed)} failed, in {sum(f.seconds for f in found):.1f} s")
    return 1 if broken else 0


def peak(here: Platform) -> list[tuple[str, str]]:
    """The row that says what MFU is a share of; none on a CPU."""
    if here.vendor == "cpu":
        return []
    found = dense_peak(find_device(here.device_name or "", here.num_sms), "bf16", name=f"'{here.device_name}'")
    return [("peak", f"{found.flops / 1e12:,.4g} TFLOP/s in bf16 ({found.source})" if found.flops else found.source)]


def findings(here: Platform, dtype: str, test: bool) -> list[Finding]:
    """Every backend of every operation that trains, and of decoding (which is not tested here)."""
    found = []
    for one in operations():
        for number, (what, shape) in enumerate(one.selftests(dtype)):
            auto = registry.resolve(one.name, "auto", shape.spec, here).name
            for row in registry.table(one.name, shape.spec, here):
                chosen = row.backend == auto
                if row.reason is not None or not test:
                    found.append(Finding(one.name, what, row.backend, chosen, row.reason))
                else:
                    found.append(tested(one, what, shape, row.backend, chosen, here))
            step = f"{one.name}_step"
            if step in registry.OPERATIONS and number == 0:
                auto = registry.resolve(step, "auto", shape.spec, here).name
                rows = registry.table(step, shape.spec, here)
                found += [Finding(step, "decoding", row.backend, row.backend == auto, row.reason) for row in rows]
    return found


def tested(one: Operation, what: str, shape: Shape, backend: str, chosen: bool, here: Platform) -> Finding:
    began = time.perf_counter()
    error, failed, allowed = None, None, selftest.tolerance(one, shape.spec.dtype)
    try:
        error = selftest.error(one, shape, backend, here)
        if not error < allowed:
            error, failed = None, f"error {error:.1e}, allowed {allowed:.0e}"
    except Exception as problem:  # whatever a backend does wrong is what the doctor is for
        failed = named_line(problem, 200)
    return Finding(one.name, what, backend, chosen, None, error, failed, time.perf_counter() - began)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; in a pipe, lines with two spaces between columns."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if console.is_terminal:
        table = Table(*columns, title=title, title_justify="left", box=None, show_header=any(columns))
        for row in rows:
            style = "red" if row[-1].startswith("FAIL") else "dim" if len(row) > 2 and not _serves(row[-1]) else None
            table.add_row(*row, style=style)
        console.print(table)
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) - 1)]
    print(title)
    for row in rows:
        print("  " + "  ".join([*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[-1]]))


def _serves(state: str) -> bool:
    return state.startswith(("pass", "can serve"))
