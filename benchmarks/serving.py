"""An exported model served by vLLM, beside `llmtrain generate`: throughput and latency over the batch.

    python -m benchmarks.serving FOLDER… --out OUT [--vllm PYTHON] [--batch 1 8 64] [--prompt 512] [--new 128] [--dtype bfloat16]

FOLDER: what `llmtrain export` wrote. PYTHON: an interpreter that has vLLM, whose requirements are not llmtrain's; without it ours
alone is measured. Random prompts, greedy, no early end; ours and vLLM's one after the other, each in a process of its own. OUT gets
serving.json, rewritten after each model, and serving.png. `same`: the share of rows in which the first eight tokens are equal.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import rounded
from llmtrain.errors import RunError, exit_with

COMPARED = 8
"""Tokens of a row that are compared: later ones differ where bf16 rounds two likely tokens to the same score."""
# Both programs take a job in JSON and print, for each batch, a line of JSON: seconds for one new token and for all, and tokens.
_OURS = """
import json, statistics, sys, time
import torch
from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampling
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hf.load import load_hf

job = json.loads(sys.argv[1])
here = platform.detect()
model = load_hf(job["folder"], dtype=getattr(torch, job["dtype"]), platform=here).to(here.device_type)
model = CausalLM(model).eval()

def generate(prompts, new):
    steps = list(decode(model, prompts, Sampling(temperature=0), max_new_tokens=new))
    return [list(row) for row in zip(*steps, strict=True)]
"""
_VLLM = """
import json, statistics, sys, time
from vllm import LLM, SamplingParams

job = json.loads(sys.argv[1])
length = job["prompt"] + job["new"] + 8
options = {"max_model_len": length, "max_num_seqs": max(job["batch"]), "enable_prefix_caching": False}
model = LLM(model=job["folder"], dtype=job["dtype"], **options)

def generate(prompts, new):
    options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in prompts], options, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]
"""
_MEASURE = """
def seconds(prompts, new):
    found = []
    for _ in range(3):
        began = time.perf_counter()
        tokens = generate(prompts, new)  # ends with the tokens on the host
        assert all(len(row) == new for row in tokens)
        found.append(time.perf_counter() - began)
    return statistics.median(found), tokens

for batch, prompts in zip(job["batch"], job["prompts"], strict=True):
    generate(prompts, 2)
    first, _ = seconds(prompts, 1)
    whole, tokens = seconds(prompts, job["new"])
    print("MEASURED " + json.dumps({"batch": batch, "first": first, "whole": whole, "tokens": tokens}), flush=True)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each row, at least two")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    found, failed = [], False
    for folder in args.folders:
        job = make_job(folder.resolve(), args)
        runs = {"llmtrain": (sys.executable, _OURS)} | ({"vllm": (args.vllm, _VLLM)} if args.vllm else {})
        rows: dict[str, list[dict[str, Any]]] = {}
        for name, (python, program) in runs.items():
            try:
                rows[name] = measure(python, program + _MEASURE, job)
            except RunError as error:
                print(f"{folder.name}, {name}: {error}", file=sys.stderr, flush=True)
                failed = True
        found.append(
            {"model": folder.name, "prompt": args.prompt, "new": args.new, "dtype": args.dtype}
            | figures(rows, args.new)
        )
        (args.out / "serving.json").write_text(json.dumps(rounded(found), indent=1) + "\n", encoding="utf-8")
        plot(found, args.out / "serving.png")
        print(json.dumps(rounded(found[-1])), flush=True)
    return 1 if failed else 0


def make_job(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rng = random.Random(0)
    prompts = [[[rng.randrange(vocab_size) for _ in range(args.prompt)] for _ in range(batch)] for batch in args.batch]
    sizes = {name: getattr(args, name) for name in ("batch", "prompt", "new", "dtype")}
    return {"folder": str(folder), "prompts": prompts, **sizes}


def measure(python: str, program: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per batch. Raises RunError, with the end of its output, for a program that fails before the last batch."""
    done = subprocess.run([python, "-c", program, json.dumps(job)], capture_output=True, text=True, check=False)
    lines = [line.removeprefix("MEASURED ") for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if done.returncode:
        raise RunError(
            f"status {done.returncode} after {len(lines)} of {len(job['batch'])} batches\n{done.stderr[-3000:]}"
        )
    return [json.loads(line) for line in lines]


def figures(rows: dict[str, list[dict[str, Any]]], new: int) -> dict[str, Any]:
    """Per program and batch: tokens per second of the whole request, milliseconds to the first token and for each further one."""
    made: dict[str, Any] = {
        name: [
            {
                "batch": row["batch"],
                "tokens_per_second": row["batch"] * new / row["whole"],
                "first_ms": 1000 * row["first"],
                "further_ms": 1000 * (row["whole"] - row["first"]) / (new - 1),
            }
            for row in measured
        ]
        for name, measured in rows.items()
    }
    if len(rows) == 2:
        ours, theirs = ([row[:COMPARED] for one in measured for row in one["tokens"]] for measured in rows.values())
        made["same"] = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    return made


def plot(found: list[dict[str, Any]], file: Path) -> None:
    """Tokens per second, and milliseconds of a further token, over the batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    labels = {"tokens_per_second": "tokens/s of whole requests", "further_ms": "ms for a further token"}
    for color, one in enumerate(found):
        for name, style in (("llmtrain", "o-"), ("vllm", "s--")):
            rows = one.get(name, [])
            for axis, key in zip(axes, labels, strict=True):
                values = [row[key] for row in rows]
                axis.plot(
                    [row["batch"] for row in rows], values, style, color=f"C{color}", label=f"{one['model']}, {name}"
                )
    for axis, label in zip(axes, labels.values(), strict=True):
        axis.set(xlabel="batch", ylabel=label, xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    exit_with(main)
