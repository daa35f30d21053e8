"""Report of `bench kernels`: a Markdown table, JSON, and a picture."""

import json
from pathlib import Path
from typing import Any

from llmtrain.bench.kernels.cell import OURS, Bar, Cell
from llmtrain.bench.kernels.measure import Result
from llmtrain.config.output_folder import replace_file
from llmtrain.pictures import new_figure, save_figure

COLUMNS = (
    "cell", "T", "backend", "forward ms", "backward ms", "sum ms", "wall ms", "host ms", "peak MiB", "roofline fwd / bwd", "error",
    "ratio", "bar",
)  # fmt: skip
MOST_ERROR = 1.1  # of the best public one's, tensor by tensor
FP32_NOISE = 1e-6  # below it two kernels differ in the order of their fp32 sums alone


def value(result: Result, what: str) -> float | None:
    if result.failed:
        return None
    return result.memory_mib if what == "memory" else getattr(result, f"{what}_ms")


def best(results: list[Result], against: str, what: str) -> float | None:
    """The least of the contenders whose name begins with `against`."""
    found = [value(r, what) for r in results if r.backend == against or r.backend.split()[0] == against]
    return min((v for v in found if v is not None), default=None)


def ratio(results: list[Result], one: Result) -> float | None:
    """Speed relative to the best public contender, forward and backward together."""
    public = [r.sum_ms for r in results if r.public and not r.failed]
    return min(public) / one.sum_ms if public and not one.failed else None


def verdict(results: list[Result], bar: Bar) -> str:
    """`sum 1.52 x sdpa:flash, 1.4: met`."""
    ours = next((value(r, bar.what) for r in results if r.backend == OURS), None)
    theirs = best(results, bar.against, bar.what)
    asked = f"{bar.what} {{}} × {bar.against} (asked {bar.at_least:g}): "
    if ours is None or theirs is None or ours == 0:
        return asked.format("?") + "not measured"
    found = theirs / ours
    return asked.format(f"{found:.2f}") + ("met" if found >= bar.at_least else "NOT MET")


def numerics(results: list[Result]) -> str | None:
    """`error 1.02 x the best public in dB, ...`: the tensor in which ours stands worst beside the most exact public one."""
    ours = next((r for r in results if r.backend == OURS and not r.failed), None)
    public = [r for r in results if r.public and not r.failed]
    if ours is None or not public:
        return None
    beside = {name: error / max(min(r.errors[name] for r in public), FP32_NOISE) for name, error in ours.errors.items()}
    name = max(beside, key=lambda name: beside[name])
    met = "met" if beside[name] <= MOST_ERROR else "NOT MET"
    return f"error {beside[name]:.2f} × the best public in {name} (asked at most {MOST_ERROR:g}): {met}"


def verdicts(cell: Cell, results: list[Result]) -> list[str]:
    return list(filter(None, [*(verdict(results, bar) for bar in cell.bars), numerics(results)]))


def table(cells: list[tuple[Cell, list[Result]]]) -> list[tuple[str, ...]]:
    rows = []
    for cell, results in cells:
        for one in results:
            name = f"{cell.operation} {cell.name}"
            if one.failed:
                rows.append((name, str(cell.seq_len), one.backend, one.failed, *[""] * (len(COLUMNS) - 4)))
                continue
            faster = ratio(results, one)
            bars = "; ".join(verdicts(cell, results)) if one.backend == OURS else ""
            rows.append(
                (
                    name,
                    str(cell.seq_len),
                    one.backend,
                    f"{one.forward_ms:.3f}",
                    f"{one.backward_ms:.3f}",
                    f"{one.sum_ms:.3f}",
                    f"{one.wall_ms:.3f}",
                    f"{one.host_ms:.3f}",
                    "" if one.memory_mib is None else f"{one.memory_mib:,.0f}",
                    "" if one.memory_mib is None else f"{one.share_forward:.0%} / {one.share_backward:.0%}",
                    f"{one.error:.1e}",
                    "" if faster is None else f"{faster:.2f}",
                    bars,
                )
            )
    return rows


def markdown(head: list[str], cells: list[tuple[Cell, list[Result]]]) -> str:
    lines = [*head, *([""] if head else []), f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += ["| " + " | ".join(word.replace("|", "/") for word in row) + " |" for row in table(cells)]
    return "\n".join(lines) + "\n"


def write(folder: Path, head: list[str], facts: dict[str, Any], cells: list[tuple[Cell, list[Result]]]) -> None:
    """kernels.md and kernels.json."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "kernels.md", markdown(head, cells).encode())
    entries = [
        {**one.dump(), "ratio": ratio(results, one), "bars": verdicts(cell, results)}
        for cell, results in cells
        for one in results
    ]
    replace_file(folder / "kernels.json", (json.dumps({**facts, "results": entries}, indent=1) + "\n").encode())


def plot(file: Path, cells: list[tuple[Cell, list[Result]]]) -> None:
    """Grouped bars per cell: speed, forward and backward together, relative to the best public backend (or the best)."""
    import matplotlib

    names = [name for name in dict.fromkeys(one.backend for _, results in cells for one in results) if name != OURS]
    shown = [(cell, [r for r in results if not r.failed]) for cell, results in cells]
    shown = [(cell, results) for cell, results in shown if results]
    if not shown:
        return
    figure = new_figure(9, 1.2 + 0.14 * sum(len(results) + 2 for _, results in shown))
    axes = figure.subplots()
    palette = matplotlib.colormaps["tab10"]
    colours = {name: palette(i % 10) for i, name in enumerate(names)} | {OURS: "black"}
    at, ticks, seen = 0.0, [], set()
    for cell, results in shown:
        reference = min((r.sum_ms for r in results if r.public), default=min(r.sum_ms for r in results))
        first = at
        for one in results:
            label = one.backend if one.backend not in seen else None
            seen.add(one.backend)
            axes.barh(at, reference / one.sum_ms, 0.9, color=colours[one.backend], label=label)
            at += 1
        ticks.append(((first + at - 1) / 2, f"{cell.operation} {cell.name}, {cell.seq_len}"))
        at += 1
    axes.axvline(1.0, color="grey", linewidth=0.8, zorder=0)
    axes.set_yticks([t for t, _ in ticks], [label for _, label in ticks], fontsize=7)
    axes.set_ylim(at - 1, -1)
    axes.set_xlabel("speed of forward + backward, best public backend = 1")
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
    save_figure(figure, file, dpi=110)
