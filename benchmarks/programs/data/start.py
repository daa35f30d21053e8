"""Start and resume of a run over very many samples: the time until the loader gives its first batch, and the memory of its process.

    python -m benchmarks start --shards 100000 --samples 10000 --processes 2

    python -m benchmarks start --together 8

Writes the index alone, of shards that do not exist, so what is measured ends where the first sample would be read: the ids of the
first batches, from the beginning and from a step in the middle, which are the same for any numbers of ranks and workers. Processes
run one after the other; the first of a machine makes the table of the index that the others map. `--together`: then as many at
once, the ranks of a node, and the memory that all of them hold together, beside as many that import the same modules alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import Parser, positive
from benchmarks.harness.report import Report

RANKS = (1, 2, 3, 6, 8, 24)
WORKERS = (1, 3)
BATCH = 1008
"""Samples of a step: divided by all of RANKS, and near 1,024."""


def write_index(folder: Path, shards: int, samples: int, seq_len: int = 2048) -> None:
    """The index of shards that do not exist, in the form that `prepare` writes."""
    folder.mkdir(parents=True)
    size = 2 * seq_len
    about = {
        "version": 2,
        "format": "mds",
        "compression": "zstd",
        "hashes": ["xxh64"],
        "size_limit": 1 << 26,
        "column_names": ["tokens"],
        "column_encodings": [f"ndarray:uint16:{seq_len}"],
        "column_sizes": [size],
        "samples": samples,
    }

    def part(number: int, ending: str, nbytes: int) -> dict[str, object]:
        hashes = {"xxh64": f"{number:016x}"}
        return {"basename": f"{number:016x}.00000.mds{ending}", "bytes": nbytes, "hashes": hashes}

    raw, packed = samples * (size + 4) + 1000, samples * size // 2
    with (folder / "index.json").open("w", encoding="utf-8") as file:
        file.write('{"version": 2, "shards": [')
        for number in range(shards):
            entry = about | {"raw_data": part(number, "", raw), "zip_data": part(number, ".zstd", packed)}
            file.write("," * (number > 0) + json.dumps(entry, sort_keys=True))
        file.write("]}")


def memory_of(process: int | str, kind: str = "Pss_Anon") -> int:
    """Bytes of memory of a process, its part of what it shares included. kind: `Pss` for all; `Pss_Anon` for what it has allocated
    itself."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def measure(folder: Path | None, step: int) -> dict[str, float]:
    """Start and resume in this process. folder: None to import the modules alone. step: of the resume."""
    from llmtrain.data.loader.loaders import build_train_loader
    from llmtrain.data.loader.worker_samples import Reader, WorkerSamples
    from llmtrain.data.shards.checks import data_fingerprint
    from llmtrain.schema.data import DataConfig

    if folder is None:
        return {}
    streams = {"streams": {"a": {"local": str(folder)}}}
    config = DataConfig.model_validate({"seq_len": 2048, "num_workers": 0, "train": streams})
    imported, began, cpu_began = memory_of("self"), time.perf_counter(), time.process_time()
    dataset = build_train_loader(config, global_batch_size=BATCH).dataset
    order = dataset.order
    assert order is not None
    order.ids(np.arange(BATCH))
    started, cpu_started = time.perf_counter(), time.process_time()
    expected = order.ids(np.arange(step * BATCH, (step + 2) * BATCH)).reshape(2, BATCH)
    resumed = time.perf_counter()
    for ranks in RANKS:
        for workers in WORKERS:
            for rank in range(ranks):
                for worker in range(min(workers, 2)):
                    reader = Reader(rank, ranks, worker, workers)
                    mine = WorkerSamples(order, reader, begin=0, done=step * BATCH, size=dataset.epoch_size)
                    here = [mine[place] for place in range(BATCH // ranks)]
                    share = expected[worker, rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
                    assert here == share.tolist(), (ranks, workers, rank)
    compared = time.perf_counter()
    data_fingerprint(config)
    memory = memory_of("self")
    return {
        "start_s": started - began,
        "start_cpu_s": cpu_started - cpu_began,
        "resume_s": resumed - started,
        "fingerprint_s": time.perf_counter() - compared,
        "allocated_mb": memory >> 20,
        "loader_mb": (memory - imported) >> 20,
    }


def together(count: int, command: list[str]) -> dict[str, Any]:
    """The slowest start of so many processes at once, and the megabytes that all hold when the last has ended its start."""
    children = [
        subprocess.Popen([*command, "--hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        found = [json.loads(child.stdout.readline()) for child in children if child.stdout]
        kinds = {"all": "Pss", "allocated": "Pss_Anon", "of_files": "Pss_File", "shared": "Pss_Shmem"}
        held = {name: sum(memory_of(child.pid, kind) for child in children) >> 20 for name, kind in kinds.items()}
    finally:
        for child in children:
            child.communicate()
    slowest = {"slowest_start_s": max(one["start_s"] for one in found)} if found[0] else {}
    return slowest | {f"{name}_mb": mb for name, mb in held.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--shards", type=positive, default=100_000)
    parser.add_argument("--samples", type=positive, default=10_000, help="of a shard")
    parser.add_argument("--step", type=positive, default=700_000, help="of the resume")
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--together", type=positive, help="ranks of a node, measured behind the others")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--imports", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse(argv)
    if args.inside or args.imports:
        print(json.dumps(measure(args.inside, args.step)), flush=True)
        if args.hold:
            sys.stdin.read()
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "data")
        write_index(folder, args.shards, args.samples)
        os.environ["TMPDIR"] = temporary
        program = [sys.executable, "-m", "benchmarks", "start"]
        command = [*program, "--inside", str(folder), "--step", str(args.step)]
        report = Report(args.out)
        for process in range(1, args.processes + 1):
            began = time.perf_counter()
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found = json.loads(done.stdout.splitlines()[-1])
            report.add(f"process {process} of the machine", process_s=time.perf_counter() - began, **found)
        if args.together:
            report.add(f"{args.together} processes, imports alone", **together(args.together, [*program, "--imports"]))
            report.add(f"{args.together} processes together", **together(args.together, command))
