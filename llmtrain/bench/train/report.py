"""The results of a sweep as a table with LLM Foundry's columns, as CSV and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.flops.units import decimal
from llmtrain.pictures import new_figure, save_figure
from llmtrain.tables import csv_text, markdown_table

COLUMNS = {
    "Model": lambda r: r["model"],
    "SeqLen (T)": lambda r: r["seq_len"],
    "# GPUs": lambda r: r["gpus"],
    "GPU": lambda r: r["gpu"],
    "MFU": lambda r: _percent(r["mfu"]),
    "HFU": lambda r: _percent(r["hfu"]),
    "MicroBatchSize": lambda r: r["microbatch_size"],
    "GradAccum": lambda r: r["grad_accum"],
    "GlobalBatchSize": lambda r: r["global_batch_size"],
    "Throughput (S/s)": lambda r: f"{r['tokens_per_second'] / r['seq_len']:.2f}",
    "Throughput (T/s)": lambda r: f"{r['tokens_per_second']:.0f}",
    "Throughput (T/s/GPU)": lambda r: f"{r['tokens_per_second_per_gpu']:.0f}",
    "GlobalBatchSize (T)": lambda r: r["global_batch_size"] * r["seq_len"],
    "Precision": lambda r: r["precision"],
    "Sharding Strategy": lambda r: r["sharding"],
    "Activation Checkpointing": lambda r: r["checkpointing"],
    "Peak GiB": lambda r: "" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}",
    "NumParams": lambda r: r["parameters"],
}
"""LLM Foundry's (scripts/train/benchmarking), less what has one value here, and the peak of memory."""

Result = Mapping[str, Any]


def rows(results: Sequence[Result]) -> list[list[str]]:
    """One for each result without an error."""
    return [[str(value(result)) for value in COLUMNS.values()] for result in results if "error" not in result]


def as_csv(results: Sequence[Result]) -> str:
    return csv_text([COLUMNS, *rows(results)])


def as_markdown(results: Sequence[Result], facts: str) -> str:
    """facts: the machine, versions, commit and date, without which a figure does not count."""
    lines = [facts, "", *markdown_table(list(COLUMNS), rows(results))]
    failed = [result for result in results if "error" in result]
    if failed:
        lines += ["", "Without a figure:", ""]
        lines += [f"- {result['name']}: {result['error'].strip().splitlines()[-1]}" for result in failed]
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Result], path: Path) -> None:
    """Tokens per second and GPU of every result, bars of one model side by side."""
    good = [result for result in results if "error" not in result]
    figure = new_figure(9, 0.6 + 0.35 * len(good))
    axes = figure.subplots()
    names = [result["name"] for result in good]
    rates = [result["tokens_per_second_per_gpu"] for result in good]
    models = sorted({result["model"] for result in good})
    colors = [f"C{models.index(result['model'])}" for result in good]
    bars = axes.barh(names, rates, color=colors)
    labels = [
        decimal(rate, "") + (f", MFU {_percent(result['mfu'])} %" if result["mfu"] is not None else "")
        for rate, result in zip(rates, good, strict=True)
    ]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("tokens per second and GPU")
    save_figure(figure, path)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"
