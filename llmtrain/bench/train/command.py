"""`llmtrain bench train`: the runs of a sweep, one after the other; what is measured already is kept."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.adapt.base import meta_model
from llmtrain.bench.machine import facts
from llmtrain.bench.train.cases import Case, cases, digest
from llmtrain.bench.train.measure import ending_on_sigterm, measure
from llmtrain.bench.train.report import as_csv, as_markdown, draw
from llmtrain.bench.train.sweep import Sweep, load_sweep
from llmtrain.config.checksums import read_records
from llmtrain.config.output_folder import replace_file, unwritable_reason
from llmtrain.config.report import ConfigError
from llmtrain.errors import UserError
from llmtrain.flops.count import count_parameters
from llmtrain.kernels.platform import detect
from llmtrain.schema.load import load_config

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
