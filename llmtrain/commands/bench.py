"""`llmtrain bench tune`, `kernels`, `train` and `serve`. Declaring them imports no torch."""

import argparse
from pathlib import Path

from llmtrain.commands.arguments import add_config, output_path, require
from llmtrain.errors import UserError

MOST_WORKERS, MOST_DRAWS, MOST_SECONDS, MOST_REQUESTS = 1024, 10_000, 10**6, 10**6
"""Largest numbers of processes, of draws of inputs, of seconds to compile and of requests that are taken."""


def add_bench(commands) -> None:
    bench = commands.add_parser("bench", help="measure training and servers, measure and tune kernels")
    programs = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_tune(programs)
    _add_kernels(programs)
    _add_train(programs)
    _add_serve(programs)


def _add_tune(commands) -> None:
    sub = commands.add_parser(
        "tune",
        help="search launch parameters for this GPU and write a row of the tuning table",
        description="Compiles the candidates in parallel, drops what spills, does not fit or is wrong against float64, "
        "times the rest, and writes the fastest as a row of your own tuning table, which kernels then use. "
        "The shape defaults to attention and rotary positions at head_dim 128, a scan at 80 heads x 64, d_state 128, its "
        "convolution of 5376 channels and its gated norm of 5120. With FILE instead: every kernel of that model at its length "
        "and microbatch, and then every attention backend, by which `auto` chooses. It takes minutes; interrupted, the same "
        "command goes on. `llmtrain doctor FILE` says what came of it.",
        epilog="examples: llmtrain bench tune my-model.yaml; "
        "llmtrain bench tune --operation attention --shape head_dim=96 --kernels forward",
    )
    add_config(sub, optional=True)
    sub.add_argument("--again", action="store_true", help="with FILE: also what is tuned and measured already")
    sub.add_argument(
        "--operation",
        default="attention",
        metavar="NAME",
        help="attention (default), ssd, kimi_delta, conv1d, gated_norm, norm or rotary",
    )
    sub.add_argument(
        "--shape",
        nargs="+",
        default=[],
        metavar="NAME=SIZE",
        help="head_dim=128, d_state=64, channels=5376, group_size=5120, ...",
    )
    sub.add_argument(
        "--seq-len", type=int, metavar="T", help="measure at T (default 4096), and write a row for it alone"
    )
    sub.add_argument(
        "--variant",
        metavar="NAME",
        help="attention: plain (default), alibi, documents, softcap, window, documents+window, softcap+window or mixed; "
        "the row is for it alone",
    )
    dtypes = ("bfloat16", "float16", "float32")
    sub.add_argument("--dtype", default="bfloat16", choices=dtypes, help="default bfloat16")
    sub.add_argument(
        "--kernels",
        nargs="+",
        metavar="PART",
        help="some parts only: forward, dq, dkdv; sequential_scan, chunk_scan, ...; forward, backward",
    )
    sub.add_argument("--quick", action="store_true", help="fewer candidates")
    sub.add_argument("--top", type=int, default=5, metavar="N", help="rows to show per kernel (default 5)")
    sub.add_argument("--workers", type=int, metavar="N", help="processes that compile (default: one per core)")
    where = sub.add_mutually_exclusive_group()
    where.add_argument(
        "--out", type=output_path, metavar="FILE", help="write the row there (use it by LLMTRAIN_TUNING=FILE)"
    )
    where.add_argument("--into-package", action="store_true", help="write the shipped table of this architecture")
    where.add_argument("--dry-run", action="store_true", help="write nothing")
    sub.set_defaults(func=tune)


def _add_kernels(commands) -> None:
    sub = commands.add_parser(
        "kernels",
        help="time every kernel backend beside the public ones",
        description="Every operation x backend x shape on this machine: forward, backward, memory, share of the "
        "roofline, error against float64; a Markdown table, JSON and a plot.",
    )
    sub.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="attention, rotary, norm, ssd, gated_delta, kimi_delta, mamba3, conv1d, gated_norm, mixer, experts",
    )
    sub.add_argument("--seq-len", nargs="+", type=int, metavar="T", help="these lengths only")
    sub.add_argument("--match", metavar="TEXT", help="cells whose name contains this")
    sub.add_argument("--quick", action="store_true", help="one length, no public scan with chunks of 128")
    sub.add_argument("--peer-path", type=Path, metavar="FOLDER", help="where mamba_ssm and causal_conv1d lie")
    sub.add_argument(
        "--out", type=output_path, default=Path("bench-kernels"), metavar="FOLDER", help="default bench-kernels/"
    )
    sub.add_argument(
        "--workers", type=int, metavar="N", help="processes that compile (default: one per core, at most 14)"
    )
    sub.add_argument(
        "--draws",
        type=int,
        default=1,
        metavar="N",
        help="of the inputs, for the errors of our and of public kernels; of a mixer 8 times as many (default 1)",
    )
    sub.add_argument(
        "--compile-seconds", type=float, default=300.0, metavar="S", help="for compiling beforehand (default 300)"
    )
    sub.add_argument(
        "--compile-only", action="store_true", help="fill the caches for a later call, which then only measures"
    )
    sub.set_defaults(func=kernels)


def _add_train(commands) -> None:
    sub = commands.add_parser(
        "train",
        help="tokens/s, MFU and memory of models x lengths x GPUs x precisions",
        description="Trains every case of a sweep for some steps, each in processes of its own, on Python's standard library: a "
        "table with LLM Foundry's columns, CSV, JSON lines and a plot. Interrupted, the same command goes on; what has failed is "
        "tried again.",
        epilog="a sweep: {models: [pretrain/mpt-1b, pretrain/zamba2-1.2b], seq_lens: [2048, 4096], gpus: [1], precisions: [bf16, "
        "tensorwise], batch_tokens: 131072}",
    )
    sub.add_argument("file", metavar="SWEEP", help="YAML of the sweep: docs/launching.md has its keys")
    sub.add_argument("--again", action="store_true", help="also what is measured already")
    sub.add_argument(
        "--out", type=output_path, default=Path("bench-train"), metavar="FOLDER", help="default bench-train/"
    )
    sub.set_defaults(func=train)


def _add_serve(commands) -> None:
    sub = commands.add_parser(
        "serve",
        help="throughput against latency of a server of OpenAI's API, ours or another's",
        description="Sends requests with random prompts to URL/v1/completions as `vllm bench serve` does, for every pair of "
        "lengths, number of users and rate: TTFT, TPOT, ITL and end to end at p50, p90 and p99; a table, JSON and a plot.",
        epilog="example: llmtrain bench serve http://127.0.0.1:8000 --users 1 2 4 8 16 --lengths 960/80 1800/120",
    )
    sub.add_argument("url", metavar="URL", help="of the server, with or without /v1")
    sub.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    sub.add_argument(
        "--lengths", nargs="+", default=["960/80"], metavar="P/A", help="tokens of prompt and answer; default 960/80"
    )
    sub.add_argument("--spread", type=float, default=0.0, metavar="X", help="lengths differ by up to this share")
    sub.add_argument(
        "--rates", nargs="+", type=float, default=[float("inf")], metavar="R", help="requests per second; default inf"
    )
    sub.add_argument(
        "--users", nargs="+", type=int, metavar="N", help="requests under way at a time; default any number"
    )
    sub.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="1 (default) is a Poisson process; below, burstier"
    )
    sub.add_argument("--requests", type=int, default=1000, metavar="N", help="of each case; default 1000")
    sub.add_argument("--warm-up", type=int, default=2, metavar="N", help="requests before each case; default 2")
    sub.add_argument("--seed", type=int, default=0, metavar="N")
    sub.add_argument(
        "--goodput", nargs="+", default=[], metavar="M:MS", help="goals, as ttft:200 tpot:50 itl:80 e2el:2000"
    )
    sub.add_argument("--ids", type=int, default=1000, metavar="N", help="prompts are token ids below N; default 1000")
    sub.add_argument("--words", action="store_true", help="prompts are words, for a server that takes no token ids")
    sub.add_argument("--key-variable", metavar="NAME", help="environment variable with the server's key")
    sub.add_argument(
        "--request-seconds", type=float, default=3600.0, metavar="S", help="limit of a request; default 3600"
    )
    sub.add_argument(
        "--out", type=output_path, default=Path("bench-serve"), metavar="FOLDER", help="default bench-serve/"
    )
    sub.set_defaults(func=serve)


def tune(args: argparse.Namespace) -> int:
    require(args, "top", least=1)
    require(args, "workers", least=1, most=MOST_WORKERS)
    if args.file is not None:
        from llmtrain.bench.tune.config_command import run as run_config
        from llmtrain.schema.load import load_config

        return run_config(args, load_config(args.file, args.overrides))
    from llmtrain.bench.tune.command import run

    return run(args)


def kernels(args: argparse.Namespace) -> int:
    require(args, "workers", least=1, most=MOST_WORKERS)
    require(args, "draws", least=1, most=MOST_DRAWS)
    require(args, "compile_seconds", least=0, most=MOST_SECONDS)
    from llmtrain.bench.kernels.command import run

    return run(args)


def train(args: argparse.Namespace) -> int:
    from llmtrain.bench.train.command import run

    return run(args)


def serve(args: argparse.Namespace) -> int:
    require(args, "requests", least=1, most=MOST_REQUESTS)
    require(args, "ids", least=1)
    require(args, "warm_up", least=0, most=MOST_REQUESTS)
    require(args, "spread", least=0, most=1)
    for name in ("rates", "users", "burstiness", "request_seconds"):
        given = getattr(args, name)
        if any(not one > 0 for one in (given if isinstance(given, list) else [given]) if one is not None):
            raise UserError(f"--{name.replace('_', '-')}: expected numbers above 0")
    from llmtrain.bench.serve.command import run

    return run(args)
