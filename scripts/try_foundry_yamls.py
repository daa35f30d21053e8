"""Migrate every LLM Foundry YAML of a folder, check it, and train it for one step at a tiny width.

    python scripts/try_foundry_yamls.py llm-foundry/scripts/train/yamls/pretrain OUT

The migrated files go to OUT as they are, the tiny ones to OUT/tiny. Prints a table; exit status 1 if any step failed.
Widths, vocabulary, sequences and batches are cut, the layers stay; the data are Python's own standard library.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from llmtrain.cli import main as run_command
from llmtrain.config.shipped import eval_yamls
from llmtrain.convert.foundry.migrate import migrate
from llmtrain.errors import UserError
from llmtrain.schema.load import load_config

HEAD_DIM, MOST_HEADS, SEQ_LEN, VOCABULARY = 8, 4, 128, 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="YAMLs of LLM Foundry")
    parser.add_argument("out", type=Path, help="a folder for what is made of them")
    args = parser.parse_args()
    (args.out / "tiny").mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print("| YAML | left to decide | not needed | check | one step |\n|---|---|---|---|---|")
    rows = []
    for file in sorted([*args.folder.glob("*.yaml"), *args.folder.glob("*.yml")]):
        rows.append(try_one(file, args.out))
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    return int(any("OK" not in row[3] or "loss" not in row[4] for row in rows))


def try_one(file: Path, out: Path) -> tuple[str, ...]:
    """A row of the table."""
    try:
        made = migrate(file, eval_yamls("tasks"))
    except UserError as error:
        return file.name, "", "", f"refused: {error}", ""
    ours = out / file.name
    ours.write_text(made.text, encoding="utf-8")
    counts = str(len(made.notes.left)), str(len(made.notes.harmless))
    try:
        load_config(ours)
    except UserError as error:
        return file.name, *counts, str(error), ""
    tiny = out / "tiny" / file.name
    tiny.write_text(json.dumps(cut(made.sections, out.resolve() / "tiny", file.stem)), encoding="utf-8")
    return file.name, *counts, "OK", train(tiny)


def cut(sections: dict[str, Any], out: Path, stem: str) -> dict[str, Any]:
    """The same config, small: heads of 8 channels, at most 4 of them, and everything in proportion."""
    model = sections["model"]
    heads = max(block["n_heads"] for block in model["blocks"].values())
    share = min(1.0, MOST_HEADS / heads)
    old, new = model["d_model"], max(1, round(heads * share)) * HEAD_DIM
    blocks = {}
    for name, block in model["blocks"].items():
        few = {key: max(1, round(block[key] * share)) for key in ("n_heads", "n_kv_heads") if key in block}
        d_ff = max(1, block["mlp"]["d_ff"] * new // old)
        blocks[name] = {**block, **few, "mlp": {**block["mlp"], "d_ff": d_ff}}
    data = {"seq_len": SEQ_LEN, "shuffle": sections["data"]["shuffle"], "num_workers": 0}
    data["prepare"] = {
        "sources": ["stdlib"],
        "out": str(out / "data"),
        "vocab_size": VOCABULARY,
        "seq_len": SEQ_LEN,
        "max_bytes": 2_000_000,
        "validation_fraction": 0.2,
    }
    length = {"duration": "1 steps", "global_batch_size": 4, "microbatch_size": 2}
    return {
        **sections,
        "name": stem,
        "run_dir": str(out / "runs" / stem),
        "model": {**model, "vocab_size": VOCABULARY, "d_model": new, "max_seq_len": SEQ_LEN, "blocks": blocks},
        "data": data,
        "train": {**sections["train"], **length},
        "schedule": {**sections["schedule"], "warmup": "1 steps"},
        "eval": {"interval": "1 steps", "max_samples": 4},
        "checkpoint": {},
    }


def train(file: Path) -> str:
    """The loss of the run's one step, or its error."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = run_command(["train", str(file), "--fresh"])
    if status:
        return f"status {status}: {printed.getvalue().strip().splitlines()[-1]}"
    metrics = (file.parent / "runs" / file.stem / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return "loss " + next(
        f"{value:.3f}" for line in metrics for key, value in json.loads(line).items() if "loss" in key
    )


if __name__ == "__main__":
    sys.exit(main())
