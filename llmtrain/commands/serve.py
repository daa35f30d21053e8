"""`llmtrain serve`: a model behind OpenAI's API."""

import argparse
import os
from pathlib import Path

from llmtrain.commands.arguments import add_model, add_model_options, load, require
from llmtrain.config.regular_file import read_text
from llmtrain.errors import UserError

KEY_VARIABLE = "LLMTRAIN_SERVE_KEY"


def add_serve(commands) -> None:
    sub = commands.add_parser(
        "serve",
        help="answer requests of OpenAI's API with a trained model",
        description="Serves /v1/completions and /v1/chat/completions, with streaming and log-probabilities, /v1/models, "
        "/health and /metrics. Requests join and leave at any step. SIGTERM lets what is being answered end.",
    )
    add_model(sub)
    sub.add_argument("--port", type=int, default=8000, metavar="N", help="default 8000; 0 takes a free one")
    sub.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="default 127.0.0.1, which other machines cannot reach"
    )
    sub.add_argument("--name", metavar="NAME", help="of the model in requests; default: its folder's")
    sub.add_argument(
        "--key-file", type=Path, metavar="FILE", help=f"holds the key that requests must send; or {KEY_VARIABLE} does"
    )
    sub.add_argument("--rows", type=int, default=16, metavar="N", help="requests answered at a time; default 16")
    sub.add_argument(
        "--max-len", type=int, metavar="N", help="tokens of prompt and answer; default: model.max_seq_len, at most 4096"
    )
    sub.add_argument(
        "--piece", type=int, metavar="N", help="tokens of a prompt read in one pass; default 512, on a GPU 2048"
    )
    sub.add_argument(
        "--prefix-mib", type=float, default=0.0, metavar="X", help="memory for beginnings of prompts; default 0: none"
    )
    sub.add_argument(
        "--keys-mib",
        type=float,
        metavar="X",
        help="keys and values in pages; default: those of --rows times --max-len tokens",
    )
    sub.add_argument(
        "--deterministic", action="store_true", help="each request in passes of its own: the same bits in any company"
    )
    sub.add_argument("--max-body", type=int, default=4 << 20, metavar="BYTES", help="of a request; default 4 MiB")
    sub.add_argument("--max-waiting", type=int, default=256, metavar="N", help="requests that may wait; default 256")
    sub.add_argument("--wait-seconds", type=float, default=300.0, metavar="S", help="to the first token; default 300")
    sub.add_argument("--drain-seconds", type=float, default=60.0, metavar="S", help="after SIGTERM; default 60")
    sub.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or chatml; default: the tokenizer's own")
    add_model_options(sub)
    sub.set_defaults(func=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    require(args, "port", least=0, most=65535)
    require(args, "prefix_mib", "keys_mib", "max_waiting", "wait_seconds", "drain_seconds", least=0, most=10**6)
    require(args, "rows", least=1, most=10**6)
    require(args, "max_len", "piece", least=1, most=10**8)
    require(args, "max_body", least=1, most=1 << 40)
    key = _key(args.key_file)
    from llmtrain.data.chat.template import find_template
    from llmtrain.generate.engine import Engine
    from llmtrain.logs import log
    from llmtrain.serve.app import Limits
    from llmtrain.serve.engine_process import answer, front
    from llmtrain.serve.front import Setup
    from llmtrain.serve.run import listen

    if key is None and args.host not in ("127.0.0.1", "::1", "localhost"):
        log.warning(f"--host {args.host} without a key: whoever reaches this port uses the model (--key-file)")
    with front(listen(args.host, args.port)) as (process, connection):
        model, tokenizer = load(args)
        if args.chat_template:
            find_template(tokenizer, args.chat_template)
        max_len = args.max_len or min(model.config.max_seq_len, 4096)
        try:
            engine = Engine(
                model,
                rows=args.rows,
                max_len=max_len,
                piece=args.piece,
                prefix_bytes=round(args.prefix_mib * 2**20),
                key_bytes=None if args.keys_mib is None else round(args.keys_mib * 2**20),
                deterministic=args.deterministic,
            )
            if model.device.type == "cuda":
                log.info(f"compiling kernels and recording graphs for up to {args.rows} requests at a time")
                engine.prepare()
        except (RuntimeError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"no memory for --rows {args.rows} of --max-len {max_len}: {reason}; set less") from None
        name = args.name or Path(args.model.rstrip("/")).name or args.model
        limits = Limits(args.max_body, args.max_waiting, args.wait_seconds)
        setup = Setup(tokenizer, name, args.chat_template, key, limits, args.drain_seconds)
        return answer(engine, process, connection, setup)


def _key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = read_text(file).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--key-file {file} cannot be read: {error}") from None
    if not key or not key.isascii() or any(one.isspace() for one in key):
        raise UserError(f"--key-file {file}: expected one key of ASCII characters without spaces")
    return key
