"""An engine at the other end of a connection: the same answers, ends and failures as in one process."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from typing import Any

from llmtrain.generate.engine import Engine
from llmtrain.serve.app import Server
from llmtrain.serve.engine_process import EnginePipe
from llmtrain.serve.remote import RemoteEngine
from llmtrain.serve.worker import Worker
from tests.support.served import served, talk, tiny_model, tokenizer
from tests.unit.serve.test_app import post, streamed

MODEL, OWN = tiny_model(), tokenizer()


@contextmanager
def remote() -> Iterator[tuple[Server, EnginePipe, list[str]]]:
    """A server, its engine, and what it was told of the engine's process."""
    ours, theirs = Pipe()
    pipe, lost = EnginePipe(Engine(MODEL, rows=2, max_len=64, piece=16), ours), list[str]()
    worker = pipe.worker
    engine = partial(RemoteEngine, theirs, worker.sizes, worker.state, lambda: lost.append("lost"))
    process = threading.Thread(target=pipe.run)
    process.start()
    yield Server(engine, OWN, "tiny"), pipe, lost
    process.join()


def test_answers_are_those_of_an_engine_in_the_same_process():
    body = {"prompt": ["the quick", "a lazy"], "max_tokens": 12, "temperature": 0, "logprobs": 2, "n": 2}
    stops = body | {"stop": ["e"], "stream_options": {"include_usage": True}}

    async def use(client: Any) -> Any:
        whole, (*_, last) = (await post(client, "completions", body))[1], await streamed(client, "completions", stops)
        async with client.get("/metrics") as metrics:
            choices = [(one["text"], one["finish_reason"], one["logprobs"]["tokens"]) for one in whole["choices"]]
            return choices, whole["usage"], last["usage"], await metrics.text()

    plain = Server(partial(Worker, Engine(MODEL, rows=2, max_len=64, piece=16)), OWN, "tiny")
    expected = talk(plain, use)
    with remote() as (server, pipe, lost):
        found = talk(server, use)
    assert found[:3] == expected[:3]
    assert "llmtrain_generation_tokens_total 0" not in found[3] and not lost and not pipe.requests


def test_a_client_that_goes_away_frees_its_row_there():
    async def use(client: Any) -> None:
        asked = asyncio.create_task(post(client, "completions", {"prompt": "a", "max_tokens": 60, "ignore_eos": True}))
        while not pipe.worker.engine.live:
            await asyncio.sleep(0.001)
        asked.cancel()
        while pipe.worker.engine.busy:
            await asyncio.sleep(0.001)

    with remote() as (server, pipe, _):
        talk(server, use)
    assert not pipe.requests and server.requests == 0


def test_an_engine_whose_process_ends_is_reported_and_ends_answers():
    async def use() -> Any:
        async with served(server) as client:
            body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
            asked = asyncio.create_task(post(client, "completions", body))
            while not pipe.worker.engine.live:
                await asyncio.sleep(0.001)
            with socket.socket(fileno=os.dup(pipe.connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
            return await asked, await post(client, "completions", body)

    with remote() as (server, pipe, lost):
        (status, answer), (later, _) = asyncio.run(use())
    assert (
        status == later == 503 and "the engine failed or was ended" in answer["error"]["message"] and lost == ["lost"]
    )
