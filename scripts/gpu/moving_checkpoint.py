"""A run that moves: over GPU counts, kernels and onto a CPU, every 50 steps, beside one that stays.

    python scripts/gpu/moving_checkpoint.py OUT [--part prepare,whole,moving,report] [a.b=c …]

Trains yamls/bench/moving-25m.yaml twice: `whole` on the GPUs of `--whole`, `moving` in legs, each a start of its own
that continues from the checkpoint of the one before. Then draws OUT/moving.png (both losses, and their difference), writes
OUT/moving.json, and prints the largest difference and whether every step saw the same samples.

Each part goes on where it was cut short, so the parts may run in several calls, or all in one. SIGTERM, as `timeout` sends
it, or a leg that fails ends the training early; what there is by then is reported all the same. Exit status 0: both
runs are whole and saw the same samples. A leg is written
`2a` (2 GPUs, kernel set a), `1b` or `cpu` (reference kernels); `--legs` is repeated to the
end. Without GPUs every leg runs on CPU processes, which is good for a try: add model.d_model=64 and the like.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

from llmtrain.checkpoint.repository import Repository
from llmtrain.distributed.launch import launch
from llmtrain.errors import Preempted, RunError, UserError, exit_with
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

FILE = Path(__file__).parents[2] / "yamls" / "bench" / "moving-25m.yaml"
PARTS = ("prepare", "whole", "moving", "report")
REFERENCE = {"attention": "reference", "ssd": "reference"}
BLOCKS = {"attention": "a", "ssd": "m"}
"""Block of the YAML with the backend of each operation."""


class Ended(RunError):
    """Training ended early; the message says why."""


def main() -> int:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rank:
        return _rank(args)
    config = _config(args, args.out / "whole")  # errors in the overrides come first
    signal.signal(signal.SIGTERM, _terminated)
    status = 0
    try:
        _parts(args, config)
    except Ended as error:
        print(f"ended early: {error}", file=sys.stderr, flush=True)
        status = 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a report takes seconds
    return max(status, _report(args, config)) if "report" in args.part else status


def _terminated(*_: object) -> None:
    raise Ended("SIGTERM")


def _parts(args: argparse.Namespace, config: Config) -> None:
    sets = {name: dict(pair.split("=") for pair in getattr(args, name).split(",")) for name in "ab"}
    if "prepare" in args.part:
        from llmtrain.data.prepare import prepare

        assert config.data.prepare is not None
        print(prepare(config.data.prepare, progress=False).summary(), flush=True)
    if "whole" in args.part:
        _train(args, "whole", [args.whole], sets, every=None)
    if "moving" in args.part:
        _train(args, "moving", args.legs.split(","), sets, every=args.every)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the YAML's, in both runs")
    parser.add_argument("--part", default=",".join(PARTS), metavar="PART,…")
    parser.add_argument("--whole", default="2a", metavar="LEG")
    parser.add_argument("--legs", default="2a,1b,cpu", metavar="LEG,LEG,…")
    parser.add_argument("--every", type=int, default=50, help="steps of a leg")
    parser.add_argument("--a", default="attention=sdpa,ssd=triton", metavar="OP=BACKEND,…")
    parser.add_argument("--b", default="attention=triton,ssd=reference", metavar="OP=BACKEND,…")
    cores = min(16, len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--threads", type=int, default=cores, help="of all ranks of a leg together (default: %(default)s)"
    )
    parser.add_argument("--rank", nargs=2, metavar=("RUN", "STOP"), help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    args.part = args.part.split(",")
    if unknown := set(args.part) - set(PARTS):
        parser.error(f"--part: no {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return args


def _config(args: argparse.Namespace, run_dir: Path) -> Config:
    return load_config(FILE, [*args.overrides, f"run_dir={run_dir}"])


def _train(
    args: argparse.Namespace, run: str, legs: list[str], sets: dict[str, dict[str, str]], every: int | None
) -> None:
    run_dir = args.out / run
    config = _config(args, run_dir)
    total = int(config.train.duration.value)
    every = every or total
    interval = int(config.checkpoint.interval.value)
    if every % interval:
        raise UserError(f"--every {every}: must be a multiple of checkpoint.interval ({interval} steps)")
    for number, leg in zip(range(-(-total // every)), itertools.cycle(legs), strict=False):
        stop = min((number + 1) * every, total)
        at = _step(run_dir)
        if at >= stop:
            continue
        devices, kernels = ("", REFERENCE) if leg == "cpu" else (leg[:-1], sets[leg[-1]])
        changes = [f"model.blocks.{BLOCKS[name]}.backend={backend}" for name, backend in kernels.items()]
        size = int(devices or 1)
        variables = {"CUDA_VISIBLE_DEVICES": ""} if leg == "cpu" else {}
        # A container may see more cores than it has, and threads beyond those wait for each other by spinning.
        variables["OMP_NUM_THREADS"] = str(max(args.threads // size, 1))
        micro = min(config.train.microbatch_size, config.train.global_batch_size // size)
        changes.append(f"train.microbatch_size={micro}")
        began = time.perf_counter()
        print(
            f"{run}: steps {at + 1} to {stop} on {leg}: {', '.join(f'{k} {v}' for k, v in kernels.items())}", flush=True
        )
        command = [sys.executable, __file__, str(args.out), *args.overrides, *changes, "--rank", run, str(stop)]
        with patch.dict("os.environ", variables):
            status = launch(command, size, str(run_dir))
        seconds, reached = time.perf_counter() - began, _step(run_dir)
        if reached > at:
            with (args.out / "legs.jsonl").open("a") as file:
                entry = {"run": run, "leg": leg, "from": at, "to": reached, "seconds": round(seconds, 1)}
                file.write(json.dumps(entry | {"kernels": kernels}) + "\n")
        if status or reached != stop:
            raise Ended(f"{run} on {leg}: exit status {status} at step {reached} of {stop}; see {run_dir}/logs")
        print(f"{run}: {leg} took {seconds:.1f} s", flush=True)


def _step(run_dir: Path) -> int:
    """Step of the newest complete checkpoint; 0 when there is none."""
    found = Repository(run_dir / "checkpoints").newest(warn=print)
    return found.step if found else 0


def _rank(args: argparse.Namespace) -> int:
    """One rank of a leg: trains to step STOP, as if it were killed there, just after its checkpoint."""
    run, stop = args.rank
    config = _config(args, args.out / run)
    from composer.core import State
    from composer.loggers import Logger, LoggerDestination
    from composer.utils import dist

    from llmtrain.train import run as training
    from llmtrain.train.worker import silence_warnings

    class Interrupted(Exception):
        pass

    class Recorder(LoggerDestination):
        """Logger of the samples that each step sees, over all ranks; ends the leg."""

        def batch_start(self, state: State, logger: Logger) -> None:
            step = state.timestamp.batch.value
            if step == int(stop):
                raise Interrupted
            ids = sorted(itertools.chain(*dist.all_gather_object(state.batch["sample_ids"].tolist())))
            if dist.get_global_rank() == 0:
                with (args.out / f"{run}-samples.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step + 1, "ids": ids}) + "\n")

    silence_warnings()
    build, status = training.build_loggers, 0
    with patch.object(training, "build_loggers", lambda *a: [*build(*a), Recorder()]), contextlib.suppress(Interrupted):
        try:
            training.train(config)
        except Preempted as error:
            print(error)
            status = error.status
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # with the group of an interrupted run


def _report(args: argparse.Namespace, config: Config) -> int:
    """Report the steps that both runs have taken. Returns 0 when those are all, and saw the same samples."""
    import matplotlib

    from llmtrain.train.report.loggers import read_metrics

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs, total = ("whole", "moving"), int(config.train.duration.value)
    files = [args.out / name for run in runs for name in (f"{run}/metrics.jsonl", f"{run}-samples.jsonl")]
    if absent := [str(file) for file in files if not file.exists()]:
        print(f"nothing to compare yet: there is no {', '.join(absent)}", file=sys.stderr)
        return 1
    losses = {
        run: dict(zip(*read_metrics(args.out / run / "metrics.jsonl", "loss/train/total"), strict=True)) for run in runs
    }
    steps = sorted(losses["whole"].keys() & losses["moving"].keys())
    if not steps:
        print("nothing to compare yet: no step was taken by both runs", file=sys.stderr)
        return 1
    difference = {step: abs(losses["whole"][step] - losses["moving"][step]) for step in steps}
    worst = max(steps, key=difference.__getitem__)
    seen = {run: _samples(args.out / f"{run}-samples.jsonl") for run in runs}
    same = all(seen["whole"].get(step, "?") == seen["moving"].get(step) for step in steps)
    legs_file = args.out / "legs.jsonl"
    legs = list(map(json.loads, legs_file.read_text().split("\n")[:-1])) if legs_file.exists() else []
    legs = [leg for leg in legs if leg["run"] == "moving"]
    result = {
        "steps": len(steps),
        "of": total,
        "largest_difference": difference[worst],
        "relative": difference[worst] / losses["whole"][worst],
        "at_step": worst,
        "sample_ids_identical": same,
        "final_loss": {run: found[steps[-1]] for run, found in losses.items()},
        "legs": legs,
    }
    (args.out / "moving.json").write_text(json.dumps(result, indent=1) + "\n")

    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(9, 6), height_ratios=(2, 1), layout="constrained")
    top.plot(
        steps,
        [losses["whole"][step] for step in steps],
        linewidth=3,
        color="0.75",
        label=f"uninterrupted ({args.whole})",
    )
    top.plot(steps, [losses["moving"][step] for step in steps], linewidth=1, color="tab:red", label="moving")
    bottom.semilogy(steps, [max(difference[step], 1e-9) for step in steps], linewidth=1, color="tab:red")
    for leg in legs:
        for axes in (top, bottom):
            axes.axvspan(leg["from"], leg["to"], color="tab:blue", alpha=0.08 if leg["from"] // args.every % 2 else 0)
        names = "\n".join(f"{name} {backend}" for name, backend in leg["kernels"].items())
        top.text(
            (leg["from"] + leg["to"]) / 2,
            1.01,
            f"{leg['leg']}\n{names}",
            transform=top.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=6,
        )
    top.set(ylabel="training loss (nats per token)")
    top.legend(loc="lower left")
    bottom.set(xlabel="step", ylabel="|difference|")
    figure.suptitle(
        f"{len(steps)} of {total} steps; largest difference {difference[worst]:.2e} at step {worst}; "
        f"sample ids {'identical' if same else 'DIFFER'}",
        fontsize=10,
    )
    figure.savefig(args.out / "moving.png", dpi=130)
    print(
        f"{len(steps)} of {total} steps, {len(legs)} legs: largest difference of the loss {difference[worst]:.3e} "
        f"({result['relative']:.1e} relative) at step {worst}; sample ids {'identical in every step' if same else 'DIFFER'}"
    )
    return 0 if same and steps == list(range(1, total + 1)) else 1


def _samples(file: Path) -> dict[int, list[int]]:
    """Ids by step. A step that was run twice, after a leg was cut short, must have seen the same."""
    found: dict[int, list[int]] = {}
    for line in map(json.loads, file.read_text().split("\n")[:-1]):
        if found.setdefault(line["step"], line["ids"]) != line["ids"]:
            raise UserError(f"{file}: step {line['step']} saw other samples the second time")
    return found


if __name__ == "__main__":
    exit_with(main)
