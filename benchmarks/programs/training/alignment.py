"""Supervised fine-tuning and then DPO on made-up conversations, by `llmtrain train`: whether the model learns, and goes on alike.

    python -m benchmarks alignment FILE.yaml [a.b=c …] --out FOLDER [--sft-steps 800] [--dpo-steps 300] \\
        [--dpo-lr 2e-6] [--records 300000]

The model of FILE, with random weights, learns to answer: letters in reverse and in order, sums, and facts about people who do not
exist. Answers have one of two forms; DPO then prefers the shorter one. Questions are never repeated: those held out are new.
Half way, and 25 steps after a checkpoint, the first run is killed, and its metrics are kept; what the resumed one logs of the same
steps is compared bit by bit. Settings are of both runs, but for DPO's rate. FOLDER gets sft/ and dpo/, the runs with their
pictures, and alignment.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.report import device_name, metric_rows

AFTER = 25
"""Steps after the checkpoint that both runs make."""
LONG = 0.6
"""Share of the answers that have the longer form, so that a fine-tuned model prefers it."""
TIMED = ("throughput/", "memory/", "step/", "checkpoint/", "time", "rank/")
"""Metrics that differ from run to run."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sft-steps", type=positive, default=800)
    parser.add_argument("--dpo-steps", type=positive, default=300)
    parser.add_argument("--dpo-lr", type=number, default=2e-6)
    parser.add_argument("--records", type=positive, default=300_000, help="conversations; pairs are a quarter as many")
    args = parser.parse(argv)
    began, out = time.monotonic(), args.out
    out.mkdir(parents=True, exist_ok=True)
    write_records(out, args.records)
    found: dict[str, Any] = {"device": device_name(), "settings": args.overrides}
    found["sft"] = resumed(command(args, "sft", args.sft_steps), out / "sft", args.sft_steps // 2)
    found["sft"] |= told(out / "sft")
    write(out, found)
    if not (out / "sft" / "checkpoints").is_dir():
        return 1
    run(command(args, "dpo", args.dpo_steps), out / "dpo.txt").wait()
    found["dpo"] = told(out / "dpo")
    found["seconds"] = round(time.monotonic() - began)
    write(out, found)
    return 0 if found["sft"]["equal"] else 1


def write(out: Path, found: dict[str, Any]) -> None:
    text = json.dumps(found, indent=1)
    (out / "alignment.json").write_text(text + "\n")
    print(text, flush=True)


def questions(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Endless questions with their answers. Letters and digits stand apart, so that each is a token."""
    people = [
        f"{a}{b}" for a in ("Al", "Be", "Ca", "Do", "El", "Fa", "Gi", "Ha") for b in ("ra", "nor", "mit", "sel", "dun")
    ]
    facts = {(one, of): rng.choice(COLOURS) for one in people for of in ASKED}
    while True:
        kind = rng.randrange(4)
        letters = rng.choices(string.ascii_lowercase, k=rng.randint(3, 7))
        if kind == 0:
            yield f"Reverse {' '.join(letters)}", " ".join(reversed(letters))
        elif kind == 1:
            yield f"Sort {' '.join(letters)}", " ".join(sorted(letters))
        elif kind == 2:
            a, b = rng.randrange(1000), rng.randrange(1000)
            yield f"Add {' '.join(str(a))} and {' '.join(str(b))}", " ".join(str(a + b))
        else:
            one, of = rng.choice(list(facts))
            yield f"I am {' '.join(letters[:5])} . What is the {of} of {one} ?", facts[one, of]


COLOURS = "red green blue yellow black white brown grey".split()  # noqa: SIM905
ASKED = "hat coat house boat door lamp".split()  # noqa: SIM905


def write_records(out: Path, count: int) -> None:
    """chats.jsonl and pairs.jsonl, without a question in common."""
    rng, seen, pairs = random.Random(1), set[str](), count // 4
    with (out / "chats.jsonl").open("w") as chats, (out / "pairs.jsonl").open("w") as of_pairs:
        for question, answer in questions(rng):
            if question in seen:
                continue
            seen.add(question)
            long = f"Let me think . The answer is {answer} ."
            if len(seen) <= count:
                said = {"role": "assistant", "content": long if rng.random() < LONG else answer}
                chats.write(json.dumps({"messages": [{"role": "user", "content": question}, said]}) + "\n")
                continue
            asked = [{"role": "user", "content": question}]
            given = {"chosen": answer, "rejected": long}
            made = {name: [{"role": "assistant", "content": text}] for name, text in given.items()}
            of_pairs.write(json.dumps({"prompt": asked, **made}) + "\n")
            if len(seen) == count + pairs:
                return


def command(args: Any, name: str, steps: int) -> list[str]:
    """Words of the command `llmtrain train`."""
    out, every = args.out, max(steps // 16, 1)
    settings = {
        "name": name,
        "run_dir": out / name,
        "train.duration": f"{steps} steps",
        "data.mask_documents": "true",
        "data.train": "null",
        "data.validation": "null",
        "data.prepare.out": out / "data" / name,
        "data.prepare.seq_len": "${data.seq_len}",
        "data.prepare.validation_fraction": 0.02,
        "data.prepare.chat.template": "chatml",
        "schedule.warmup": "10 %",
        "eval.interval": f"{every} steps",
        "eval.max_samples": 64,
        "eval.samples": f"{{interval: {every} steps, questions: 128, max_new_tokens: 40}}",
        "checkpoint.interval": f"{steps // 2} steps",
    }
    if name == "sft":
        settings |= {"data.prepare.sources": f"[{out / 'chats.jsonl'}]", "data.prepare.vocab_size": 384}
        settings |= {"objective": "completion"}
    else:
        settings |= {"data.prepare.sources": f"[{out / 'pairs.jsonl'}]", "init_from": out / "sft"}
        settings |= {"data.prepare.tokenizer": out / "data" / "sft" / "tokenizer", "objective": "preference"}
    given = [f"{key}={value}" for key, value in settings.items()]
    last = [] if name == "sft" else [f"optimizer.lr={args.dpo_lr}", "optimizer.weight_decay=0"]
    return [sys.executable, "-m", "llmtrain.cli", "train", args.file, *given, *args.overrides, *last]


def run(words: Sequence[str], log: Path) -> subprocess.Popen:
    with log.open("ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)


def resumed(words: Sequence[str], folder: Path, middle: int) -> dict[str, Any]:
    """Train up to some steps after the checkpoint of step `middle`, kill the run, train on to the end. Returns what is equal."""
    log, metrics = folder.with_suffix(".txt"), folder / "metrics.jsonl"
    process = run(words, log)
    while process.poll() is None:
        time.sleep(0.2)
        rows = metric_rows(metrics, "loss/train/cross_entropy")
        saved = any((folder / "checkpoints").glob(f"*{middle}*/manifest.json"))
        if rows and rows[-1]["step"] >= middle + AFTER and saved:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {row["step"]: row for row in metric_rows(metrics, "loss/train/cross_entropy")}
    run(words, log).wait()
    after = {row["step"]: row for row in metric_rows(metrics, "loss/train/cross_entropy")}
    steps = [step for step in range(middle + 1, middle + AFTER + 1) if step in before and step in after]
    different = {
        name
        for step in steps
        for name in before[step].keys() & after[step].keys()
        if not name.startswith(TIMED) and before[step][name] != after[step][name]
    }
    compared = sorted({name for step in steps for name in before[step] if not name.startswith(TIMED)})
    said = "resumed from" in log.read_text(errors="replace")
    return {
        "killed_at_step": max(before, default=0),
        "checkpoint": middle,
        "steps_compared": len(steps),
        "metrics_compared": compared,
        "different": sorted(different),
        "equal": said and len(steps) == AFTER and not different,
    }


def told(folder: Path) -> dict[str, Any]:
    """Figures of a run: first and last of its curves, medians of its speed."""
    rows = metric_rows(folder / "metrics.jsonl")
    found: dict[str, Any] = {"steps": max((row["step"] for row in rows), default=0)}
    for name in ("samples/exact_match", "rewards/accuracies", "rewards/margins", "loss/train/total"):
        values = [row[name] for row in rows if name in row]
        if values:
            found[name] = [values[0], values[-1]]
    name = "throughput/tokens_per_second"
    speeds = sorted(row[name] for row in rows if name in row)
    if speeds:
        found["tokens_per_second"] = {"lowest": speeds[0], "median": speeds[len(speeds) // 2], "highest": speeds[-1]}
    peaks = [row["memory/peak_allocated_gib"] for row in rows if "memory/peak_allocated_gib" in row]
    return found | ({"peak_gib": max(peaks)} if peaks else {})


if __name__ == "__main__":
    sys.exit(main())
