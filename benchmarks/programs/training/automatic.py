"""`microbatch_size: auto` with `activation_checkpointing: auto`, beside a sweep of both by hand, for one model on this machine.

    python -m benchmarks automatic FILE [a.b=c …] --sweep none:8,16 selective:16 full:32 [--steps 20] --out FILE.json

Each setting is trained by what `llmtrain train` calls, one after another, on Python's standard library: those of the sweep (kind of
checkpointing, sizes of a microbatch) for --short steps, then `auto`, then the best of the sweep, for --steps steps each. Steps are
timed after --warmup ones, and a figure is their median. A setting that does not fit is noted as such. FILE.json is rewritten after
each; --seconds ends the sweep, but not the two at the end, after so many. Each setting has a process of its own; all import what
they need at the start, beside each other.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness.arguments import Parser, natural, number, positive
from llmtrain.errors import RunError, UserError
from llmtrain.schema.load import load_config

VOCAB = 4096
STEP = "throughput/step_seconds"


def main(argv: Sequence[str] | None = None) -> int:
    if list(sys.argv[1:] if argv is None else argv) == ["--measure"]:
        from llmtrain.train.worker import silence_warnings

        silence_warnings()
        import llmtrain.train.run

        assert llmtrain.train.run  # now, while other processes do so too, or are measured
        print(json.dumps(measure(*json.loads(sys.stdin.read()))), flush=True)
        return 0
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("--sweep", nargs="+", required=True, metavar="KIND:SIZE,…")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--short", type=positive, default=4)
    parser.add_argument("--warmup", type=natural, default=3)
    parser.add_argument("--seconds", type=number, default=1e9)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse(argv)
    began, rows = time.monotonic(), []

    def run(name: str, settings: list[str], steps: int) -> dict[str, Any]:
        result = waiting.pop().result(args.file, [*args.overrides, *settings], args.warmup, steps)
        rows.append({"name": name, **result, "seconds_in_all": time.monotonic() - began})
        print(json.dumps(rows[-1]), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"file": args.file, "overrides": args.overrides, "rows": rows}, indent=1))
        return rows[-1]

    by_hand = {
        f"{kind}:{size}": [f"train.microbatch_size={size}", f"train.activation_checkpointing={{type: {kind}}}"]
        for kind, _, sizes in (text.partition(":") for text in args.sweep)
        for size in sizes.split(",")
    }
    waiting = [Measuring() for _ in range(len(by_hand) + 2)]
    found = {}
    for name, settings in by_hand.items():
        if time.monotonic() - began < args.seconds:
            found[name] = run(name, settings, args.short)
    automatic = ["train.microbatch_size=auto", "train.activation_checkpointing={type: auto}"]
    auto = run("auto", automatic, args.steps)
    fitting = {name: row["tokens_per_second"] for name, row in found.items() if "tokens_per_second" in row}
    if "tokens_per_second" in auto and fitting:
        best = max(fitting, key=lambda name: fitting[name])
        again = run(best, by_hand[best], args.steps)
        share = auto["tokens_per_second"] / again["tokens_per_second"]
        print(f"auto took {auto['took']}, {share:.4f} of {best}", flush=True)
    for process in waiting:  # of a sweep that --seconds ended, or without its last setting
        process.process.kill()
    return 0 if rows[-1]["name"] != "auto" else 1


class Measuring:
    """A process that imports everything, and waits. It takes its GPU memory with it when it ends."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks", "automatic", "--measure"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def result(self, *arguments: Any) -> dict[str, Any]:
        """measure(*arguments)."""
        output, _ = self.process.communicate(json.dumps(arguments))
        try:
            return json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            return {"failed": f"exit status {self.process.returncode} without a result"}


def measure(file: str, overrides: list[str], warmup: int, steps: int) -> dict[str, Any]:
    """Tokens/s, what the run resolved on and its peak of memory; or `failed`, why there is none."""
    import torch

    from llmtrain.data.prepare import prepare
    from llmtrain.train.callbacks.checkpointing import Checkpointing
    from llmtrain.train.report.loggers import read_metrics
    from llmtrain.train.resolved import read_resolved
    from llmtrain.train.run import train

    folder = Path(tempfile.mkdtemp(prefix="automatic-"))
    seq_len = load_config(file, overrides).data.seq_len
    text = {"sources": ["stdlib"], "out": f"runs/automatic/{seq_len}", "vocab_size": VOCAB, "seq_len": seq_len}
    settings = [
        "data.train=null",
        "data.validation=null",
        f"data.prepare={json.dumps({**text, 'validation_fraction': 0})}",
        f"train.duration={warmup + steps} steps",
        "schedule={type: constant}",
        "logging={tensorboard: false, progress_bar: false}",
        f"run_dir={folder / 'run'}",
    ]
    config = load_config(file, [*overrides, *settings])
    assert config.data.prepare is not None
    prepare(config.data.prepare, progress=False)
    try:
        with patch.object(Checkpointing, "run_event", lambda *_: None):  # nothing of it is wanted
            train(config)
        _, seconds = read_metrics(folder / "run" / "metrics.jsonl", STEP)
        timed = seconds[-steps:]
        return {
            "took": read_resolved(folder / "run"),
            "tokens_per_second": config.tokens_per_step / statistics.median(timed),
            "seconds": timed,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        }
    except (RuntimeError, UserError, RunError) as error:  # an out-of-memory error of torch is the first
        return {"failed": str(error).strip().splitlines()[0][:300]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
