"""Speed of the training loader beside a plain memory-mapped file of tokens, and the share of a step spent waiting for data.

`speed`: the same samples in the same order from MDS shards through the loader, and from one file of uint16 through numpy.memmap,
which is the least that any loader must do: read and widen to int64. In turn, so that neither has the warmer machine.

`wait`: `llmtrain train` from a store on this machine that answers after a delay, with an empty cache; the windows that are shuffled
together are small, so that shards are fetched during the whole run.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from benchmarks.harness.arguments import Parser, natural, number, positive
from benchmarks.harness.report import Report, metric_rows
from llmtrain.data.loader.loaders import TrainLoader, build_train_loader
from llmtrain.schema.data import DataConfig


def write_data(folder: Path, samples: int, seq_len: int, shard_bytes: int, vocab_size: int) -> Path:
    """Random tokens as MDS shards in FOLDER/shards and as one file FOLDER/tokens.bin. Returns the folder."""
    from streaming import MDSWriter

    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    columns = {"tokens": f"ndarray:uint16:{seq_len}"}
    with (
        (folder / "tokens.bin").open("wb") as flat,
        MDSWriter(out=str(folder / "shards"), columns=columns, hashes=["xxh64"], size_limit=shard_bytes) as shards,
    ):
        for _ in range(samples):
            tokens = rng.integers(0, vocab_size, seq_len).astype(np.uint16)
            flat.write(tokens.tobytes())
            shards.write({"tokens": tokens})
    return folder


def from_memmap(file: Path, seq_len: int, ids: np.ndarray) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of the samples in this order: [steps, batch]."""
    tokens = np.memmap(file, np.uint16, "r").reshape(-1, seq_len)
    for batch in ids:
        input_ids = torch.from_numpy(tokens[batch].astype(np.int64))
        labels = torch.full_like(input_ids, -100)
        labels[:, :-1] = input_ids[:, 1:]
        yield {"input_ids": input_ids, "labels": labels}


def seconds(batches: Iterator, steps: int) -> float:
    """Seconds for so many batches behind the first."""
    next(batches)
    began = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return time.perf_counter() - began


def speed(args: argparse.Namespace, report: Report) -> None:
    """Tokens per second of both, by the number of loader processes; medians of the rounds."""
    steps = args.samples // args.batch - 1
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = write_data(Path(folder), args.samples, args.seq_len, args.shard_mb << 20, 50_000)
        rates: dict[str, list[float]] = {"memmap": []} | {f"loader, {n} processes": [] for n in args.workers}
        for _ in range(args.rounds):
            for number in args.workers:
                loader = _loader(root / "shards", args, number)
                rates[f"loader, {number} processes"].append(args.batch * args.seq_len * steps / _timed(loader, steps))
            order = _loader(root / "shards", args, 0).dataset.order
            assert order is not None
            ids = order.ids(np.arange((steps + 1) * args.batch)).reshape(-1, args.batch)
            batches = from_memmap(root / "tokens.bin", args.seq_len, ids)
            rates["memmap"].append(args.batch * args.seq_len * steps / seconds(batches, steps))
    for name, found in rates.items():
        report.add(name, million_tokens_per_s=statistics.median(found) / 1e6)


def _loader(shards: Path, args: argparse.Namespace, workers: int) -> TrainLoader:
    data = {"seq_len": args.seq_len, "num_workers": workers, "train": {"streams": {"a": {"local": str(shards)}}}}
    return build_train_loader(DataConfig.model_validate(data), global_batch_size=args.batch)


def _timed(loader: TrainLoader, steps: int) -> float:
    try:
        with contextlib.closing(cast("Generator", iter(loader))) as batches:
            return seconds(batches, steps)
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]


def wait(args: argparse.Namespace, report: Report) -> None:
    """Share of the steps' time spent waiting for data, from the second step on, and the least and longest waits."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        samples = (args.steps + 16) * args.batch
        write_data(Path(folder, "bucket"), samples, args.seq_len, args.shard_mb << 20, 50_000)
        store = subprocess.Popen(
            [sys.executable, "-m", "tests.support.folder_store", folder, "--delay", str(args.delay)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert store.stdout
        try:
            keys = {"AWS_ACCESS_KEY_ID": "t", "AWS_SECRET_ACCESS_KEY": "t", "AWS_DEFAULT_REGION": "us-east-1"}
            environment = os.environ | keys | {"S3_ENDPOINT_URL": store.stdout.readline().strip()}
            stream = {"local": f"{folder}/cache", "remote": "s3://bucket/shards"}
            settings = {
                "name": "wait",
                "run_dir": f"{folder}/run",
                "data.train": {"streams": {"a": stream}},
                "data.validation": None,
                "data.seq_len": args.seq_len,
                "data.num_canonical_nodes": 1,
                "data.shuffle_block_size": args.window,
                "train.duration": f"{args.steps} steps",
                "schedule": {"type": "constant"},
                "train.global_batch_size": args.batch,
                "checkpoint.interval": "1000000 steps",
                "logging": {"interval": 1, "tensorboard": False, "wandb": None},
            }
            written = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
            subprocess.run(
                [sys.executable, "-m", "llmtrain.cli", "train", args.config, *written, *args.set, "--nproc", "1"],
                check=True,
                env=environment,
                stdout=sys.stderr,
            )
        finally:
            store.kill()
            store.wait()
        rows = metric_rows(Path(folder) / "run/metrics.jsonl", _WAIT)
        fetched = len(list(Path(folder, "cache").glob("*.mds")))
    steps = [(row["throughput/step_seconds"], row["throughput/data_wait_seconds"]) for row in rows]
    median, waits = statistics.median(step for step, _ in steps), [found for _, found in steps]
    report.add(
        f"waiting for data, {Path(args.config).stem}",
        share_percent=100 * sum(waits) / sum(step for step, _ in steps),
        least_ms=1e3 * min(waits),
        most_ms=1e3 * max(waits),
        step_s=median,
        tokens_per_s=args.batch * args.seq_len / median,
        steps_count=len(steps),
        fetched_shards_count=fetched,
    )


_WAIT = "throughput/data_wait_seconds"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of these words, or of the command line. Settings may stand between options, which argparse refuses of a list."""
    parser = Parser(__name__, __doc__)
    actions = parser.add_subparsers(dest="action", required=True, parser_class=argparse.ArgumentParser)
    fast = actions.add_parser("speed")
    fast.add_argument("--samples", type=positive, default=20_000)
    fast.add_argument("--workers", type=natural, nargs="+", default=[0, 1, 2])
    fast.add_argument("--rounds", type=positive, default=3)
    waiting = actions.add_parser("wait")
    waiting.add_argument("config", help="a YAML of llmtrain train; a.b=c, anywhere behind it, are further settings")
    waiting.add_argument("--steps", type=positive, default=80)
    waiting.add_argument("--delay", type=number, default=0.05, help="seconds before each answer of the store")
    waiting.add_argument("--window", type=positive, default=2048, help="samples that are shuffled together")
    for one in (fast, waiting):
        one.add_argument("--seq-len", type=positive, default=2048)
        one.add_argument("--batch", type=positive, default=256)
        one.add_argument("--shard-mb", type=positive, default=8)
        one.add_argument("--out", type=Path, metavar="FILE.json")
        one.add_argument("--folder", type=Path, help="for the data; default: that of temporary files")
    args, args.set = parser.parse_known_args(words)
    if unknown := [text for text in args.set if text.startswith("-") or "=" not in text or args.action == "speed"]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    (speed if args.action == "speed" else wait)(args, Report(args.out))
