"""Speed and memory of `llmtrain prepare`.

JSON lines of Python's standard library, with a tokenizer of 16,000 tokens that exists. Each number of workers runs twice, on the
text and on a fourth of it, so that the difference is without start-up. Several workers need 64 MB each, a partition. Run as a
file, with PYTHONPATH of another checkout, it measures that one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from llmtrain.errors import RunError, exit_with


def write_corpus(path: Path, nbytes: int) -> None:
    """A JSONL of about `nbytes` of text: documents of the standard library, as often as it takes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    with path.open("w", encoding="utf-8") as out:
        for file in itertools.cycle(files):
            nbytes -= out.write(json.dumps({"text": file.read_text(encoding="utf-8")}) + "\n")
            if nbytes <= 0:
                return


def run(sources: list[Path], out: Path, *options: str) -> dict[str, float]:
    """Seconds, CPU seconds and the largest process's memory of one `llmtrain prepare`."""
    command = [sys.executable, "-m", "llmtrain", "prepare", *map(str, sources), "--out", str(out), *options]
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RunError(f"{' '.join(command)} failed")
    seconds = time.perf_counter() - started
    return {"s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss / 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=64, help="MB of text per worker (default 64)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder / "first.jsonl", 4_000_000)
        run([folder / "first.jsonl"], folder / "first", "--vocab-size", "16000", "--validation-fraction", "0")
        options = ["--tokenizer", str(folder / "first/tokenizer"), "--validation-fraction", "0"]
        for workers in args.workers:
            size = args.mb * 1_000_000 * workers
            results = []
            for part in (size // 4, size):
                source, out = folder / "source.jsonl", folder / "out"
                write_corpus(source, part)
                found = run([source], out, *options, "--workers", str(workers))
                results.append(found | {"mb": source.stat().st_size / 1e6})
                shutil.rmtree(out)
            small, large = results
            mb = large["mb"] - small["mb"]
            print(
                f"{workers} workers: {mb / (large['s'] - small['s']):.2f} MB/s, "
                f"{mb / (large['cpu_s'] - small['cpu_s']):.2f} MB per CPU-second beyond start-up; {large['mb']:.0f} MB in "
                f"{large['s']:.1f} s, {large['cpu_s']:.1f} CPU-s, peak {large['peak_mb']:.0f} MB (of {small['mb']:.0f} MB: "
                f"{small['peak_mb']:.0f} MB)"
            )


if __name__ == "__main__":
    exit_with(main)
