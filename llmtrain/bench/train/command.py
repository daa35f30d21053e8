"""`llmtrain bench train`: the runs of a sweep, one after the other; what is measured already is kept."""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.adapt.base import meta_model
from llmtrain.bench.machine import facts
from llmtrain.bench.train.cases import Case, cases, digest
from llmtrain.bench.train.measure import ending_on_sigterm, measure
from llmtrain.bench.train.sweep import Sweep, load_sweep
from llmtrain.config.checksums import read_records
from llmtrain.config.output_folder import replace_file, unwritable_reason
from llmtrain.config.report import ConfigError
from llmtrain.errors import UserError
from llmtrain.flops.count import count_parameters
from llmtrain.flops.units import decimal
from llmtrain.kernels.platform import detect
from llmtrain.pictures import new_figure, save_figure
from llmtrain.schema.load import load_config
from llmtrain.tables import csv_text, markdown_table

Measure = Callable[[Case, Sweep], dict[str, Any]]
RESULTS, TABLE, SHEET, PICTURE = "results.jsonl", "results.md", "results.csv", "results.png"


def run(args: argparse.Namespace, measure: Measure = measure) -> int:
    """Measures every case and writes the results after each. Returns 0, or 1 if a case has no figure."""
    with ending_on_sigterm():
        return _run(args, measure)


def _run(args: argparse.Namespace, measure: Measure) -> int:
    out: Path = args.out
    sweep = load_sweep(args.file)
    if reason := unwritable_reason(out):
        raise UserError(f"--out {out}: {reason}")
    wanted = cases(sweep, out)  # all are checked before the first is run
    for case in wanted:
        if (
            sweep.batch_tokens is not None
            and (tokens := case.config.tokens_per_step // case.gpus) != sweep.batch_tokens
        ):
            print(f"{case.name}: batch_tokens {sweep.batch_tokens:,}, in whole microbatches {tokens:,}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    here = detect()
    known = {} if args.again else read_results(out / RESULTS)
    results: list[dict[str, Any]] = []
    for case in wanted:
        key = {
            "settings": case.settings,
            "trains": digest(case.config),
            "steps": [sweep.warmup, sweep.steps],
            "gpu": here.device_name,
        }
        result = known.get(case.name)
        if result is None or result["key"] != json.loads(json.dumps(key)) or "error" in result:
            print(f"{case.name} ...", flush=True)
            result = {
                "name": case.name,
                "model": case.label,
                "seq_len": case.seq_len,
                "gpus": case.gpus,
                "precision": case.precision,
                "gpu": here.device_name or "CPU",
                "parameters": count_parameters(meta_model(case.config.model)).total,
                **_measured(case, sweep, measure),
                "date": time.strftime("%Y-%m-%d"),
                "key": key,
            }
            with (out / RESULTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        results.append(result)
        print(_line(result), flush=True)
        _write(out, results)
    print(f"{out / TABLE}, {SHEET}, {PICTURE}")
    return int(any("error" in result for result in results))


def _measured(case: Case, sweep: Sweep, measure: Measure) -> dict[str, Any]:
    """Figures of a case, or an error if its YAML was edited meanwhile: which of the two was trained is not known."""
    found = measure(case, sweep)
    if "error" not in found:
        try:
            same = digest(load_config(case.model, case.settings)) == digest(case.config)
        except ConfigError:
            same = False
        if not same:
            return {"error": f"{case.model} was edited before this case was measured; give the same command again"}
    return found


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The newest result of each case by name; a line that was cut off is none."""
    return {one["name"]: one for one in read_records(path).records if "name" in one} if path.exists() else {}


def _write(out: Path, results: list[dict[str, Any]]) -> None:
    machine = "; ".join(f"{what} {value}" for what, value in facts(detect()))
    replace_file(out / TABLE, as_markdown(results, f"{machine}; {time.strftime('%Y-%m-%d')}").encode())
    replace_file(out / SHEET, as_csv(results).encode())
    draw(results, out / PICTURE)


def _line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['name']}: {result['error']}"
    line = f"{result['name']}: {result['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU"
    return line if result["mfu"] is None else f"{line}, MFU {result['mfu']:.1%}"


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
