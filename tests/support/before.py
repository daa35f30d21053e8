"""The runs of tests/data/before: trained, continued, read, scored and exported by an earlier llmtrain, that of commit c4da82d
(runs.tar.xz) or c36547c (muon.tar.xz).

As a program it makes an archive anew, with the llmtrain that PYTHONPATH names (only its commands are used):

    PYTHONPATH=OLD_CHECKOUT python tests/support/before.py tests/data/before/runs.tar.xz

An archive holds a project folder: shards, a tokenizer, three tasks, and for each of its models NAME.yaml and NAME/, a run stopped
at step 4 of 8 on as many ranks as RANKS says; expected.json holds what that llmtrain makes of them.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

STEPS = 8
UNPUBLISHED = ("hybrid",)
"""Models of no class in transformers."""
ARCHIVES = {"runs": {"zamba": 1, "mpt": 2}, "muon": {"hybrid": 2}}
"""Models of each archive, with the ranks that trained the first half."""
RANKS = {name: ranks for models in ARCHIVES.values() for name, ranks in models.items()}
_SAVED = 4
_WORDS = "the quick brown fox jumps over a lazy dog while seven wizards make toxic brew for evil queens".split()  # noqa: SIM905
_SHARED: dict[str, Any] = {
    "seed": 3,
    "data": {
        "seq_len": 32,
        "num_workers": 0,
        "train": {"streams": {"text": {"local": "shards", "split": "train"}}},
        "validation": {"streams": {"text": {"local": "shards", "split": "validation"}}},
    },
    "train": {"duration": f"{STEPS} steps", "global_batch_size": 8, "microbatch_size": 4, "compile": "off"},
    "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
    "schedule": {"type": "cosine", "warmup": "2 steps"},
    "eval": {"interval": f"{STEPS} steps", "max_samples": 8},
    "checkpoint": {"interval": f"{_SAVED} steps", "keep_last": None},
    "logging": {"tensorboard": False, "progress_bar": False},
}
_MODELS: dict[str, dict[str, Any]] = yaml.safe_load("""
zamba:
  vocab_size: 300
  d_model: 32
  max_seq_len: 32
  blocks:
    m: {type: mamba2, d_state: 8, head_dim: 16, chunk_size: 16}
    s:
      type: shared_attention
      n_heads: 2
      n_shared: 1
      position: {type: rotary}
      attn_adapter_rank: 4
      mlp: {type: geglu, d_ff: 48}
      adapter_rank: 4
  layers: "m (s+m m)*2"
mpt:
  vocab_size: 300
  d_model: 32
  max_seq_len: 32
  norm: {type: layernorm}
  blocks: {attn: {type: attention, n_heads: 2, position: {type: alibi}, mlp: {type: gelu, d_ff: 128}}}
  layers: "attn*2"
hybrid:
  vocab_size: 300
  d_model: 32
  max_seq_len: 32
  tie_embeddings: false
  blocks:
    g: {type: gated_deltanet, n_heads: 2, key_head_dim: 8, value_head_dim: 16}
    a: {type: attention, n_heads: 2, n_kv_heads: 1, position: {type: rotary}, mlp: {type: swiglu, d_ff: 64}}
  layers: g a g
""")
_MORE: dict[str, dict[str, Any]] = {
    "hybrid": {
        "train": _SHARED["train"] | {"ema": {"decay": 0.9}},
        "optimizer": {"type": "muon", "lr": 3e-3, "groups": [{"match": "*.A_log", "lr_factor": 0.5}]},
    }
}
"""Other settings than the shared ones."""


def llmtrain(folder: Path, *arguments: str) -> str:
    """Standard output of a command run in a folder, on one thread."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "llmtrain.cli", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(run: Path) -> dict[str, float]:
    """{step: loss} of a run's metrics.jsonl; at the last step of validation too, as "validation"."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss/train/total" in record:
            found[str(record["step"])] = record["loss/train/total"]
        if "metrics/validation/cross_entropy" in record:
            found["validation"] = record["metrics/validation/cross_entropy"]
    return found


def train(folder: Path, *arguments: str, ranks: int) -> None:
    llmtrain(folder, "train", *arguments, "--nproc", str(ranks))


def continued(folder: Path, name: str, ranks: int, train: Callable[..., None] = train) -> dict[str, float]:
    """Losses of steps 5 to 8 of a copy of the run, continued on so many ranks."""
    run_dir = f"{name}-on-{ranks}"
    shutil.copytree(folder / name, folder / run_dir)
    train(folder, f"{name}.yaml", f"run_dir={run_dir}", ranks=ranks)
    found = losses(folder / run_dir)
    return {step: loss for step, loss in found.items() if step == "validation" or int(step) > _SAVED}


Command = Callable[..., str]
"""Run a command of llmtrain in the project folder given first; its standard output."""


def generated(folder: Path, name: str, command: Command = llmtrain) -> list[str]:
    """Greedy completions of prompts.txt, plain and with a penalty that keeps them from repeating one token."""
    options = ("--file", "prompts.txt", "--temperature", "0", "--max-new-tokens", "24")
    lines = [command(folder, "generate", name, *options, *more) for more in ((), ("--repetition-penalty", "1.5"))]
    return [json.loads(line)["completion"] for line in "".join(lines).splitlines()]


def scored(folder: Path, name: str, command: Command = llmtrain) -> dict[str, float]:
    """{task shots: value} of the tasks of eval.yaml."""
    command(folder, "eval", "eval.yaml", f"model={name}", "--out", f"{name}-results")
    content = json.loads((folder / f"{name}-results" / "results.json").read_text())
    return {f"{one['task']} {one['shots']}": one["value"] for one in content["results"]}


def exported(folder: Path, name: str, command: Command = llmtrain) -> dict[str, str]:
    """sha256 of every file of the export."""
    command(folder, "export", name, f"{name}-hf")
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / f"{name}-hf").iterdir())
    }


def make(folder: Path, models: dict[str, int]) -> None:
    """Fill a folder with the project, the runs of step 4 and expected.json."""
    rng = random.Random(0)
    words = lambda count: " ".join(rng.choice(_WORDS) for _ in range(count))  # noqa: E731
    (folder / "text").mkdir()
    for i in range(40):
        (folder / "text" / f"{i:02}.txt").write_text(words(55))
    options = ["--vocab-size", "300", "--seq-len", "32", "--validation-fraction", "0.2", "--workers", "1"]
    llmtrain(folder, "prepare", "text", "--out", "shards", *options)
    shutil.rmtree(folder / "text")
    choices = [
        {"query": words(8), "choices": [words(2) for _ in range(4)], "gold": rng.randrange(4)} for _ in range(12)
    ]
    cloze = [{"context": words(8), "continuation": words(1)} for _ in range(12)]
    texts = [{"text": words(60)} for _ in range(3)]
    tasks = {
        "choice": ("multiple_choice", choices),
        "cloze": ("language_modeling", cloze),
        "text": ("perplexity", texts),
    }
    for name, (kind, records) in tasks.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / f"{name}.yaml").write_text(
            json.dumps({"name": name, "type": kind, "source": {"path": f"{name}.jsonl"}})
        )
    names = [f"{name}.yaml" for name in tasks]
    (folder / "eval.yaml").write_text(json.dumps({"name": "before", "tasks": names, "cache": None}))
    (folder / "prompts.txt").write_text("the quick brown\nseven wizards\na\n")
    expected: dict[str, Any] = {}
    for name, ranks in models.items():
        settings = {"name": name, "run_dir": name, "model": _MODELS[name]} | _SHARED | _MORE.get(name, {})
        (folder / f"{name}.yaml").write_text(json.dumps(settings))
        llmtrain(folder, "train", f"{name}.yaml", "--nproc", str(ranks))
        whole = losses(folder / name)
        shutil.rmtree(folder / name / "checkpoints" / f"step-{STEPS:08d}")
        lines = (folder / name / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / name / "metrics.jsonl").write_text("".join(x for x in lines if json.loads(x)["step"] <= _SAVED))
        expected[name] = {f"losses on {n}": continued(folder, name, n) for n in (1, 2)}
        same = {step: whole[step] for step in expected[name][f"losses on {ranks}"]}
        assert expected[name][f"losses on {ranks}"] == same, "resumed and uninterrupted differ"
        expected[name] |= {
            "generated": generated(folder, name),
            "scored": scored(folder, name),
            "exported": exported(folder, name) if name not in UNPUBLISHED else {},
        }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))


def main(out: str) -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, models = Path(temporary), ARCHIVES[Path(out).name.partition(".")[0]]
        make(folder, models)
        kept = ["shards", "prompts.txt", "eval.yaml", "expected.json", *models, *(f"{name}.yaml" for name in models)]
        kept += [f"{task}{suffix}" for task in ("choice", "cloze", "text") for suffix in (".yaml", ".jsonl")]
        pack(folder, kept, out)


def pack(folder: Path, names: list[str], out: str) -> None:
    """Write files and folders of `folder`, without pictures and shards that are there compressed too, as an archive."""

    def left_out(name: str) -> bool:
        return name.endswith(".png") or (name.endswith(".mds") and any(folder.glob(f"{name}.*")))

    with tarfile.open(out, "w:xz", preset=9) as archive:
        for name in names:
            archive.add(folder / name, name, filter=lambda entry: None if left_out(entry.name) else entry)


if __name__ == "__main__":
    main(sys.argv[1])
