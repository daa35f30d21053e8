"""`llmtrain bench serve`: a sweep of loads on a server, a table, JSON and a picture."""

import argparse
import asyncio
import json
import math
import os
from dataclasses import asdict
from urllib.parse import urlsplit

import aiohttp

from llmtrain.bench.serve.figures import MEASURES, figures, picture, table
from llmtrain.bench.serve.load import Case, Target, load, model_name
from llmtrain.config.output_folder import unwritable_reason
from llmtrain.errors import RunError, UserError
from llmtrain.logs import log


def run(args: argparse.Namespace) -> int:
    """Measure every case. Raises UserError for a server that does not answer, RunError where every request of a case fails."""
    url = server_url(args.url)
    key = os.environ.get(args.key_variable) if args.key_variable else None
    if args.key_variable and not key:
        raise UserError(f"--key-variable {args.key_variable}: the environment has no such variable, or an empty one")
    if reason := unwritable_reason(args.out):
        raise UserError(f"--out {args.out}: {reason}")
    goals = read_goals(args.goodput)
    cases = [
        Case(*lengths, args.requests, rate, users, args.spread, args.burstiness, args.seed)
        for lengths in map(read_lengths, args.lengths)
        for users in args.users or [None]
        for rate in args.rates
    ]
    try:
        name = args.model or asyncio.run(model_name(url, key))
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{url}/models does not answer as OpenAI's API does: {error or type(error).__name__}") from None
    target = Target(url, name, key, None if args.words else args.ids)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in cases:
        if args.warm_up:
            asyncio.run(load(Case(case.prompt, case.answer, args.warm_up, seed=-1), target, args.request_seconds))
        timings, seconds = asyncio.run(load(case, target, args.request_seconds))
        row = asdict(case) | {"rate": "inf" if math.isinf(case.rate) else case.rate, "model": name}
        row |= figures(timings, seconds, goals)
        if not row["completed"]:
            raise RunError(f"all {case.requests} requests failed: {row['errors'][0]}")
        rows.append(row)
        log.info(table([row]).splitlines()[-1])
        (args.out / "serve.json").write_text(json.dumps(rows, indent=1) + "\n")
    picture(rows, args.out / "serve.png")
    print(table(rows))
    return 0


def server_url(text: str) -> str:
    """The address with /v1. Raises UserError for one of no server."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port beyond 65535, half of a pair of brackets
        known = False
    if not known or any(one.isspace() for one in text):
        raise UserError(f"{text} is no address of a server; expected http://HOST:PORT, with or without /v1")
    return f"{text.rstrip('/').removesuffix('/v1')}/v1"


def read_lengths(text: str) -> tuple[int, int]:
    """PROMPT/ANSWER in tokens. Raises UserError."""
    prompt, _, answer = text.partition("/")
    if not (prompt.isdecimal() and answer.isdecimal() and 0 < int(prompt) < 10**7 and 0 < int(answer) < 10**7):
        raise UserError(f"--lengths {text}: expected PROMPT/ANSWER in tokens, as 960/80")
    return int(prompt), int(answer)


def read_goals(given: list[str]) -> dict[str, float]:
    """MEASURE:MS, as in ttft:200. Raises UserError."""
    found = {}
    for text in given:
        name, _, most = text.partition(":")
        try:
            found[name] = float(most)
        except ValueError:
            found[name] = math.nan
        if name not in MEASURES or not found[name] > 0:
            raise UserError(
                f"--goodput {text}: expected MEASURE:MILLISECONDS, the measure one of {', '.join(MEASURES)}"
            )
    return found
