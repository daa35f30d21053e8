"""`llmtrain generate`: continue a prompt, a file of prompts, or what is typed."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmtrain.commands.arguments import add_model, add_model_options, load, require
from llmtrain.config.regular_file import parse_json, read_text
from llmtrain.errors import UserError
from llmtrain.logs import log


def add_generate(commands) -> None:
    sub = commands.add_parser(
        "generate",
        help="continue prompts with a trained model",
        description="Continues a prompt, every prompt of a file, or (with neither) what is typed, line by line. "
        "Text appears as it is decoded.",
    )
    add_model(sub)
    source = sub.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help='prompts: one per line, or {"prompt": ...} per line in a .jsonl; answers come as JSON lines, in order',
    )
    sub.add_argument(
        "--chat",
        action="store_true",
        help="prompts are what a user says, by the model's chat template; what is typed goes on with the conversation",
    )
    sub.add_argument("--system", metavar="TEXT", help="with --chat: the system's message")
    sub.add_argument(
        "--chat-template", metavar="FILE", help="with --chat: a Jinja file, or chatml, for the model's own"
    )
    sub.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    sub.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 is greedy; default 0.8")
    sub.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    sub.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that make up P; default 0.95")
    sub.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1 discourages repetition"
    )
    sub.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end there; may be given several times"
    )
    sub.add_argument("--seed", type=int, default=0, metavar="N")
    sub.add_argument("--batch-size", type=int, default=32, metavar="N", help="prompts of --file at a time; default 32")
    add_model_options(sub)
    sub.set_defaults(func=run_generate)


MOST = 1 << 20
"""Largest number of new tokens and of prompts at once."""


def run_generate(args: argparse.Namespace) -> int:
    require(args, "max_new_tokens", "batch_size", least=1, most=MOST)  # memory of so many is taken before the first one
    if "" in args.stop:
        raise UserError("--stop '' would end every answer at once; give some text")
    if not args.chat and (given := [name for name in ("system", "chat_template") if getattr(args, name) is not None]):
        raise UserError(f"--{given[0].replace('_', '-')} goes with --chat")
    prompts = read_prompts(args.file) if args.file else None
    from llmtrain.generate.sampling import Sampling

    args.sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=0.95 if args.top_p is None and args.top_k is None else args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    loaded = load(args)
    ask = _conversation(loaded[1], args) if args.chat else _text
    if prompts is not None:
        _answer_file(loaded, prompts, ask, args)
    elif args.prompt is not None:
        _stream(loaded, args.prompt, ask, args)
    else:
        turns: list[dict[str, str]] = []
        for prompt in _typed():
            answer = _stream(loaded, prompt, partial(ask, turns=turns), args)
            turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return 0


def _text(prompt: str, turns: Sequence[dict[str, str]] = ()) -> str:
    """A prompt that the model continues. turns: not read by it."""
    return prompt


def _conversation(tokenizer: Any, args: argparse.Namespace) -> Callable[..., list[int]]:
    """Ids of what a user says after a conversation. Raises UserError for a model without a chat template."""
    from llmtrain.data.chat.template import ChatPrompts, find_template

    prompts = ChatPrompts(tokenizer, find_template(tokenizer, args.chat_template))
    system = [] if args.system is None else [{"role": "system", "content": args.system}]

    def ask(prompt: str, turns: Sequence[dict[str, str]] = ()) -> list[int]:
        return prompts.ids(prompts.text([*system, *turns, {"role": "user", "content": prompt}]))

    return ask


def read_prompts(file: Path) -> list[str]:
    """Read prompts, one per line. Raises UserError with file and line for what is no prompt."""
    try:
        lines = (
            read_text(file).removeprefix("\ufeff").split("\n")
        )  # not splitlines(): only line breaks separate prompts
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts from {file}: {error}") from None
    if not lines[-1]:
        lines.pop()
    if file.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = parse_json(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise UserError(f'{file}:{number}: expected an object with a text "prompt", found {line[:80]}')
        prompts.append(prompt)
    return prompts


def _stream(loaded: tuple[Any, Any], prompt: str, ask: Callable[[str], Any], args: argparse.Namespace) -> str:
    """Print the continuation, behind its prompt where the prompt is text, and return it."""
    from llmtrain.generate.text import complete

    model, tokenizer = loaded
    asked, answer = ask(prompt), ""
    if isinstance(asked, str):
        print(asked, end="", flush=True)
    began, end = time.perf_counter(), None
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "stops": args.stop}
    for piece in complete(model, tokenizer, [asked], args.sampling, **options):
        print(piece.text, end="", flush=True)
        answer, end = answer + piece.text, piece.end
    print(flush=True)
    if sys.stderr.isatty():
        log.info(f"({end}; {time.perf_counter() - began:.1f} s)")
    return answer


def _typed() -> Iterator[str]:
    """Lines from the terminal until Ctrl-D; from a pipe, all of it as one prompt."""
    if not sys.stdin.isatty():
        yield sys.stdin.read()
        return
    log.info("Type a prompt and Enter; Ctrl-D ends.")
    while True:
        try:
            yield input("> ")
        except EOFError:
            log.info("")
            return


def _answer_file(
    loaded: tuple[Any, Any], prompts: list[str], ask: Callable[[str], Any], args: argparse.Namespace
) -> None:
    from llmtrain.generate.text import complete
    from llmtrain.progress import CountBar

    model, tokenizer = loaded
    with CountBar(sys.stderr.isatty(), len(prompts), "prompts") as bar:
        for start in range(0, len(prompts), args.batch_size):
            batch = prompts[start : start + args.batch_size]
            answers: list[dict[str, Any]] = [{"prompt": prompt, "completion": "", "end": None} for prompt in batch]
            for piece in complete(
                model,
                tokenizer,
                [ask(prompt) for prompt in batch],
                args.sampling,
                max_new_tokens=args.max_new_tokens,
                stops=args.stop,
                row_numbers=range(start, start + len(batch)),
            ):
                answers[piece.row]["completion"] += piece.text
                if piece.end:
                    answers[piece.row]["end"] = piece.end
                    bar.advance()
            for answer in answers:
                print(json.dumps(answer, ensure_ascii=False), flush=True)
