"""`microbatch_size: auto` with `activation_checkpointing: auto`, beside a sweep of both by hand, for one model on this machine.

    python -m benchmarks automatic FILE [a.b=c …] --sweep none:8,16 selective:16 full:32 [--seq-len N] [--steps 20] --out FILE.json

Each setting is trained by `llmtrain bench train`, one after another: those of the sweep (kind of checkpointing, sizes of a
microbatch) for --short steps, `auto` for --steps, and then the best of the sweep again for as many; while one is measured, the next
imports what it needs. What has been measured is kept beside FILE.json, and the same command goes on; --seconds ends the sweep, but
not the two at the end, after so many.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import Parser, natural, number, positive
from benchmarks.harness.report import Report, Row
from benchmarks.harness.turns import Program, bench_train, take_turns

AUTOMATIC = ["train.microbatch_size=auto", "train.activation_checkpointing={type: auto}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("--sweep", nargs="+", required=True, metavar="KIND:SIZE,…")
    parser.add_argument("--seq-len", type=positive, metavar="N", help="default: the YAML's")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--short", type=positive, default=4)
    parser.add_argument("--warmup", type=natural, default=3)
    parser.add_argument("--seconds", type=number, default=1e9)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse(argv)
    out: Path = args.out.absolute().with_suffix("")
    out.mkdir(parents=True, exist_ok=True)
    by_hand = {
        f"{kind}-{size}": [f"train.microbatch_size={size}", f"train.activation_checkpointing={{type: {kind}}}"]
        for kind, _, sizes in (text.partition(":") for text in args.sweep)
        for size in sizes.split(",")
    }
    sweep = {"models": [args.file], "warmup": max(args.warmup, 1)}
    sweep |= {"seq_lens": [args.seq_len]} if args.seq_len else {}

    def program(name: str, settings: list[str], steps: int) -> Program:
        return bench_train(out, name, sweep | {"steps": steps, "settings": [*args.overrides, *settings]}, 1, 600)

    def write() -> None:
        report = Report(args.out, quiet=True)
        for name in (*by_hand, "auto", "best"):
            if row := result(out / name):
                report.add(name, **row)

    short = [program(name, settings, args.short) for name, settings in by_hand.items()]
    began = time.monotonic()
    take_turns(short, out, 1, args.seconds, write, threads=8)
    speeds = {name: row["tokens_per_s"] for name in by_hand if (row := result(out / name))}
    best = max(speeds, key=lambda name: speeds[name], default=None)
    last = [program("auto", AUTOMATIC, args.steps)]
    last += [program("best", by_hand[best], args.steps)] if best else []
    status = take_turns(last, out, 1, 1e9, write, threads=8)
    if (auto := result(out / "auto")) and (again := result(out / "best")):
        share = auto["tokens_per_s"] / again["tokens_per_s"]
        print(f"auto took {auto['took']}, {share:.4f} of {best}; {time.monotonic() - began:.0f} s", flush=True)
    return status


def result(folder: Path) -> Row:
    """Speed, peak of memory and what was taken; empty where there is none, as of a setting that does not fit."""
    from llmtrain.bench.train.command import RESULTS, read_results

    found = [one for one in read_results(folder / RESULTS).values() if "error" not in one]
    if not found:
        return {}
    took = f"{found[-1]['checkpointing']}, {found[-1]['microbatch_size']}"
    return {"tokens_per_s": found[-1]["tokens_per_second"], "peak_gib": found[-1]["peak_gib"], "took": took}
