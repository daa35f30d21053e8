"""A folder with a file of every kind that a command reads, and commands that read them, by relative paths."""

import gzip
import json
import multiprocessing
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import zstandard
from pyarrow import csv, parquet

from llmtrain.cli import main
from llmtrain.errors import exit_with
from tests.support import checkpoints
from tests.support.conversion import publish
from tests.support.evaluation import WORDS, Place
from tests.support.foundry import FULL
from tests.support.ranks import warm
from tests.support.tiny import tiny_settings

ROOT = Path(__file__).parents[2]
FROM_TEXT = ["--seq-len", "32", "--workers", "1", "--validation-fraction", "0", "--out", "out"]
EVAL = ["eval", "eval.yaml", "out=results"]


@dataclass(frozen=True)
class Reader:
    """A command. reads: the files, as globs, that it must notice; free: those whose content is the user's own, so that any that can
    be read is right. words: what else than its name may name a damaged file."""

    argv: list[str]
    reads: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


_CHECKPOINT = "run/checkpoints/step-00000004/**"
_ADAPTED = "adapted/checkpoints/step-00000002/**"
_SHARDS = ("data/train/*", "data/validation/*", "data/manifest.json")
_HF = ("hf/*",)
READERS = {
    "train": Reader(["train", "run.yaml"], (*_SHARDS, _CHECKPOINT, "run/*"), ("run.yaml",)),
    "train from weights": Reader(["train", "from.yaml"], (*_SHARDS, _CHECKPOINT), ("from.yaml",)),
    "train from store": Reader(["train", "stored.yaml"], ("store/**", "data/tokenizer/*"), ("stored.yaml",)),
    "check": Reader(["check", "run.yaml"], (), ("run.yaml", *_SHARDS)),
    "describe": Reader(["describe", "run.yaml", "--gpu", "h200"], (), ("run.yaml", "tables/**", *_SHARDS)),
    "doctor": Reader(["doctor", "run.yaml", "--no-test"], (), ("run.yaml", "tables/**")),
    "generate": Reader(["generate", "run", "--prompt", "the", "--max-new-tokens", "4"], (_CHECKPOINT,)),
    "generate file": Reader(
        ["generate", "hf", "--file", "prompts.jsonl", "--max-new-tokens", "4"], (), ("prompts.jsonl", *_HF)
    ),
    "generate chat": Reader(
        ["generate", "run", "--chat", "--chat-template", "chat.jinja", "--prompt", "the", "--max-new-tokens", "4"],
        (_CHECKPOINT,),
        ("chat.jinja",),
    ),
    "generate adapter": Reader(
        ["generate", "adapted", "--prompt", "the", "--max-new-tokens", "4"], (_ADAPTED, _CHECKPOINT)
    ),
    "generate with adapter": Reader(
        ["generate", "hf", "--adapter", "adapter", "--prompt", "the", "--max-new-tokens", "4"], (), ("adapter/*",)
    ),
    "import adapter": Reader(["import", "adapter", "out", "--base", "base"], ("base/**",), ("adapter/*",)),
    "export adapter": Reader(["export", "adapted", "out"], (_ADAPTED,)),
    "train adapters": Reader(["train", "adapted.yaml"], (_ADAPTED, _CHECKPOINT), ("adapted.yaml",)),
    "train pairs": Reader(["train", "preferred.yaml"], ("pairs/train/*", "preferred/reference/*"), ("preferred.yaml",)),
    "show pairs": Reader(["data", "show", "pairs"], (), ("pairs/train/*", "pairs/manifest.json", "pairs/tokenizer/*")),
    "prepare pairs": Reader(["prepare", "pairs.jsonl", "--vocab-size", "290", *FROM_TEXT], (), ("pairs.jsonl",)),
    "cluster": Reader(["doctor", "--cluster", "--nproc", "2", "run.yaml"], (), ("run.yaml",)),
    "export": Reader(["export", "run", "out"], (_CHECKPOINT,)),
    "import": Reader(["import", "hf", "out"], (), _HF),
    "convert": Reader(["checkpoint", "convert", "--to", "hf", "run", "out"], (_CHECKPOINT,)),
    "convert file": Reader(
        ["checkpoint", "convert", "--to", "llmtrain", "--config", "model.yaml", "composer/ep0-ba0-rank0.pt", "out"],
        (),
        ("composer/*", "model.yaml"),
    ),
    "convert folder": Reader(
        ["checkpoint", "convert", "--to", "llmtrain", "--config", "model.yaml", "sharded", "out"],
        (),
        ("sharded/*", "sharded/.*"),
    ),
    "ls": Reader(["checkpoint", "ls", "run"], ("run/checkpoints/*/manifest.json",), (), ("  partial (",)),
    "show": Reader(["checkpoint", "show", "run"], ("run/checkpoints/*/manifest.json", "run/checkpoints/*/*.json*")),
    "verify": Reader(["checkpoint", "verify", "run"], ("run/checkpoints/**",)),
    "rm": Reader(["checkpoint", "rm", "run", "--keep-last", "1"], (), ("run/checkpoints/*/manifest.json",)),
    "data show": Reader(["data", "show", "data"], (), (*_SHARDS, "data/tokenizer/*")),
    "data stats": Reader(["data", "stats", "data"], (), (*_SHARDS, "data/tokenizer/*")),
    "data seen": Reader(["data", "seen", "run", "--steps", "1:2"], (), ("data/train/index.json", "run/*", _CHECKPOINT)),
    "data verify": Reader(["data", "verify", "data"], _SHARDS),
    "prepare": Reader(["prepare", "texts", "--vocab-size", "300", *FROM_TEXT], (), ("texts/*",)),
    "prepare tokens": Reader(
        ["prepare", "tokens/a.npy", "tokens", "--tokenizer", "hf", *FROM_TEXT],
        ("tokens/b.ds.index", "tokens/c.idx"),
        ("tokens/[abc].npy", "tokens/*.ds", "tokens/*.bin", "hf/tokenizer*"),
    ),
    "prepare again": Reader(
        ["prepare", "texts", "--vocab-size", "300", *FROM_TEXT[:-1], "again"],
        ("again/**",),
        ("texts/*",),
        ("source files",),
    ),
    "eval": Reader(
        EVAL,
        (_CHECKPOINT.replace("run", "tiny").replace("4", "1"),),
        ("eval.yaml", "*.jsonl", "[a-z]*.yaml", "chat.jinja"),
    ),
    "eval again": Reader(["eval", "eval.yaml", "out=before"], ("before/**",), ("chat.jinja",)),
    "compare": Reader(
        ["compare", "before", "other", "--model-a", "tiny", "--model-b", "tiny", "--out", "out"],
        ("before/results.json", "other/results.json", "before/documents/*", "other/documents/*"),
    ),
    "decontaminate": Reader(
        ["decontaminate", "eval.yaml", "data", "--out", "out"], (), ("eval.yaml", *_SHARDS, "data/tokenizer/*")
    ),
    "migrate": Reader(["migrate", "foundry.yaml"], (), ("foundry.yaml",)),
}


def make(folder: Path, shards: Path) -> Path:
    """Make the scene in an empty folder."""
    os.chdir(folder)
    shutil.copytree(shards, "data")
    place = Place(folder, documents=4)
    Path("chat.jinja").write_text("{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] }}\n{% endfor %}")
    models: list[Any] = ["tiny", {"path": "tiny", "name": "chat", "chat_template": "chat.jinja"}]
    place.write(
        {"tasks": [Path(task).name for task in place.tasks], "models": models, "max_length": 128, "out": "results"}
    )
    _texts(folder / "texts")
    publish(folder / "hf", "llama")
    _tokens(folder / "tokens")
    changes = {
        "train.duration": "4 steps",
        "train.microbatch_size": 2,
        "checkpoint.interval": "2 steps",
        "eval.prompt": "the",
    }
    settings = tiny_settings(Path("data"), Path("run"), changes)
    Path("run.yaml").write_text(json.dumps(settings))
    Path("model.yaml").write_text(json.dumps(settings))
    _composer(settings["model"])
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in WORDS[:3]))
    Path("foundry.yaml").write_text(FULL)
    Path("sweep.yaml").write_text("models: [not-here.yaml]\nsteps: 1\n")
    stored = {"checkpoint.remote": str(folder / "store"), "train.duration": "4 steps"}
    Path("stored.yaml").write_text(json.dumps(tiny_settings(Path("data"), Path("stored"), changes | stored)))
    for argv in (
        ["train", "run.yaml"],
        ["train", "stored.yaml"],
        EVAL[:2] + ["out=before"],
        EVAL[:2] + ["out=other"],
        [*READERS["prepare again"].argv],
    ):
        status, text = command(folder, argv)
        assert status == 0, text
    _adapters_and_pairs(folder, changes)
    shutil.rmtree("stored")
    stored |= {"checkpoint.remote": "store", "train.duration": "6 steps"}
    Path("stored.yaml").write_text(json.dumps(tiny_settings(Path("data"), Path("stored"), changes | stored)))
    Path("run.yaml").write_text(
        json.dumps(tiny_settings(Path("data"), Path("run"), changes | {"train.duration": "6 steps"}))
    )
    start = {"init_from": {"path": "run"}, "train.duration": "5 steps"}
    Path("from.yaml").write_text(json.dumps(tiny_settings(Path("data"), Path("new"), changes | start)))
    Path("tables/llmtrain/tuning").mkdir(parents=True)
    for file in sorted((ROOT / "llmtrain/kernels/tables").glob("sm90.*")):
        shutil.copy(file, "tables/llmtrain/tuning")
    return folder


def _adapters_and_pairs(folder: Path, changes: dict[str, Any]) -> None:
    """A run of adapters on `run`, an adapter as peft writes it, and a preference run with its reference, each to go on."""
    pairs = [{"prompt": WORDS[i % 9], "chosen": f" yes {WORDS[i % 5]}", "rejected": f" no {i}"} for i in range(200)]
    Path("pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    made = [*READERS["prepare pairs"].argv[:-1], "pairs", "--validation-fraction", "0.1"]
    started = {"init_from": {"path": "run"}, "adapt": {"lora": {"rank": 2, "alpha": 4.0, "targets": ["*.wqkv"]}}}
    preference = {"objective": {"type": "preference", "loss": {"sigmoid": 1.0}}, "data.mask_documents": True}
    for name, shards, settings in (("adapted", "data", started), ("preferred", "pairs", preference)):
        for steps in (2, 3):
            lasting = changes | settings | {"train.duration": f"{steps} steps", "schedule.warmup": "1 steps"}
            Path(f"{name}.yaml").write_text(json.dumps(tiny_settings(Path(shards), Path(name), lasting)))
            for argv in [made] * (name == "preferred" and steps == 2) + [["train", f"{name}.yaml"]] * (steps == 2):
                status, text = command(folder, argv)
                assert status == 0, text
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained("hf"), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained("adapter")
    status, text = command(folder, ["import", "hf", "base"])
    assert status == 0, text


def _texts(folder: Path) -> None:
    folder.mkdir()
    text = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(20)]
    (folder / "a.txt").write_text("\n".join(text))
    lines = "".join(json.dumps({"text": one}) + "\n" for one in text).encode()
    (folder / "b.jsonl").write_bytes(lines)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "d.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "e.json").write_text(json.dumps([{"text": one} for one in text]))
    table = pa.table({"text": text})
    parquet.write_table(table, folder / "f.parquet")
    csv.write_csv(table, folder / "g.csv")
    with pa.ipc.new_file(folder / "h.arrow", table.schema) as out:
        out.write_table(table)


def _tokens(folder: Path) -> None:
    folder.mkdir()
    eod = checkpoints.tokenizer().eod_id
    ids = np.array([*range(1, 60), eod] * 8, np.uint16)
    np.save(folder / "a.npy", ids)
    ids.tofile(folder / "b.ds")
    np.arange(60, 481, 60, dtype=np.uint64).tofile(folder / "b.ds.index")
    ids.tofile(folder / "c.bin")
    head = (
        b"MMIDIDX\x00\x00"
        + (1).to_bytes(8, "little")
        + bytes([8])
        + (8).to_bytes(8, "little")
        + (9).to_bytes(8, "little")
    )
    arrays = (np.full(8, 60, np.int32), np.arange(0, 960, 120, dtype=np.int64), np.arange(9, dtype=np.int64))
    (folder / "c.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))


def _composer(model: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    from llmtrain.models.config import ModelConfig
    from llmtrain.models.hybrid import HybridLM

    made = HybridLM(ModelConfig.model_validate_json(json.dumps(model)))
    made.init_weights(5)
    state = {"state": {"model": {f"model.{name}": p.detach() for name, p in made.named_parameters()}}}
    Path("composer").mkdir()
    torch.save(state, "composer/ep0-ba0-rank0.pt")
    dcp.save(state, checkpoint_id="sharded", no_dist=True)


def command(
    folder: Path, argv: list[str], limit: float = 120, stop: tuple[float, int] | None = None
) -> tuple[int | None, str]:
    """(exit status, or None where it ran into the limit of time; what was printed) of a command in a process of its own.

    limit: seconds on a quiet machine: as many times more where that many processes wait for a core; stop: (seconds, signal) to send
    it that signal after so long."""
    printed = folder.parent / f"{folder.name}.printed"
    process = warm().Process(target=_run, args=(folder, argv, printed), daemon=False)
    process.start()
    if stop is not None:
        process.join(stop[0])
        if process.is_alive():
            os.kill(process.pid or 0, stop[1])
    process.join(limit)
    if process.is_alive():
        process.join(limit * max(1, os.getloadavg()[0] / (os.cpu_count() or 1)))
    late = process.is_alive()
    if late:
        process.kill()
    process.join()
    return None if late else process.exitcode, printed.read_text(errors="replace") if printed.exists() else ""


def _run(folder: Path, argv: list[str], printed: Path) -> None:
    os.chdir(folder)
    os.environ |= {"XDG_CONFIG_HOME": str(folder / "tables"), "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder.parent)}
    with printed.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    multiprocessing.set_start_method("fork", force=True)
    sys.argv[1:] = argv
    exit_with(main)
