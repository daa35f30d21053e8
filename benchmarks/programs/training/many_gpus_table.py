"""The table and the picture of `benchmarks many_gpus`, from the folder of its results alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.programs.training.many_gpus_predictions import Result, memory, predicted
from llmtrain.bench.train.command import RESULTS, read_results


@dataclass(frozen=True)
class Row:
    """value: what the bar is compared with. most: the bar is the most, not the least. predicted: `value` by `describe`."""

    what: str
    detail: str
    value: float
    bar: float
    stretch: float | None
    most: bool = False
    predicted: float | None = None

    @property
    def met(self) -> bool:
        return self.value <= self.bar if self.most else self.value >= self.bar


def write(out: Path, gpus: int) -> str:
    """Writes OUT/table.md and OUT/table.png. Returns the table. The bars are those of eight GPUs, whatever `gpus` is."""
    rows = [*trained(out, gpus), *beside_torchtitan(out, gpus), *shared_sequences(out), *moved(out)]
    lines = [
        f"| | measured, {gpus} GPUs | bar, stretch of 8 GPUs | | predicted (error) | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        sign = "at most " if row.most else ""
        bars = f"{sign}{row.bar:.3g}" + (f", {row.stretch:.3g}" if row.stretch else "")
        guess = "" if row.predicted is None else f"{row.predicted:.3g} ({row.predicted / row.value - 1:+.1%})"
        lines.append(
            f"| {row.what} | {row.value:.4g} | {bars} | {'met' if row.met else 'not met'} | {guess} | {row.detail} |"
        )
    text = "\n".join([*lines, "", *runs(out)]) + "\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    if rows:
        draw(rows, out / "table.png", gpus)
    return text


def results(out: Path) -> dict[tuple[str, int, str], Result]:
    """Results of `llmtrain bench train` by model, number of GPUs and precision."""
    runs = [run for folder in sorted(out.iterdir()) for run in read_results(folder / RESULTS).values()]
    return {(run["model"], run["gpus"], run["precision"]): run for run in runs if "error" not in run}


def runs(out: Path) -> list[str]:
    """Lines of a table of what `describe` estimates of the memory of every run, beside its peak."""
    lines = ["| | GPUs | tokens/s/GPU | peak GiB | estimated (error) |", "|---|---|---|---|---|"]
    found = [
        (f"{model}, {precision}", count, run["tokens_per_second_per_gpu"], run["peak_gib"], memory(run))
        for (model, count, precision), run in sorted(results(out).items())
    ]
    found += [
        (f"{name}, {row['seq_len']:,} tokens", row["gpus"], row["tokens_per_second_per_gpu"], *gib(row))
        for name, row in shared(out)
    ]
    for name, count, rate, peak, estimate in found:
        if peak is not None and estimate is not None:
            guess = f"{estimate:.1f} ({estimate / peak - 1:+.1%})"
            lines.append(f"| {name} | {count} | {rate:,.0f} | {peak:.1f} | {guess} |")
    return lines


def gib(row: Result) -> tuple[float | None, float | None]:
    """Peak and estimate of a row of `benchmarks parallel`, in GiB."""
    peak, estimate = row["memory"], row.get("memory_estimated")
    return peak and peak / 2**30, estimate and estimate / 2**30


def trained(out: Path, gpus: int) -> list[Row]:
    """MFU, float8 beside bf16, and what is kept of the speed on fewer GPUs."""
    found = results(out)

    def fewest(model: str) -> Result | None:
        counts = sorted(
            count for name, count, precision in found if (name, precision) == (model, "bf16") and count < gpus
        )
        return found[model, counts[0], "bf16"] if counts else None

    rows = []
    for model, bar, stretch in (("mpt-1b", 0.59, 0.62), ("mpt-7b", 0.60, 0.64)):
        if (run := found.get((model, gpus, "bf16"))) and run["mfu"]:
            few = fewest(model)
            guess = run["mfu"] * predicted(few, run) / run["tokens_per_second_per_gpu"] if few else None
            rows.append(Row(f"{model}, {gpus} GPUs, MFU", detail(run), run["mfu"], bar, stretch, predicted=guess))
    if (float8 := found.get(("mpt-7b", gpus, "tensorwise"))) and (bf16 := found.get(("mpt-7b", gpus, "bf16"))):
        rows.append(Row(f"mpt-7b, {gpus} GPUs, float8 / bf16", detail(float8), ratio(float8, bf16), 1.33, 1.45))
    for model, bar, stretch in (("zamba2-2.7b", 0.95, 0.98), ("mpt-7b", 0.97, 0.99)):
        if (run := found.get((model, gpus, "bf16"))) and (few := fewest(model)):
            guess = predicted(few, run) / few["tokens_per_second_per_gpu"]
            what = f"{model}, tokens/s/GPU of {gpus} GPUs / of {few['gpus']}"
            rows.append(Row(what, detail(run), ratio(run, few), bar, stretch, predicted=guess))
    return rows


def beside_torchtitan(out: Path, gpus: int) -> list[Row]:
    found, rows = results(out), []
    for precision, bar, stretch in (("bf16", 1.03, 1.08), ("tensorwise", 1.05, 1.12)):
        file = out / f"torchtitan-{precision}.json"
        if file.exists() and (run := found.get(("llama3-8b", gpus, precision))):
            peer = json.loads(file.read_text(encoding="utf-8"))
            said = f"{detail(run)}; torchtitan {peer['tokens_per_second_per_gpu']:,.0f}, {peer['peak_gib']:.1f} GiB"
            rows.append(
                Row(f"llama3-8b, {gpus} GPUs, {precision}, ours / torchtitan", said, ratio(run, peer), bar, stretch)
            )
    return rows


def shared_sequences(out: Path) -> list[Row]:
    rows = []
    for name, run in shared(out):
        if run["mfu_causal"]:
            what = f"{name}, context {run['gpus']}, {run['seq_len']:,} tokens, MFU (causal)"
            said = f"{run['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, {run['memory'] / 2**30:.1f} GiB, {run['device']}"
            rows.append(Row(what, said, run["mfu_causal"], 0.35, 0.45))
    return rows


def shared(out: Path) -> list[tuple[str, Result]]:
    """Models with the newest row of each file of `benchmarks parallel`."""
    files = sorted(out.glob("context-*.jsonl"))
    rows = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    names = [file.stem.removeprefix("context-").rpartition("-")[0] for file in files]
    return [(name, found[-1]) for name, found in zip(names, rows, strict=True) if found]


def moved(out: Path) -> list[Row]:
    file = out / "moving" / "moving.json"
    if not file.exists():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    legs = ", ".join(leg["leg"] for leg in found["legs"])
    same = "identical" if found["sample_ids_identical"] else "DIFFER"
    said = f"{found['steps']} of {found['of']} steps, legs {legs}, sample ids {same}"
    return [
        Row(
            "checkpoint resumed on fewer GPUs: largest difference of the loss",
            said,
            found["relative"],
            0.005,
            None,
            most=True,
        )
    ]


def detail(run: Result) -> str:
    rate, peak = f"{run['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU", run["peak_gib"]
    memory = "" if peak is None else f", {peak:.1f} GiB"
    return f"{rate}{memory}, microbatch {run['microbatch_size']}, {run['sharding']}, {run['gpu']}, {run['date']}"


def ratio(one: Result, other: Result) -> float:
    return one["tokens_per_second_per_gpu"] / other["tokens_per_second_per_gpu"]


def draw(rows: list[Row], path: Path, gpus: int) -> None:
    """Each figure over its bar; where the bar is the most, the bar over the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    shares = [row.bar / row.value if row.most else row.value / row.bar for row in rows]
    shown = [min(share, 2.0) for share in shares]  # a difference of nearly nothing is many bars
    bars = axes.barh([row.what for row in rows], shown, color=["tab:green" if row.met else "tab:red" for row in rows])
    axes.bar_label(bars, [f"{row.value:.3g} (bar {row.bar:.3g})" for row in rows], padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel(f"figure on {gpus} GPUs / bar of 8")
    figure.savefig(path, dpi=120)
