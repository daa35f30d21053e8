"""Servers on a free port: over a tiny model in this process, and `llmtrain serve` as a process of its own."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.test_utils import TestServer

from llmtrain.data.chat.template import CHATML, ChatTemplate
from llmtrain.data.tokenize.tokenizer import TextTokenizer, train_bpe
from llmtrain.generate.engine import Engine
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.serve.app import Server
from llmtrain.serve.worker import Worker
from tests.support.models import build


def tokenizer() -> TextTokenizer:
    """A tokenizer of 280 tokens, with those of ChatML."""
    return train_bpe(["the quick brown fox jumps over a lazy dog " * 20], 280, further=("<|im_start|>", "<|im_end|>"))


def tiny_model() -> CausalLM:
    """A hybrid of that vocabulary, whose answers differ from prompt to prompt."""
    return build("zamba2 as the 1.2B", platform.cpu(), layers="m s+m", vocab_size=280)


@contextlib.asynccontextmanager
async def served(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that runs until the block ends."""
    server.start()
    test = TestServer(server.app)
    await test.start_server(auto_decompress=False)  # which cancels the handlers of clients that go away
    try:
        async with aiohttp.ClientSession(test.make_url("/")) as client:
            yield client
    finally:
        await asyncio.to_thread(server.stop)
        await test.close()


def make_server(model: CausalLM, own: TextTokenizer, **options: Any) -> Server:
    settings: dict[str, Any] = {"rows": 2, "max_len": 64, "piece": 16, "prefix_bytes": 1 << 20}
    engine = Engine(model, **settings | options.pop("engine", {}))
    template = options.pop("template", ChatTemplate(CHATML, {}, "chatml"))
    return Server(partial(Worker, engine), own, "tiny", template=template, **options)


def engine_of(server: Server) -> Engine:
    """That of a server of `make_server`."""
    assert isinstance(server.worker, Worker)
    return server.worker.engine


def talk(server: Server, use: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    """What `use` returns, called with a client of the server."""

    async def both() -> Any:
        async with served(server) as client:
            return await use(client)

    return asyncio.run(both())


@contextlib.contextmanager
def serving(model: Path, *options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a server, and its address."""
    command = [sys.executable, "-m", "llmtrain", "serve", str(model), "--port", "0", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables
    )
    try:
        assert process.stderr is not None
        said = []
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", said[-1] if said else "")):
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    """Exit status and the rest of standard error."""
    _, rest = process.communicate(timeout=seconds)
    return process.returncode, rest
