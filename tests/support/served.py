"""A server over a tiny model in this process, on a free port."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp.test_utils import TestServer

from llmtrain.data.chat.template import CHATML, ChatTemplate
from llmtrain.data.tokenize.tokenizer import TextTokenizer, train_bpe
from llmtrain.generate.engine import Engine
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.serve.app import Server
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
    await test.start_server()  # which cancels the handlers of clients that go away
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
    return Server(engine, own, "tiny", template=template, **options)


def talk(server: Server, use: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    """What `use` returns, called with a client of the server."""

    async def both() -> Any:
        async with served(server) as client:
            return await use(client)

    return asyncio.run(both())
