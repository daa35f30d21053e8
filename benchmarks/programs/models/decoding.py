"""Generation speed beside transformers' own `generate`, on the same weights, in the same process.

    python -m benchmarks decoding FILE [a.b=c …] [--batch 1 64] [--prompt 1800] [--new 120] [--curve PNG]

Random weights and prompts, bf16 on a GPU, greedy, no early end. Two figures each: new tokens per second of the whole
request, and of the decoding after the prompts are read (the whole, less a request of one new token). A peer that runs
out of memory is given the same prompts in smaller groups, one after another, which the output mentions.

--curve adds milliseconds per token over the length of the text read before to a picture and the figures in PNG.json
(zeros in the caches: the work is the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import Parser, positive
from llmtrain.schema.load import load_config


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=positive, default=1800)
    parser.add_argument("--new", type=positive, default=120)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--peer-repeats", type=positive, default=1)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--curve", metavar="PNG")
    args = parser.parse(argv)
    config = load_config(args.file, args.overrides)
    if args.curve:
        Path(args.curve).parent.mkdir(parents=True, exist_ok=True)
    from benchmarks.programs.models.decoding_speed import run

    run(config, args)
