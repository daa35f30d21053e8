"""Scaling of the work of `llmtrain prepare` with processes on this machine, beside what the machine itself allows.

    python -m benchmarks.prepare_scaling --processes 1 2 4 8 16

Each kind of work runs in so many processes at the same time for a moment, everything in memory but `prepare`, which makes
partitions of a file as a worker does:

- `cpu`: hashing a kilobyte again and again, which needs nothing but a core;
- `memory`: copying arrays larger than any cache;
- `tokenizer`: gigatoken, of the texts alone;
- `zstd`: compressing their tokens;
- `prepare`: reading, tokenizing, packing, compressing, hashing and writing.

Printed: the rate of all processes, its ratio to what as many of the first number given would reach, and the CPU time of a MB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from benchmarks.cores import busy, describe, hash_megabytes, physical_cores
from benchmarks.prepare import write_corpus
from llmtrain.data.partitions.cutting import Partition
from llmtrain.data.partitions.maker import MakeSettings, PartitionMaker
from llmtrain.data.partitions.report import REPORTS, SPLITS
from llmtrain.data.sources.files import list_files
from llmtrain.data.sources.records import Slice
from llmtrain.data.tokenize.encode import DocumentMarks
from llmtrain.data.tokenize.engine_choice import EngineChoice
from llmtrain.data.tokenize.engines import GigatokenEngine
from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.errors import exit_with

PARTITION_MB = 16


def cpu(_: Path) -> Callable[[], float]:
    def work() -> float:
        return 0.02 * hash_megabytes(0.02)

    return work


def memory(_: Path) -> Callable[[], float]:
    source = np.ones(64_000_000, np.uint8)
    target = source.copy()

    def work() -> float:
        np.copyto(target, source)
        return len(source) / 1e6

    return work


def texts_of(corpus: Path, megabytes: int = PARTITION_MB) -> list[str]:
    texts, left = [], megabytes * 1_000_000
    with corpus.open("rb") as lines:
        while left > 0 and (line := lines.readline()):
            texts.append(orjson.loads(line)["text"])
            left -= len(line)
    return texts


def tokenizer(folder: Path) -> Callable[[], float]:
    texts, engine = texts_of(folder / "file.jsonl"), GigatokenEngine((folder / "tokenizer.json").read_text())
    megabytes = sum(map(len, texts)) / 1e6

    def work() -> float:
        for _ in engine.encode(texts):
            pass
        return megabytes

    return work


def zstd(folder: Path) -> Callable[[], float]:
    texts, engine = texts_of(folder / "file.jsonl"), GigatokenEngine((folder / "tokenizer.json").read_text())
    content = np.concatenate(list(engine.encode(texts))).astype(engine.dtype).tobytes()
    megabytes = sum(map(len, texts)) / 1e6

    def work() -> float:
        zstandard.ZstdCompressor(level=3).compress(content)
        return megabytes

    return work


def prepare(folder: Path) -> Callable[[], float]:
    [file] = list_files([str(folder / "file.jsonl")])
    out = folder / f"out-{os.getpid()}"
    for name in (*SPLITS, REPORTS):
        (out / name).mkdir(parents=True)
    settings = MakeSettings(
        folder=out,
        tokenizer=(folder / "tokenizer.json").read_text(),
        engine=EngineChoice("gigatoken", sizes=True),
        marks=DocumentMarks(0),
        vocab_size=16_000,
        seq_len=2048,
        packing="concatenate",
        compression="zstd",
        text_key="text",
        seed=17,
        validation_fraction=0.0,
    )
    maker, step, made = PartitionMaker(settings, lambda nbytes: None), PARTITION_MB * 1_000_000, 0

    def work() -> float:
        nonlocal made
        begin = made % (file.size // step) * step
        made += 1
        maker(Partition(str(made % 4), [Slice(file, begin, begin + step)]))
        return step / 1e6

    return work


WORK = {"cpu": cpu, "memory": memory, "tokenizer": tokenizer, "zstd": zstd, "prepare": prepare}


def run(names: list[str], folder: Path, seconds: float, core: int | None, barrier: Any, results: Any) -> None:
    """Put (MB/s, CPU seconds per MB) of one process after the other for each work. core: the CPU that it keeps to."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    os.environ["RAYON_NUM_THREADS"] = "1"
    for name in names:
        work = WORK[name](folder)
        work()
        barrier.wait()
        started, cpu_started, done = time.perf_counter(), time.process_time(), 0.0
        while (elapsed := time.perf_counter() - started) < seconds:
            done += work()
        elapsed = time.perf_counter() - started
        results.put((name, done / elapsed, (time.process_time() - cpu_started) / done))
        barrier.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=list(WORK))
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--pin", action="store_true", help="each process to a core of its own, on one of its threads")
    parser.add_argument(
        "--busy", action="store_true", help="with --pin: the cores that are left hash, so that all have one clock"
    )
    parser.add_argument("--json", type=Path, help="gets the figures")
    args = parser.parse_args()
    context, found = get_context("spawn"), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder / "file.jsonl", 64_000_000)
        made = train_bpe(texts_of(folder / "file.jsonl", 4), 16_000)
        (folder / "tokenizer.json").write_text(made.backend.to_str())
        first: dict[str, float] = {}
        cores = physical_cores() if args.pin else []
        print(describe(), flush=True)
        for count in args.processes:
            barrier, results = context.Barrier(count), context.Queue()
            processes = [
                context.Process(
                    target=run, args=(args.work, folder, args.seconds, cores[n] if cores else None, barrier, results)
                )
                for n in range(count)
            ]
            stack = contextlib.ExitStack()
            stack.enter_context(busy(cores[count:] if args.busy else []))
            for process in processes:
                process.start()
            for name in args.work:
                reported = [results.get(timeout=120) for _ in processes]
                assert {other for other, _, _ in reported} == {name}
                rate, cost = sum(one[1] for one in reported), sum(one[2] for one in reported) / count
                linear = rate / (count * first.setdefault(name, rate / count))
                found.append({"work": name, "processes": count, "mb_s": rate, "of_linear": linear, "cpu_s_mb": cost})
                print(
                    f"{name:10} {count:3} processes: {rate:9.1f} MB/s, {linear:.2f} of linear, {1000 * cost:.2f} CPU-ms per MB",
                    flush=True,
                )
                if args.json:
                    args.json.write_text(json.dumps(found, indent=1))
            for process in processes:
                process.join()
            stack.close()


if __name__ == "__main__":
    exit_with(main)
