"""An exported model served by vLLM, beside `llmtrain generate`: throughput and latency over the batch.

    python -m benchmarks serving MODEL… --out OUT [--vllm PYTHON] [--set a.b=c …] [--batch 1 8 64] [--prompt 512] [--new 128]
        [--dtype bfloat16]

MODEL: a folder that `llmtrain export` wrote, or a run's YAML, whose model is exported with weights as at the start of training.
PYTHON: an interpreter that has vLLM, whose requirements are not llmtrain's; without it ours alone is measured. Random prompts,
greedy, no early end. Each program has a process of its own, one after the other. OUT gets serving.json, rewritten after each
model, serving.png, and each program's output. `same`: the share of rows in which the first eight tokens (--same) are equal.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.models import export_random
from benchmarks.harness.pictures import picture
from benchmarks.harness.report import rounded
from llmtrain.errors import RunError
from llmtrain.schema.load import load_config

# Both programs take a file with a job, and print a line of JSON for each batch: seconds for one new token and for all, and tokens.
_OURS = """
import json, statistics, sys, time
import torch
from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampling
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hf.load import load_hf

job = json.load(open(sys.argv[1]))
here = platform.detect()
model = load_hf(job["folder"], dtype=getattr(torch, job["dtype"]), platform=here).to(here.device_type)
model = CausalLM(model).eval()

def generate(prompts, new):
    steps = list(decode(model, prompts, Sampling(temperature=0), max_new_tokens=new))
    return [list(row) for row in zip(*steps, strict=True)]
"""
_VLLM = """
import json, os, statistics, sys, time
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # greedy decoding draws nothing, and flashinfer is large
from benchmarks.peers.triton_autotuning import compile_in_threads
from vllm import LLM, SamplingParams

compile_in_threads()
job = json.load(open(sys.argv[1]))
options = {"max_model_len": job["prompt"] + job["new"] + 8, "max_num_seqs": max(job["batch"]), "enable_prefix_caching": False}
options |= {"skip_tokenizer_init": True} | job["vllm"]
model = LLM(model=job["folder"], dtype=job["dtype"], **options)

def generate(prompts, new):
    options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
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

for prompts in job["prompts"]:
    generate(prompts, 2)
for batch, prompts in zip(job["batch"], job["prompts"], strict=True):
    generate(prompts, 2)
    first, _ = seconds(prompts, 1)
    whole, tokens = seconds(prompts, job["new"])
    print("MEASURED " + json.dumps({"batch": batch, "first": first, "whole": whole, "tokens": tokens}), flush=True)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", help="further settings of every YAML")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--vllm-options", type=json.loads, default={}, metavar="JSON", help="of vllm.LLM")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=positive, default=128, help="new tokens of each row, at least two")
    # Later ones differ where bf16 rounds two likely tokens to the same score.
    parser.add_argument("--same", type=positive, default=8, help="tokens of a row that are compared")
    parser.add_argument("--seconds", type=number, default=600, help="for each program of a model, at most")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args = parser.parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    programs = {"llmtrain": (sys.executable, _OURS)} | ({"vllm": (args.vllm, _VLLM)} if args.vllm else {})
    found, failed = [], False
    for model in args.models:
        job, rows = make_job(folder_of(model, args), args), dict[str, list[dict[str, Any]]]()
        for name, (python, program) in programs.items():
            try:
                rows[name] = measured(
                    [python, "-c", program + _MEASURE], job, args.out / f"{title(model)}-{name}", args.seconds
                )
            except RunError as error:
                print(f"{title(model)}, {name}: {error}", file=sys.stderr, flush=True)
                failed = True
        sizes = {"prompt": args.prompt, "new": args.new, "dtype": args.dtype}
        found.append({"model": title(model)} | sizes | figures(rows, args.new, args.same))
        (args.out / "serving.json").write_text(json.dumps(rounded(found), indent=1) + "\n", encoding="utf-8")
        if any(name in one for one in found for name in programs):
            plot(found, args.out / "serving.png")
        print(json.dumps(rounded(found[-1])), flush=True)
    return 1 if failed else 0


def title(model: Path) -> str:
    """The name of an exported model's folder, in which a dot ends nothing, or of a YAML."""
    return model.resolve().name if model.is_dir() else model.stem


def folder_of(model: Path, args: argparse.Namespace) -> Path:
    """The folder of an exported model. Of a YAML's, it is made under OUT."""
    if model.is_dir():
        return model.resolve()
    made = args.out / f"{model.stem}-exported"
    made.mkdir(exist_ok=True)
    export_random(load_config(str(model), args.set).model, made, getattr(torch, args.dtype))
    return made.resolve()


def measured(command: list[str], job: dict[str, Any], log: Path, seconds: float) -> list[dict[str, Any]]:
    """Run a program with a job, its output in `log`.txt. Returns a row per batch. Raises RunError, with its output's end, where
    it fails before the last batch or takes longer."""
    file, text = (log.with_name(f"{log.name}.{kind}") for kind in ("json", "txt"))
    file.write_text(json.dumps(job), encoding="utf-8")
    with (
        text.open("w", encoding="utf-8") as output,
        subprocess.Popen([*command, str(file)], stdout=output, stderr=output) as process,
    ):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    said = text.read_text(encoding="utf-8", errors="replace")
    lines = said.split("\n")[:-1]  # the last may be cut short
    rows = [json.loads(line.removeprefix("MEASURED ")) for line in lines if line.startswith("MEASURED ")]
    if len(rows) < len(job["batch"]):
        raise RunError(f"status {process.returncode} after {len(rows)} of {len(job['batch'])} batches\n{said[-3000:]}")
    return rows


def make_job(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rng = random.Random(0)
    prompts = [[[rng.randrange(vocab_size) for _ in range(args.prompt)] for _ in range(batch)] for batch in args.batch]
    sizes = {name: getattr(args, name) for name in ("batch", "prompt", "new", "dtype")}
    return {"folder": str(folder), "prompts": prompts, "vllm": args.vllm_options, **sizes}


def figures(rows: dict[str, list[dict[str, Any]]], new: int, same: int) -> dict[str, Any]:
    """Per program and batch: tokens per second of the whole request, milliseconds to the first token and for each further one;
    the share of rows whose first `same` tokens are equal."""
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
        ours, theirs = ([row[:same] for one in measured for row in one["tokens"]] for measured in rows.values())
        made["same"] = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    return made


def plot(found: list[dict[str, Any]], file: Path) -> None:
    """Tokens per second, and milliseconds of a further token, over the batch."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, ScalarFormatter

    labels = {"tokens_per_second": "tokens/s of whole requests", "further_ms": "ms for a further token"}
    batches = sorted({row["batch"] for one in found for row in one.get("llmtrain", [])})
    with picture(file, 1, 2, size=(9, 3.6)) as axes:
        for axis, (key, label) in zip(axes, labels.items(), strict=True):
            for color, one in enumerate(found):
                for name, style in (("llmtrain", "o-"), ("vllm", "s--")):
                    if rows := one.get(name):
                        points = [row["batch"] for row in rows], [row[key] for row in rows]
                        axis.plot(*points, style, color=f"C{color}", label=f"{one['model']}, {name}")
            axis.set(xlabel="batch", ylabel=label, xscale="log", yscale="log")
            axis.xaxis.set_major_locator(FixedLocator(batches))
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            for one in (axis.xaxis, axis.yaxis):
                one.set_minor_locator(NullLocator())
                one.set_major_formatter(ScalarFormatter())
        axes[0].legend(fontsize=7)
