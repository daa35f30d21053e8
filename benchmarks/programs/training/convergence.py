"""Loss of several models over tokens and over wall time: the same text in the same order, the same batch and learning rate.

    python -m benchmarks convergence [NAME=]FILE… [--set a.b=c …] [--for NAME a.b=c …] --seconds 90 --out FOLDER [--sources DIR…]
        [--nproc 2] [--beside]
    python -m benchmarks convergence --picture PICTURE.png JSON…       # of the models of several such results

Each FILE, a run's YAML, under a name of its own where it comes in several settings, is trained by `llmtrain train` in a process of
its own on the text in --sources (default: Python's standard library) with a tokenizer trained on it. All start and compile beside
each other, then stop (SIGSTOP, on POSIX alone) and go on one after another for so many seconds of steps (or --steps, if these are
done sooner), the others standing still; or all go on beside each other (--beside), where only the loss over tokens counts. FOLDER
gets convergence.json, rewritten after each model, and convergence.png, of mixtures with the loads of their experts. A model that
fails does not end the others; the exit status is then 1. SIGTERM ends all; what the model in training has reached is kept.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.pictures import picture
from benchmarks.harness.report import device_name, metric_rows, rounded
from llmtrain.distributed.processes import exit_on_sigterm
from llmtrain.errors import RunError
from llmtrain.schema.load import load_config

COMPILING = 3
"""Steps that compile. Their time, and that of steps that were interrupted, is taken to be that of a median step."""
VOCAB = 16_384
LOSS, SECONDS = "loss/train/cross_entropy", "throughput/step_seconds"
LOAD, LOADS = re.compile(r"blocks\.(\d+)\.mlp/load_(\d+)"), 60
"""Metric of the share of an expert's tokens, and the number of steps whose loads are kept."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--picture", type=Path, help="draw what was found, and train nothing")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", help="further settings of every run")
    parser.add_argument("--for", nargs="+", default=[], action="append", dest="special", metavar="NAME a.b=c",
                        help="further settings of the run of NAME, or of NAME.yaml; may be repeated")  # fmt: skip
    parser.add_argument("--seconds", type=number, default=90.0)
    parser.add_argument("--steps", type=positive, default=sys.maxsize, help="of each run at most")
    parser.add_argument("--sources", nargs="+", default=["stdlib"])
    parser.add_argument("--max-bytes", type=positive, default=150_000_000, help="of text")
    parser.add_argument("--seq-len", type=positive, default=1024)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nproc", type=positive, default=1, help="GPUs of every run")
    parser.add_argument("--beside", action="store_true", help="train all at the same time")
    args = parser.parse(argv)
    if args.picture is not None:
        return draw([Path(file) for file in args.files], args.picture)
    if args.out is None:
        parser.error("--out is needed")
    args.out.mkdir(parents=True, exist_ok=True)
    text = {"sources": args.sources, "out": str(args.out / "data"), "vocab_size": VOCAB, "seq_len": args.seq_len}
    common = [
        "data.train=null",
        "data.validation=null",
        f"data.prepare={json.dumps(text | {'max_bytes': args.max_bytes})}",
        f"data.seq_len={args.seq_len}",
        f"model.vocab_size={VOCAB}",
        *("train.duration=100000 steps", "train.global_batch_size=64", "train.microbatch_size=32"),
        *("optimizer.lr=1e-3", "optimizer.betas=[0.9, 0.95]", "optimizer.weight_decay=0.1"),
        "schedule={type: constant, warmup: 50 steps}",
        *("eval.interval=100000 steps", "checkpoint.interval=100000 steps"),
        *("logging.interval=1", "logging.tensorboard=false", "logging.wandb=null"),
        *args.set,
    ]
    special = {name: settings for name, *settings in args.special}
    files = [(name or Path(file).stem, file) for name, _, file in (one.rpartition("=") for one in args.files)]
    if unknown := special.keys() - dict(files).keys():
        parser.error(f"--for {min(unknown)}: no such run")
    if len(dict(files)) < len(files):
        parser.error("a name stands for several runs: give NAME=FILE")
    runs = [Run(name, file, [*common, *special.get(name, [])], args.out, args.nproc) for name, file in files]
    found: dict[str, Any] = {}
    failed = False

    def keep(run: Run) -> None:
        found[run.name] = rounded(run.result(args.steps))
        content = {"device": device_name(), "settings": common, "special": special, "models": found}
        (args.out / "convergence.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
        plot(found, args.out / "convergence.png")

    exit_on_sigterm()  # else what it started would outlive it
    try:
        for run in runs:
            run.start()
        _compile(runs)
        for run in runs if args.beside else ():
            run.go_on()
        for run in runs:
            try:
                run.train(args.seconds, args.steps)
            except RunError as error:
                print(f"{run.name}: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            except SystemExit:
                for one in [one for one in runs if one.rows()] if args.beside else [run]:
                    keep(one)
                raise
            keep(run)
    finally:
        for run in runs:
            run.kill()
    for line in table(found):
        print(line, flush=True)
    return 1 if failed else 0


def draw(files: Sequence[Path], picture: Path) -> int:
    """Draw the models of several convergence.json together, and print the table of them. Returns the exit status."""
    found: dict[str, Any] = {}
    for file in files:
        found |= json.loads(file.read_text(encoding="utf-8"))["models"]
    plot(found, picture)
    for line in table(found):
        print(line)
    return 0


class Run:
    """One model's training: a process group that can stand still."""

    def __init__(self, name: str, file: str, overrides: Sequence[str], out: Path, processes: int = 1):
        self.name, self.processes = name, processes
        self.config = load_config(file, overrides)
        self.settings, self.folder, self.log = [file, *overrides], out / self.name, out / f"{self.name}.log"
        self.process: subprocess.Popen | None = None
        self.uncounted, self.going = COMPILING, False

    def start(self) -> None:
        """Start it in a folder of its own, from step 0; the first call to prepare takes the lock and the others wait."""
        while self.folder.exists():
            self.folder = self.folder.with_name(f"{self.folder.name}-again")
        command = [sys.executable, "-m", "llmtrain.cli", "train", *self.settings, f"run_dir={self.folder}"]
        command += ["--nproc", str(self.processes)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End it and all that it started. Nothing of it is wanted but its metrics, so that it need not save."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def rows(self) -> list[dict[str, Any]]:
        """Metrics of its training steps so far."""
        return metric_rows(self.folder / "metrics.jsonl", LOSS, SECONDS)

    def go_on(self) -> None:
        """Continue after `_compile`, from the beginning if it has ended."""
        if self.ended():
            self.start()
        self.signal(signal.SIGCONT)
        # The step that was interrupted, and one more: the queue of the loader has filled meanwhile.
        self.uncounted, self.going = max(len(self.rows()) + 2, COMPILING), True

    def train(self, seconds: float, steps: int = sys.maxsize) -> None:
        """Train on for so many seconds, or to this step, and end. A run that has ended already, for want of memory beside the
        others perhaps, is tried again. Raises RunError for one that ends by itself.
        """
        if not self.going:
            self.go_on()
        try:
            while not self._enough(self.rows(), seconds, steps):
                if self.ended() and not self._enough(self.rows(), seconds, steps):  # what it wrote last counts too
                    end = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
                    raise RunError(f"ended by itself after {len(self.rows())} steps:\n{end}")
                time.sleep(0.5)
        finally:
            self.kill()

    def _enough(self, rows: Sequence[dict[str, Any]], seconds: float, steps: int) -> bool:
        done = rows[-1]["step"] if rows else 0  # the first step has no seconds, and so no row
        return done >= steps or sum(row[SECONDS] for row in rows[self.uncounted :]) >= seconds

    def result(self, steps: int = sys.maxsize) -> dict[str, Any]:
        """The curve to this step, after training."""
        from llmtrain.adapt.base import meta_model
        from llmtrain.flops.count import count_parameters

        rows, parameters = self.rows(), count_parameters(meta_model(self.config.model)).total
        rows = [row for row in rows if row["step"] <= steps]
        return curve(rows, self.uncounted, self.config.tokens_per_step) | {"parameters": parameters} | loads(rows)


def loads(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Loads of the experts of each layer, [layer][expert], over that of a balanced one, in some of these steps; nothing of a model
    without mixtures."""
    names = sorted((int(at[1]), int(at[2]), name) for name in rows[-1] if (at := LOAD.fullmatch(name)))
    of_layers = [[name for of, _, name in names if of == layer] for layer in sorted({layer for layer, *_ in names})]
    some = [row for row in rows[:: max(len(rows) // LOADS, 1)] if all(name in row for *_, name in names)]
    found = [[[round(row[name] * len(one), 3) for name in one] for one in of_layers] for row in some]
    return {"loads": found, "load_steps": [row["step"] for row in some]} if names else {}


def curve(rows: Sequence[dict[str, Any]], uncounted: int, tokens_per_step: int) -> dict[str, Any]:
    """Loss, tokens and seconds of training after each step; the first `uncounted` ones are given the time of a median step."""
    usual = median(row[SECONDS] for row in rows[uncounted:] or rows)
    wall = list(accumulate(usual if i < uncounted else row[SECONDS] for i, row in enumerate(rows)))
    return {
        "tokens_per_second": tokens_per_step * len(rows) / wall[-1],
        "tokens": [tokens_per_step * row["step"] for row in rows],
        "seconds": wall,
        "loss": [row[LOSS] for row in rows],
    }


def table(found: dict[str, Any]) -> list[str]:
    """Rows in Markdown: the smoothed loss after as many tokens, and seconds, as the shortest run has."""
    if not found:
        return []
    tokens, seconds = (min(one[axis][-1] for one in found.values()) for axis in ("tokens", "seconds"))
    lines = [
        f"| | parameters | tokens/s | loss after {tokens / 1e6:.1f}M tokens | after {seconds:.1f} s | at the end |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        loss = _smoothed(one["loss"])
        shown = [_at(loss, one["tokens"], tokens), _at(loss, one["seconds"], seconds), loss[-1]]
        counts = f"{one['parameters'] / 1e6:.1f}M | {one['tokens_per_second']:,.0f}"
        lines.append(f"| {name} | {counts} | " + " | ".join(f"{value:.3f}" for value in shown) + " |")
    return lines


def _at(loss: Sequence[float], axis: Sequence[float], place: float) -> float:
    """The loss of the last step that ends by `place`, or of the first."""
    return loss[max(sum(position <= place for position in axis) - 1, 0)]


def _compile(runs: Sequence[Run]) -> None:
    """Wait until each run has compiled or ended, and stop it there."""
    waiting = list(runs)
    while waiting:
        for run in list(waiting):
            if run.ended() or len(run.rows()) >= COMPILING:
                run.signal(signal.SIGSTOP)
                waiting.remove(run)
                print(f"{run.name}: {'ended' if run.ended() else 'compiled'}", flush=True)
        time.sleep(0.05)


def _smoothed(values: Sequence[float], half_life: float = 10.0) -> list[float]:
    """Exponential average without a bias to its beginning."""
    keep, total, weight, found = 0.5 ** (1 / half_life), 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        found.append(total / weight)
    return found


def plot(found: dict[str, Any], file: Path) -> None:
    """Loss over tokens and over seconds of training, smoothed."""
    mixtures = {name: one for name, one in found.items() if "loads" in one}
    with picture(
        file, 1 + len(mixtures), 2, size=(9, 3.6 * (1 + len(mixtures))), sharey="row", squeeze=False
    ) as all_axes:
        axes = all_axes[0]
        for name, one in found.items():
            label = f"{name}: {one['parameters'] / 1e6:.0f}M, {one['tokens_per_second'] / 1e3:,.0f}k tokens/s"
            axes[0].plot([n / 1e6 for n in one["tokens"]], _smoothed(one["loss"]), label=label)
            axes[1].plot(one["seconds"], _smoothed(one["loss"]))
        lowest = min(min(_smoothed(one["loss"])) for one in found.values())
        axes[0].set(xlabel="million tokens", ylabel="training loss, nats per token", ylim=(lowest - 0.1, lowest + 2.5))
        axes[1].set_xlabel("seconds of training")
        axes[0].legend(fontsize=7)
        for of, (name, one) in zip(all_axes[1:], mixtures.items(), strict=True):
            _plot_loads(name, one["load_steps"], one["loads"], of)


def _plot_loads(name: str, steps: Sequence[int], found: Sequence[Sequence[Sequence[float]]], axes: Any) -> None:
    """Largest and smallest load of each layer, and all of the middle layer's: loads by step, layer, expert."""
    layers = len(found[0])
    for layer in range(layers):
        for pick, colour in ((max, "C3"), (min, "C0")):
            label = f"{pick.__name__} of each layer" if layer == 0 else None
            axes[0].plot(steps, [pick(one[layer]) for one in found], colour, alpha=0.4, lw=0.8, label=label)
    axes[1].plot(steps, [one[layers // 2] for one in found], lw=0.8)
    axes[0].set(
        xlabel="steps", ylabel="load of an expert, over the balanced one", yscale="log", title=f"{name}: extremes"
    )
    axes[1].set(xlabel="steps", title=f"{name}: each expert of layer {layers // 2}")
    axes[0].legend(fontsize=7)
