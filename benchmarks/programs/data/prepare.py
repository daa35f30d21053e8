"""Speed and memory of `llmtrain prepare`, beside other programs.

JSON lines of Python's standard library and of the installed packages, each source file once in 64 MiB, and as many links to
that file as it takes, each a partition of its own; a tokenizer of 16,000 tokens that exists. Each program runs on a smaller and
on a larger corpus, and the difference is its speed beyond start-up. Before each run as much memory is used once as it may need:
in a virtual machine the first use of a page costs some 15 microseconds, whichever program comes first. The peers need an
environment of their own: see peers/prepare.py.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import Parser, positive
from benchmarks.harness.cores import hash_rates, physical_cores
from benchmarks.harness.report import Report
from llmtrain.errors import RunError

FILE_BYTES = 64 << 20
"""Text of a file: a partition (PARTITION_BYTES of llmtrain/data/partitions/cutting.py), so that all workers have equal shares."""
STARTUP_BYTES = 3 << 30
"""Memory that the largest of the programs needs beside its files."""
WRITTEN = 0.6
"""Bytes that the programs write for each byte of text, at most."""
PEERS = ("datasets", "datatrove", "megatron")
SMALL_FILE_MB = 8
"""That of programs that take a second for each MB."""


def write_corpus(path: Path, nbytes: int) -> None:
    """A JSONL of at most about `nbytes` of text: the sources of the standard library and the installed packages, each once."""
    paths = sysconfig.get_paths()
    with path.open("w", encoding="utf-8") as out:
        for file in (file for root in (paths["stdlib"], paths["purelib"]) for file in sorted(Path(root).rglob("*.py"))):
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            nbytes -= out.write(json.dumps({"text": text}) + "\n")
            if nbytes <= 0:
                return


def pad(path: Path, nbytes: int) -> None:
    """Make a file of JSON lines exactly so long: its last line is left out, or has spaces before its end."""
    content = path.read_bytes()
    content = content[: content.rfind(b"\n", 0, nbytes)]
    path.write_bytes(content + b" " * (nbytes - len(content) - 1) + b"\n")


def use_memory(nbytes: int) -> None:
    """Use so many bytes of memory once, in processes of their own, one for each CPU: what this one has used counts for its
    children."""
    code = "import mmap, sys; pages = mmap.mmap(-1, int(sys.argv[1]))\nfor page in range(0, len(pages), 4096): pages[page] = 1"
    cpus = len(os.sched_getaffinity(0))
    command = [sys.executable, "-c", code, str(nbytes // cpus + 1)]
    for child in [subprocess.Popen(command) for _ in range(cpus)]:
        if child.wait():
            raise RunError("no memory to use")


def link_corpus(folder: Path, file: Path, count: int) -> Path:
    """A folder of `count` links to a file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number in range(count):
        os.link(file, folder / f"{number:04}.jsonl")
    return folder


def run(*command: str, cores: Sequence[int] = ()) -> dict[str, float]:
    """Seconds, CPU seconds and the largest process's memory of a command. cores: the CPUs that it keeps to; any, if none."""
    started = time.perf_counter()
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=pin)
    assert child.stderr
    errors = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RunError(f"{' '.join(command)} failed: {errors[-2000:].decode(errors='replace')}")
    seconds = time.perf_counter() - started
    return {"s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss / 1000}


def prepare(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "llmtrain", "prepare", *arguments]


def command_of(program: str, args: argparse.Namespace, corpus: Path, folder: Path, workers: int) -> list[str]:
    """Command of a program that prepares the corpus into FOLDER/out. program: a peer, or llmtrain and its compression."""
    name, _, compression = program.partition(" ")
    out, tokenizer = str(folder / "out"), str(folder / "first" / "tokenizer")
    if name != "llmtrain":
        script = str(Path(__file__).parents[2] / "peers" / "prepare.py")
        megatron = [str(args.megatron)] if name == "megatron" else []
        return [str(args.peers), script, name, str(corpus), out, tokenizer, str(workers), *megatron]
    command = prepare(str(corpus), "--out", out, "--tokenizer", tokenizer, "--workers", str(workers))
    return [*command, "--tokenizer-engine", args.engine, "--compression", compression, "--validation-fraction", "0"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__name__, __doc__, out=True)
    parser.add_argument("--files", type=positive, default=4, help="of 64 MiB per worker beyond the smaller corpus")
    parser.add_argument("--workers", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--engine", default="auto", help="tokenizer engine")
    parser.add_argument("--compression", nargs="+", default=["none"], help="of our shards; MDSWriter's too")
    parser.add_argument("--programs", nargs="+", default=["llmtrain"], choices=["llmtrain", *PEERS])
    parser.add_argument("--pin", action="store_true", help="as many cores as workers, one thread of each")
    parser.add_argument("--peers", type=Path, metavar="PYTHON", help="of an environment that holds the peers")
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    args = parser.parse(argv)
    if args.peers is None and set(args.programs) & set(PEERS):
        parser.error(f"--programs {' '.join(args.programs)}: --peers is needed")
    report, ours = Report(args.out), [f"llmtrain {compression}" for compression in args.compression]
    programs = [one for name in args.programs for one in (ours if name == "llmtrain" else [name])]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file, small_file = folder / "file.jsonl", folder / "small.jsonl"
        write_corpus(file, FILE_BYTES + 4_000_000)
        pad(file, FILE_BYTES)
        write_corpus(small_file, SMALL_FILE_MB * 1_000_000)
        write_corpus(folder / "first.jsonl", 4_000_000)
        options = ("--vocab-size", "16000", "--validation-fraction", "0")
        run(*prepare(str(folder / "first.jsonl"), "--out", str(folder / "first"), *options))
        all_cores = physical_cores() if args.pin else []
        for workers in args.workers:
            cores, turns = all_cores[:workers], dict.fromkeys(programs, 0)
            for program in programs:
                fast = program.startswith(("llmtrain", "megatron"))
                few = max(workers, 5) if fast else workers  # beyond 256 MB contents are not hashed
                more, chosen, results = workers * args.files, file if fast else small_file, []
                for count in (few, few + more):
                    corpus = link_corpus(folder / "corpus", chosen, count)
                    use_memory(STARTUP_BYTES + int(WRITTEN * count * chosen.stat().st_size))
                    results.append(run(*command_of(program, args, corpus, folder, workers), cores=cores))
                    shutil.rmtree(folder / "out")
                small, large = results
                mb, turns[program] = more * chosen.stat().st_size / 1e6, turns[program] + 1
                report.add(
                    f"{program}, {workers} workers, turn {turns[program]}",
                    mb_per_s=mb / (large["s"] - small["s"]),
                    mb_per_cpu_s=mb / (large["cpu_s"] - small["cpu_s"]),
                    with_startup_cpu_s=large["cpu_s"],
                    with_startup_mb=(few + more) * chosen.stat().st_size / 1e6,
                    process_mb=large["peak_mb"],
                    hashing_mb_per_s=sum(hash_rates(cores, 1.0)) if cores else None,
                )
