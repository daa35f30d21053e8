"""Associative recall over long sequences by a small hybrid, trained by ranks that share sequences and by one: the same curve?

    python -m benchmarks recall --context 2 [--lengths 64 512 4096 32768] [--steps 500 200 100 100] [--seeds 1 2] --out FILE.json
    python -m benchmarks recall --picture FILE.png FILE.json FILE.json …

A sequence is random filler in which PAIRS keys lie anywhere, each with its value behind it; at its end all keys come again, in
another order, and the value of each is asked for (Arora et al., arXiv:2312.04927). Labels are those values alone. Trained on each
length in turn, the shortest first, by as many steps of --tokens tokens as --steps says. Data and weights follow from the seed
alone; seeds run one after the other. FILE.json has the loss of every step, and is written as it goes; context is also the number
of ranks. The picture has the mean of each context's seeds, in all its files, and the band from the least to the largest.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, positive
from benchmarks.harness.pictures import picture
from benchmarks.harness.ranks import Training, on_ranks
from llmtrain.schema.load import load_config

PAIRS, TOKENS, WARMUP = 4, 131_072, 50
KEYS, VALUES, FILLER = 32, 32, 192  # tokens of each kind
CONFIG = (
    "yamls/pretrain/mamba2-130m.yaml",
    [
        f"model.vocab_size={KEYS + VALUES + FILLER}",
        "model.d_model=128",
        "model.blocks={m: {type: mamba2, d_state: 64, head_dim: 64}, a: {type: attention, n_heads: 4}}",
        "model.layers=m a",
        "train.compile=off",
        "train.sharding.strategy=full",
        "optimizer.lr=2e-3",
        "optimizer.weight_decay=0.0",
    ],
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--context", type=positive, default=1)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[64, 512, 4096, 32_768])
    parser.add_argument("--steps", type=positive, nargs="+", default=[500, 200, 100, 100])
    parser.add_argument("--tokens", type=positive, default=TOKENS, help="of a step")
    parser.add_argument("--seeds", type=positive, nargs="+", default=[1])
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", help="of the config")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--picture", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parser.parse(argv)
    if args.picture:
        draw(args.picture[0], [json.loads(file.read_text()) for file in args.picture[1:]])
        return 0
    if len(args.lengths) != len(args.steps) or args.out is None:
        parser.error("give --out, and as many --steps as --lengths")
    if args.rank:
        train(args)
        return 0
    words = ["--context", str(args.context), "--out", str(args.out), "--tokens", str(args.tokens)]
    for name in ("lengths", "steps", "seeds", "set"):
        if values := getattr(args, name):
            words += [f"--{name}", *map(str, values)]
    found = on_ranks(args.context, "recall", *words, log=args.out.with_suffix(".txt"))
    print(json.dumps(found), flush=True)
    return int("failed" in found)


def train(args: argparse.Namespace) -> None:
    """Every seed's run, by every rank. Rank 0 writes all of them after every 50 steps."""
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        runs.append({"seed": seed, "steps": []})
        for device, main in train_seed(args, seed, runs[-1]):
            if main:
                args.out.write_text(json.dumps({"context": args.context, "device": device, "runs": runs}))
    print(json.dumps({str(run["seed"]): [run["steps"][-1]["loss"], run["seconds"]] for run in runs}))


def train_seed(args: argparse.Namespace, seed: int, run: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Fills run; yields the device, and whether this is rank 0, after every 50 steps."""
    import torch.distributed as dist

    file, overrides = CONFIG
    longest = max(args.lengths)
    overrides = [*overrides, f"data.seq_len={longest}", f"model.max_seq_len={longest}", f"seed={seed}", *args.set]
    made = Training(load_config(file, [*overrides, f"train.parallel.context={args.context}"]))
    lr, rows, began = made.optimizer.param_groups[0]["lr"], run["steps"], time.perf_counter()
    for length, count in zip(args.lengths, args.steps, strict=True):
        for _ in range(count):
            ids, labels = batch(len(rows), args.tokens // length, length, seed)
            part = made.own(ids, labels)
            for group in made.optimizer.param_groups:
                group["lr"] = lr * min(1.0, (len(rows) + 1) / WARMUP)
            # As the trainer weighs losses: FSDP2 averages the ranks' gradients, and the labels are where the questions are.
            share = (part["labels"] != -100).sum() / (len(ids) * PAIRS)
            loss = made.step(part, share * made.world.size) * share
            dist.all_reduce(loss)
            rows.append({"length": length, "loss": loss})
            if len(rows) % 50 == 0 or len(rows) == sum(args.steps):
                rows[:] = [row | {"loss": float(row["loss"])} for row in rows]
                run["seconds"] = time.perf_counter() - began
                yield str(made.device), made.world.is_main


def batch(step: int, size: int, length: int, seed: int = 1) -> Any:
    """[size, length] tokens and labels of a step: the same on every rank."""
    import torch

    g = torch.Generator().manual_seed(seed * 1_000_003 + step)
    body = length - 2 * PAIRS
    ids = torch.randint(KEYS + VALUES, KEYS + VALUES + FILLER, (size, length), generator=g)
    keys = torch.rand(size, KEYS, generator=g).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, KEYS + VALUES, (size, PAIRS), generator=g)
    places = 2 * torch.rand(size, body // 2, generator=g).argsort(1)[:, :PAIRS]
    ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
    order = torch.rand(size, PAIRS, generator=g).argsort(1)
    ids[:, body::2], ids[:, body + 1 :: 2] = keys.gather(1, order), values.gather(1, order)
    labels = torch.full_like(ids, -100)
    labels[:, body::2] = ids[:, body + 1 :: 2]  # the token after a key
    return ids, labels


def draw(file: Path, records: list[dict[str, Any]]) -> None:
    """Losses over steps, averaged over 10: the mean of each context's seeds, and the band from the least to the largest."""
    steps, top = records[0]["runs"][0]["steps"], math.log(VALUES)
    with picture(file, size=(8, 3.6)) as axes:
        for context, style in zip(sorted({record["context"] for record in records}), ("-", "--", ":"), strict=False):
            runs = [run["steps"] for record in records if record["context"] == context for run in record["runs"]]
            places = range(0, min(map(len, runs)), 10)
            tens = [[[row["loss"] for row in run[at : at + 10]] for at in places] for run in runs]
            by_place = list(zip(*([sum(ten) / len(ten) for ten in run] for run in tens), strict=True))
            x = [at + 5 for at in places]
            label = f"context {context}" + (f", {len(runs)} seeds" if len(runs) > 1 else "")
            (line,) = axes.plot(x, [sum(one) / len(one) for one in by_place], style, label=label)
            axes.fill_between(x, [*map(min, by_place)], [*map(max, by_place)], alpha=0.2, color=line.get_color())
        for at, row in enumerate(steps):
            if at == 0 or row["length"] != steps[at - 1]["length"]:
                axes.axvline(at, color="0.8", zorder=0)
                axes.text(at + 4, top * 1.02, f"{row['length']:,}", fontsize=8)
        axes.axhline(top, color="0.8", zorder=0)
        axes.set(xlabel="step (lengths above)", ylabel="loss of the answers (nats)", ylim=(0, top * 1.12))
        axes.legend()
