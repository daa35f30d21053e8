"""Train for some minutes, evaluate, export, evaluate again as a Hugging Face model: are the numbers the same?

    python -m benchmarks three_columns FILE [a.b=c …] --data-dir DIR --minutes 2 --out FOLDER

FILE: a run's YAML; without data of its own making (data.prepare) it trains on Python's standard library. One process
trains; then three columns are scored on the same documents, in fp32 without TF32, in lm-evaluation-harness's convention:

    checkpoint   the run's checkpoint, by llmtrain's own model
    exported     what `llmtrain export` made of it, as transformers loads it, by `llmtrain eval`'s scorer
    harness      the same folder by lm-evaluation-harness's `hf` model, which gets prompts as text and tokenises them

The metrics of all three come from one function (tests/numerics compares it with the harness's own metrics).
FOLDER gets three_columns.md and .json, rewritten after each column. Exit status 1 when an accuracy differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.eval_peer import ask, instances, load_peer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.native_task import NativeTask, load_task
from llmtrain.eval.prompts.requests import Loglikelihood, LoglikelihoodRequest
from llmtrain.eval.report.metrics import Metrics
from llmtrain.eval.scoring.load import Backend, find_model, find_tokenizer, load_scorer, window_of
from llmtrain.eval.task import Documents
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config
from llmtrain.train.report.loggers import read_metrics

TASKS = (
    *("arc_easy", "arc_challenge", "boolq", "piqa", "winogrande", "winograd", "lambada", "copa", "openbook_qa"),
    *("hellaswag", "mmlu", "jeopardy", "arc_challenge:5"),
)
"""Tasks without generated answers, with their numbers of examples if not 0; those absent from the data folder are left out."""
PROBE_STEPS = 30
TOKENIZER_SIZE = 16_384
"""Largest vocabulary for which the standard library has enough text."""


@dataclass(frozen=True)
class TaskRequests:
    """A task with its requests."""

    title: str
    task: NativeTask
    shots: int
    documents: Documents
    requests: list[LoglikelihoodRequest]

    def metrics(self, answers: Sequence[Loglikelihood]) -> Metrics:
        return self.task.metrics(self.documents, self.requests, answers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("--data-dir", required=True, help="a folder of the tasks' JSONL files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=number, default=2.0, help="of training, compilation not counted")
    parser.add_argument("--steps", type=positive, help="train so many steps, in place of --minutes")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK[:SHOTS]")
    parser.add_argument(
        "--limit", type=positive, default=300, help="documents per task (of each category); default 300"
    )
    parser.add_argument("--batch", type=positive, default=32, help="requests at a time, of the harness")
    args = parser.parse(argv)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    run, exported = args.out / "run", args.out / "exported"
    if run.exists() or exported.exists():
        raise EvalError(f"--out {args.out} holds an earlier run; name another folder, or remove it")
    if find_spec("lm_eval") is None:
        raise EvalError("lm-evaluation-harness is not here: pip install lm_eval==0.4.13")
    documents = dict(_read(args.tasks, args.data_dir, args.limit))
    if status := _train_and_export(args, run, exported):
        return status

    found = find_model(str(run))
    tokenizer, window = find_tokenizer(found), window_of(found)
    tasks = []
    for title, (task, shots, some) in documents.items():
        requests = task.requests(some, tokenizer, shots, pmi=False)
        tasks.append(
            TaskRequests(title, task, shots, some, [one for one in requests if isinstance(one, LoglikelihoodRequest)])
        )
    columns = {
        "checkpoint": lambda: _ours(run, "llmtrain", tasks),
        "exported": lambda: _ours(exported, "transformers", tasks),
        "harness": lambda: _theirs(exported, window, tasks, args.batch),
    }
    answers: dict[str, dict[str, list[Loglikelihood]]] = {}
    title, rows, table = _about(args.file, found.folder, run), [], ""
    for name, score in columns.items():
        answers[name] = _timed(name, score)
        # After each column: the last one takes longest, and a time limit must not cost the others.
        rows = [compare(asked, {name: some[asked.title] for name, some in answers.items()}) for asked in tasks]
        table = as_markdown(rows)
        (args.out / "three_columns.md").write_text(f"{title}\n\n{table}", encoding="utf-8")
        content = json.dumps({"about": title, "device": _device(), "rows": rows}, indent=1) + "\n"
        (args.out / "three_columns.json").write_text(content, encoding="utf-8")
    print(f"\n{title}\n\n{table}", flush=True)
    different = [row["task"] for row in rows if not row["same"]]
    print(f"accuracies differ: {', '.join(different)}" if different else "all accuracies are the same", flush=True)
    return 1 if different else 0


def _read(names: Sequence[str], data_dir: str, limit: int) -> Iterator[tuple[str, tuple[NativeTask, int, Documents]]]:
    """(task, shots, documents) by title. Raises UserError when the folder holds none of the tasks, or bad records."""
    some = False
    for title in names:
        name, _, shots = title.partition(":")
        task = load_task(name, "lm-eval", data_dir)
        if task.type in ("generation", "perplexity"):
            raise EvalError(f"--tasks {name}: only tasks of choices and of last words can be compared here")
        if task.source.path is not None and not (task.base / task.source.path).is_file():
            print(f"left out: {title}, because there is no {task.base / task.source.path}", flush=True)
            continue
        some = True
        yield title, (task, int(shots or 0), task.documents(limit))
    if not some:
        raise EvalError(f"--data-dir {data_dir} holds no file of {', '.join(names)}")


def _train_and_export(args: argparse.Namespace, run: Path, exported: Path) -> int:
    """Train and export; return the exit status. The length of training comes from the speed of a short run before it."""
    config = load_config(args.file, args.overrides)
    overrides = [*_stdlib(config), *args.overrides]
    overrides += ["logging.tensorboard=false", "logging.wandb=null", "checkpoint.interval=1000000 steps"]
    steps = args.steps
    if steps is None:
        probe = args.out / "probe"
        if status := _train(args.file, overrides, probe, PROBE_STEPS):
            return status
        rate = read_metrics(probe / "metrics.jsonl", "throughput/tokens_per_second")[1][-1]  # of the last 20 steps
        seconds = config.tokens_per_step / rate
        steps = max(int(60 * args.minutes / seconds), 1)
        print(f"{seconds:.3f} s a step: {steps} steps in {args.minutes:g} minutes", flush=True)
    if status := _train(args.file, overrides, run, steps):
        return status
    return _command("export", str(run), str(exported), "--dtype", "float32")


def _stdlib(config: Config) -> list[str]:
    """Overrides that give a YAML text to train on, if it makes none itself."""
    if config.data.prepare is not None:
        return []
    made = {
        "sources": ["stdlib"],
        "out": f"data/stdlib-{config.data.seq_len}",
        "vocab_size": min(config.model.vocab_size, TOKENIZER_SIZE),
        "seq_len": config.data.seq_len,
    }
    return ["data.train=null", "data.validation=null", f"data.prepare={json.dumps(made)}"]


def _train(file: str, overrides: Sequence[str], run: Path, steps: int) -> int:
    return _command("train", file, *overrides, f"run_dir={run}", f"train.duration={steps} steps", "--nproc", "1")


def _command(*arguments: str) -> int:
    """Run an llmtrain command in its own process, so that it leaves no memory or settings behind."""
    print("llmtrain", *arguments, flush=True)
    return subprocess.run([sys.executable, "-m", "llmtrain.cli", *arguments]).returncode


def _timed(name: str, make: Any) -> dict[str, list[Loglikelihood]]:
    began = time.perf_counter()
    made = make()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"{name}: scored in {time.perf_counter() - began:.1f} s, loading included", flush=True)
    return made


def _ours(folder: Path, backend: Backend, tasks: Sequence[TaskRequests]) -> dict[str, list[Loglikelihood]]:
    found = find_model(str(folder), backend)
    tokenizer = find_tokenizer(found)
    scorer = load_scorer(found, tokenizer, dtype="float32")
    answers = {}
    for asked in tasks:
        requests = asked.task.requests(asked.documents, tokenizer, asked.shots, pmi=False)
        scores = [one for one in requests if isinstance(one, LoglikelihoodRequest)]
        answers[asked.title] = scorer.loglikelihood(scores, window=asked.task.window(scorer.window) - 1)
    return answers


def _theirs(folder: Path, window: int, tasks: Sequence[TaskRequests], batch: int) -> dict[str, list[Loglikelihood]]:
    peer = load_peer(str(folder), window, "float32")
    peer.batch_size_per_gpu = batch
    answers = {}
    for asked in tasks:
        questions = [instance for _, instance in instances(asked.task, asked.documents, asked.shots)]
        found = zip(ask(peer, questions), asked.requests, strict=True)
        answers[asked.title] = [
            Loglikelihood(value, bool(greedy), len(one.continuation)) for (value, greedy), one in found
        ]
    return answers


def compare(asked: TaskRequests, answers: dict[str, list[Loglikelihood]]) -> dict[str, Any]:
    """Row of a task: every metric of every finished column, equality of all accuracies, and for each two columns the
    largest difference of a log-likelihood (nats)."""
    metrics = {name: asked.metrics(some) for name, some in answers.items()}
    first = next(iter(metrics.values()))
    accuracies = [name for name in first.values if name.startswith("acc")]
    values = {name: {metric: one.values[metric].value for metric in one.values} for name, one in metrics.items()}
    same = all(one[metric] == first.values[metric].value for one in values.values() for metric in accuracies)
    differences = {
        f"{a} - {b}": max(abs(x.log_likelihood - y.log_likelihood) for x, y in zip(answers[a], answers[b], strict=True))
        for a, b in combinations(answers, 2)
    }
    return {
        "task": asked.title,
        "documents": first.documents,
        "requests": first.requests,
        "metric": first.headline,
        "values": values,
        "same": same,
        "differences": differences,
    }


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Table with one row per task: the headline metric in each column; then the largest differences of log-likelihoods, in nats."""
    pairs = list(rows[0]["differences"])
    columns = list(rows[0]["values"])
    heads = ["task", "documents", "metric", *columns, "same", *pairs]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        numbers = [f"{row['values'][name][row['metric']]:.4f}" for name in columns]
        gaps = [f"{row['differences'][pair]:.1e}" for pair in pairs]
        cells = [row["task"], str(row["documents"]), row["metric"], *numbers]
        lines.append([*cells, "yes" if row["same"] else "**no**", *gaps])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _about(file: str, checkpoint: Path, run: Path) -> str:
    names = ("loss/train/total", "metrics/validation/cross_entropy")
    losses = {name: read_metrics(run / "metrics.jsonl", name)[1] for name in names}
    said = [f"{name} {values[0]:.3f} → {values[-1]:.3f}" for name, values in losses.items() if values]
    return "; ".join([f"{Path(file).stem}, {checkpoint.name}, fp32, {_device()}", *said])


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
