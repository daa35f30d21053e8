"""Memory (on Linux) and time of `llmtrain export` and `llmtrain import`, beside the largest file that they write and read.

    python -m benchmarks conversion FILE FOLDER [a.b=c …] [--dtype bfloat16] [--max-shard-size 5GB] [--filled 0.125]

A checkpoint of FILE's model is made without training, exported, and imported again; FOLDER is where all three go. Each command
has a process of its own, and its figure is the peak of resident memory, pages of mapped files included, above that after the same
conversion of a tiny model. Values are random and exact in bf16: what comes back must be what was made, and is compared number by
number. The exit status is 1 if they differ, or a peak is above twice the largest exported file.
--filled: the share of each tensor that is not zero. Zeros take no room on the disk in the two folders that are read, where
`fallocate --dig-holes` is there: an 8B at 0.125 needs 40 GB instead of 81.
"""

import json
import math
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.arguments import Parser, number
from benchmarks.harness.report import Report
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import Manifest
from llmtrain.checkpoint.repository import Repository
from llmtrain.convert.checkpoint_tensors import CheckpointTensors
from llmtrain.convert.lazy_checkpoint import LazyTensor, write_parameters
from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.errors import RunError
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Weight, family_for_model
from llmtrain.schema.load import load_config

RUN = 2**18
"""Elements of a tensor of which the first ones are random and the others zero."""
PIECE = 2**24
"""Elements that are compared at a time."""
# The tiny conversion comes first: the peak that it leaves is that of the interpreter with everything imported. getrusage's peak
# begins with that of the parent process, VmHWM (proc_pid_status(5)) does not.
_PROGRAM = """
import json, re, sys
from llmtrain.cli import main

peaks = []
for arguments in json.loads(sys.argv[1]):
    if status := main(arguments):
        sys.exit(status)
    peaks.append(1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]))
print("PEAKS", *peaks)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True, out=True)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--filled", type=number, default=1.0)
    args = parser.parse(argv)
    config = load_config(args.file, args.overrides).model
    args.folder.mkdir(parents=True)
    made, exported, again = (args.folder / name for name in ("made", "exported", "again"))
    make_checkpoint(made, config, partial(random_runs, args.filled))
    punch_holes(made)
    tiny = args.folder / "tiny"
    make_checkpoint(tiny, _tiny(), partial(random_runs, 1.0))
    options = ["--dtype", args.dtype, "--max-shard-size", args.max_shard_size]
    tiny_exported, tiny_again, report = tiny.with_name("tiny-exported"), tiny.with_name("tiny-again"), Report(args.out)
    exporting = convert(["export", tiny, tiny_exported], ["export", made, exported, *options])
    bound = 2 * max(file.stat().st_size for file in exported.glob("model*.safetensors"))
    punch_holes(exported)
    importing = convert(["import", tiny_exported, tiny_again], ["import", exported, again])
    for verb, found in (("export", exporting), ("import", importing)):
        figures = {"memory_mb": found["peak_bytes"] / 1e6, "bound_gb": bound / 1e9, "time_s": found["seconds"]}
        report.add(f"{Path(args.file).stem}: {verb}", **figures, interpreter_mb=found["interpreter_bytes"] / 1e6)
    same = args.dtype != "float16" and equal(made, again)
    print("what came back is the same" if same else "what came back DIFFERS", flush=True)
    return 0 if same and all(one["peak_bytes"] <= bound for one in (exporting, importing)) else 1


def make_checkpoint(folder: Path, config: ModelConfig, value: Callable[[Weight, int], Tensor]) -> None:
    """Write a checkpoint of step 1, a tensor at a time, with a tokenizer. value: (weight, its number) -> its tensor."""
    folder.mkdir(parents=True)
    save_id = str(uuid.uuid4())
    lazy = [
        LazyTensor(weight.ours, weight.shape, partial(value, weight, number))
        for number, weight in enumerate(family_for_model(config).weights(config))
    ]
    files = write_parameters(folder, lazy, progress=lambda size: None, save_id=save_id)
    train_bpe(["the quick brown fox jumps over a lazy dog " * 20], 270).save(folder / "tokenizer")
    content = {"model": config.model_dump(mode="json"), "data": {"prepare": None, "train": None}}
    manifests.write(
        folder, Manifest(save_id=save_id, step=1, tokens=8, config=content, clock={}, data={}, versions={}, files=files)
    )


def random_runs(filled: float, weight: Weight, seed: int) -> Tensor:
    """Normal numbers as bf16 holds them, in the first part of every run of elements, and zeros."""
    g = torch.Generator().manual_seed(seed)
    made = torch.zeros(math.prod(weight.shape))
    for run in made.split(RUN):
        some = run[: math.ceil(filled * RUN)]
        some.copy_(torch.randn(some.shape, generator=g).bfloat16())
    return made.reshape(weight.shape)


def _tiny() -> ModelConfig:
    blocks = {"m": {"type": "mamba2", "d_state": 16, "head_dim": 16}}
    return ModelConfig.model_validate({"vocab_size": 300, "d_model": 32, "blocks": blocks, "layers": "m"})


def punch_holes(folder: Path) -> None:
    """Give back to the disk what the tensors' zeros take; the bytes that are read stay the same."""
    if shutil.which("fallocate"):
        for file in folder.glob("*.safetensors"):
            subprocess.run(["fallocate", "--dig-holes", file], check=False)


def convert(tiny: Sequence[str | Path], large: Sequence[str | Path]) -> dict[str, float]:
    """Peak of resident memory of the second command above that after the first, and seconds. Raises RunError if one fails."""
    commands = json.dumps([[str(word) for word in command] for command in (tiny, large)])
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _PROGRAM, commands], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RunError(f"llmtrain {large[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    before, peak = map(int, done.stdout.split("PEAKS", 1)[1].split())
    return {"peak_bytes": peak - before, "interpreter_bytes": before, "seconds": seconds}


def equal(one: Path, other: Path) -> bool:
    """Compare two checkpoints of the same model, number by number."""
    mine, theirs = (CheckpointTensors(*Repository(folder).open()) for folder in (one, other))
    if sorted(mine.names("")) != sorted(theirs.names("")):
        return False
    for name in mine.names(""):
        size = math.prod(mine.shape(name) or ())
        counts = [min(PIECE, size - at) for at in range(0, size, PIECE)]
        if not all(map(torch.equal, mine.elements(name, counts), theirs.elements(name, counts))):
            return False
    return True
