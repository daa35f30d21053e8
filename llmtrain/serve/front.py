"""The process of a server that speaks HTTP: `python -m llmtrain.serve.front CONNECTION SOCKET`, numbers of what it inherits from
the engine's (engine_process.py). It imports no torch, and ends with that process."""

import contextlib
import os
import signal
import socket
import sys
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from llmtrain.data.chat.template import ChatError, find_template
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.errors import exit_with
from llmtrain.serve.app import Limits, Server
from llmtrain.serve.remote import RemoteEngine
from llmtrain.serve.run import SIGNALS, serve


class Setup(NamedTuple):
    """name: of the model. chat_template: as `find_template` takes it."""

    tokenizer: TextTokenizer
    name: str
    chat_template: str | None
    key: str | None
    limits: Limits
    drain_seconds: float


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until `serve` takes them
    connection, listening = Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    try:
        sizes, state, setup = connection.recv()
    except (EOFError, OSError):  # the model could not be loaded
        return 1
    return serve(make_server(connection, sizes, state, setup), listening, setup.drain_seconds)


def make_server(connection: Connection, sizes: Any, state: Any, setup: Setup) -> Server:
    template, missing = None, ""
    try:
        template = find_template(setup.tokenizer, setup.chat_template)
        with contextlib.suppress(ChatError):  # what it imports takes seconds, which the first request need not wait for
            template.render([{"role": "user", "content": "."}])
    except ChatError as error:
        missing = f"the model has no chat template, which /v1/chat/completions needs ({error})"
    engine = partial(RemoteEngine, connection, sizes, state, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return Server(
        engine,
        setup.tokenizer,
        setup.name,
        template=template,
        no_template=missing,
        key=setup.key,
        limits=setup.limits,
    )


if __name__ == "__main__":
    exit_with(main)
