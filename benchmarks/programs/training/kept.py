"""Speed of several GPUs together beside that of each alone, these at the same time: tokens/s per GPU, and the share that is kept.

    python -m benchmarks kept OUT --gpus 2 --case FILE SEQ_LEN MICROBATCH GLOBAL_BATCH [--case …] [--steps 20] [--seconds 540]

Each case is trained by `llmtrain bench train` with the same batch on all GPUs and on one; the ranks of the next program import what
they need meanwhile. What is measured is kept in OUT: the same command goes on. OUT/kept.json has each case's speed and what is kept
of every single GPU's.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import Parser, natural, number, positive
from benchmarks.harness.report import Report, Row
from benchmarks.harness.turns import Program, bench_train, take_turns


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=positive, default=2)
    parser.add_argument("--case", nargs=4, action="append", required=True, dest="cases", metavar="VALUE")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--warmup", type=natural, default=2, help="steps before, without the first one")
    parser.add_argument("--seconds", type=number, default=540)
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", dest="settings")
    args = parser.parse(argv)
    for case in args.cases:
        case[1:] = map(positive, case[1:])
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    cases = [Case(out, args.gpus, *case) for case in args.cases]
    common = {"steps": args.steps, "warmup": args.warmup}
    programs = [program for case in cases for program in case.programs(common, args.settings)]

    def write() -> None:
        report = Report(out / "kept.json")
        for case in cases:
            if row := case.result():
                report.add(case.name, **row)

    return take_turns(programs, out, args.gpus, args.seconds, write, threads=8)


class Case:
    """A model with its batch, on all GPUs and on each."""

    def __init__(self, out: Path, gpus: int, file: str, seq_len: int, microbatch: int, global_batch: int) -> None:
        self.out, self.file, self.seq_len = out, file, seq_len
        self.batch = [f"train.microbatch_size={microbatch}", f"train.global_batch_size={global_batch}"]
        self.name = f"{Path(file).stem}-{seq_len}-{microbatch}-{global_batch}"
        self.folders = {f"{self.name}-together": gpus} | {f"{self.name}-alone{number}": 1 for number in range(gpus)}

    def programs(self, common: dict[str, int], settings: list[str]) -> list[Program]:
        sweep = {"models": [self.file], "seq_lens": [self.seq_len], "settings": [*self.batch, *settings], **common}
        return [bench_train(self.out, name, sweep | {"gpus": [gpus]}, gpus, 300) for name, gpus in self.folders.items()]

    def result(self) -> Row:
        """Tokens/s per GPU of all together and of each alone, and the shares kept; empty until there is one."""
        from llmtrain.bench.train.command import RESULTS, read_results

        row: Row = {}
        for name in self.folders:
            runs = [run for run in read_results(self.out / name / RESULTS).values() if "error" not in run]
            if runs:
                part = name.removeprefix(f"{self.name}-")
                row[f"{part}_tokens_per_s"] = speed = runs[-1]["tokens_per_second_per_gpu"]
                if part != "together" and "together_tokens_per_s" in row:
                    row[f"kept_{part}_percent"] = 100 * row["together_tokens_per_s"] / speed
        return row
