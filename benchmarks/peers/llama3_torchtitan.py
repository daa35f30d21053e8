"""torchtitan's Llama 3 on the GPUs of this machine, beside which `benchmarks many_gpus` puts ours.

    python benchmarks/peers/llama3_torchtitan.py OUT.json --nproc 8 [--float8] [--seq-len 8192] [--batch 2] [--layers N]

Runs in a Python that has torchtitan (measured: 0.2.2) with datasets, torchdata, tyro, tomli, dill, multiprocess, docstring_parser,
typeguard, shtab and torchao. Its flavor 8B, compiled, without recomputation, a microbatch a step (or as many as --global-batch
makes), otherwise its defaults; float8: tensorwise with float8 all-gather and precomputed scales, head left out. Python's standard
library is the text, a small tokenizer of it the tokenizer; the vocabulary stays the model's. OUT.json: tokens per second and GPU
(median over the steps after `--warmup`), seconds of each step, losses, peak memory of rank 0.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

TEXT_BYTES = 12_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a GPU in a microbatch")
    parser.add_argument("--global-batch", type=int, help="sequences of a step (default: a microbatch each)")
    parser.add_argument("--steps", type=int, default=12, help="timed ones")
    parser.add_argument("--warmup", type=int, default=4, help="steps before")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--flavor", default="8B", help="debugmodel is good for a try without GPUs")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)  # all options, in a process of torchrun
    args = parser.parse_args()
    return start(args) if args.rank is None else rank(argparse.Namespace(**args.rank | {"out": args.out}))


def start(args: argparse.Namespace) -> int:
    """Has torchrun start the ranks in a folder with text and tokenizer. Returns torchrun's status."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder) / "text" / "data.json")
        train_tokenizer(Path(folder) / "text" / "data.json", Path(folder) / "tokenizer")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
        own = [str(Path(__file__).resolve()), str(args.out.resolve()), "--rank", json.dumps(vars(args), default=str)]
        caches = {"HF_HOME": f"{folder}/huggingface", "HF_HUB_OFFLINE": "1"}
        return subprocess.run([*command, *own], cwd=folder, env={**os.environ, **caches}).returncode


def write_text(file: Path) -> None:
    """JSON lines with the sources of the standard library."""
    file.parent.mkdir(parents=True)
    left = TEXT_BYTES
    with file.open("w", encoding="utf-8") as out:
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            left -= out.write(json.dumps({"text": source.read_text(encoding="utf-8", errors="replace")}) + "\n")
            if left < 0:
                return


def train_tokenizer(text: Path, folder: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    lines = (json.loads(line)["text"] for line in text.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    special = ["<s>", "</s>"]
    tokenizer.train_from_iterator(lines, vocab_size=4096, special_tokens=special, show_progress=False)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")


def rank(args: argparse.Namespace) -> int:
    """One rank: torchtitan's own training, each of whose steps is noted when it logs it, which waits for the GPU."""
    sys.argv = [sys.argv[0], *settings(args)]  # torchtitan reads it when it is imported
    import torch
    from torchtitan.components.metrics import MetricsProcessor  # type: ignore[import-not-found]
    from torchtitan.models.llama3 import llama3_args  # type: ignore[import-not-found]
    from torchtitan.train import Trainer  # type: ignore[import-not-found]
    from torchtitan.train import main as train  # type: ignore[import-not-found]

    while (turn := os.environ.get("TURN")) and not Path(
        turn
    ).exists():  # benchmarks many_gpus says when the GPUs are free
        time.sleep(0.05)
    llama3_args[args.flavor].n_layers = args.layers
    ends, losses, peaks, log = [time.perf_counter()], [], [], MetricsProcessor.log

    def noted(self: object, step: int, global_avg_loss: float, *rest: object, **named: object) -> None:
        ends.append(time.perf_counter())
        losses.append(float(global_avg_loss))
        peaks.append(torch.cuda.max_memory_allocated())  # log forgets it
        log(self, step, global_avg_loss, *rest, **named)

    MetricsProcessor.log = noted
    train(Trainer)
    if os.environ["RANK"] == "0":
        seconds = [end - begin for begin, end in itertools.pairwise(ends)]
        step = statistics.median(seconds[args.warmup :])
        sequences = args.global_batch / args.nproc if args.global_batch else args.batch
        found = {
            "tokens_per_second_per_gpu": sequences * args.seq_len / step,
            "step_seconds": seconds,
            "losses": losses,
            "peak_gib": max(peaks) / 2**30,
            "precision": "tensorwise" if args.float8 else "bf16",
            "gpus": args.nproc,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        }
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def settings(args: argparse.Namespace) -> list[str]:
    """Arguments of torchtitan.train."""
    found = {
        "model.name": "llama3",
        "model.flavor": args.flavor,
        "model.hf_assets_path": "tokenizer",
        "training.dataset_path": "text",
        "training.local_batch_size": args.batch,
        "training.global_batch_size": args.global_batch or args.batch * args.nproc,
        "training.seq_len": args.seq_len,
        "training.steps": args.warmup + args.steps,
        "metrics.log_freq": 1,
        "activation_checkpoint.mode": "none",
    }
    flags = ["--compile.enable"]
    if args.float8:
        float8 = "quantize.linear.float8"
        found |= {"model.converters": "quantize.linear.float8", f"{float8}.filter_fqns": "output"}
        flags += [f"--{float8}.enable_fsdp_float8_all_gather", f"--{float8}.precompute_float8_dynamic_scale_for_fsdp"]
    return [*(f"--{name}={value}" for name, value in found.items()), *flags]


if __name__ == "__main__":
    sys.exit(main())
