"""`llmtrain generate`: continue a prompt."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_generate(commands) -> None:
    sub = commands.add_parser(
        "generate",
        help="continue a prompt with a trained model",
        description="Continues a prompt with the newest checkpoint of a run, or with one checkpoint.",
    )
    sub.add_argument("path", type=Path, metavar="RUN", help="a run's folder, or one of its checkpoints")
    sub.add_argument("--prompt", required=True, metavar="TEXT")
    sub.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    sub.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 is greedy; default 0.8")
    sub.add_argument("--top-k", type=int, default=50, metavar="K", help="default 50")
    sub.add_argument("--seed", type=int, default=0, metavar="N")
    sub.set_defaults(func=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    if args.temperature < 0 or args.top_k < 1 or args.max_new_tokens < 1:
        raise ValueError("--temperature must be at least 0, --top-k and --max-new-tokens at least 1")
    from llmtrain.generate.sampling import load_model, sample

    model, tokenizer = load_model(args.path)
    ids = tokenizer.encode(args.prompt) or [tokenizer.eod_id]
    new = sample(
        model,
        ids,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        stop_id=tokenizer.eod_id,
        seed=args.seed,
    )
    print(tokenizer.decode([*ids, *new]))
    return 0
